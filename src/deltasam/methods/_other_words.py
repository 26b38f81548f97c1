"""What to write in the place of a keyword, or a state, that a method does not have, such as one of another package."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from deltasam.step.checks import shown
from deltasam.step.names import suggest

_BACKWARD = "a method is given it in every step, method.backward(model, batch, objective)"
_OPTIMIZER = (
    "the optimizer stays yours and steps after method.backward(model, batch, objective); or, in a loop with closures, "
    "deltasam.integrations.MethodOptimizer(optimizer, method, model)"
)
_SCHEDULE = "change it between steps, method = method.replace(rho=schedule(t)), which keeps what it state_keys"
_DIVISION = "nothing is added to the norm that is divided by: a step without a gradient is noted as skipped"

_SAID = {
    "adaptive": "the adaptive method is ASAM(rho=0.5)",
    **dict.fromkeys(("base_optimizer", "optimizer", "optimizer_class"), _OPTIMIZER),
    **dict.fromkeys(("model", "batch", "objective", "loss", "loss_fn", "criterion", "closure"), _BACKWARD),
    **dict.fromkeys(("rho_scheduler", "scheduler", "rho_max", "rho_min"), _SCHEDULE),
    **dict.fromkeys(("eps", "perturb_eps"), _DIVISION),
}
_OF_OPTIMIZERS = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "betas"), "AdamW"),
    **dict.fromkeys(("momentum", "nesterov"), "SGD"),
}
# other words for a hyperparameter, where the method has it
_OURS = {
    **dict.fromkeys(("radius", "epsilon", "eps_norm", "sam_rho", "perturbation_radius"), "rho"),
    "gsam_alpha": "alpha",
    **dict.fromkeys(("frequency", "every", "sam_every", "interval"), "k"),
    **dict.fromkeys(("update_freq", "fisher_every"), "refresh"),
    **dict.fromkeys(("adv_init_mag", "init_mag"), "init_magnitude"),
    "adv_max_norm": "max_norm",
    **dict.fromkeys(("norm_type", "adv_norm_type"), "norm"),
    **dict.fromkeys(("random_seed", "generator"), "seed"),
}


def no_such_hyperparameter(kind: type, name: str, value: Any, known: Collection[str]) -> str:
    """The sentence for a keyword that a method does not have.

    Args:
        kind: The class of the method.
        name: The keyword.
        value: What it was set to.
        known: The keywords that it has.
    """
    return f"{kind.__name__} has no hyperparameter {name}={shown(value)}; {_way_out(kind, name, value, known)}"


def _way_out(kind: type, name: str, value: Any, known: Collection[str]) -> str:
    if name == "adaptive" and kind.__name__ == "ASAM":
        return "ASAM is adaptive as it is"
    if name in _SAID:
        return _SAID[name]
    if name in _OF_OPTIMIZERS:
        setting = f"{'lr' if name == 'learning_rate' else name}={shown(value)}"
        return f"it is the optimizer's, torch.optim.{_OF_OPTIMIZERS[name]}(model.parameters(), {setting})"
    if name == "rho" and "adv_lr" in known:
        return f"{kind.__name__} perturbs embeddings: adv_lr, init_magnitude and max_norm say how far"
    if name == "sparsity" and "keep" in known:
        return "it has the share of entries that are perturbed, keep=1 - sparsity"
    if name == "samples" and "weighting" in known:
        return f"it is the weighting's, weighting=FiniteDifference({name}={shown(value)})"
    if _OURS.get(name) in known:
        return f"did you mean {_OURS[name]}?"
    near = suggest(name, known)
    others = _who_has(name)
    if others and not near.startswith("did"):
        return f"{others}; here {near}"
    return f"{near} {others}" if others else near


def check_state(kind: str, state: Iterable[Any], known: Collection[str]) -> None:
    """Refuses what a method does not remember.

    Args:
        kind: The name of the method.
        state: The names in what is to be its state.
        known: What it remembers; a dot and something else may follow.

    Raises:
        ValueError: A name is not known.
    """
    name = next((name for name in state if str(name).split(".")[0] not in known), None)
    if name is not None:
        whose = _listed("state_keys", str(name).split(".")[0])
        raise ValueError(
            f"state has {name!r}, which {f'is that of {whose}, not of' if whose else 'is not remembered by'} {kind}: "
            f"give what method.state_dict() of a {kind} gave, or {{}} to start afresh"
        )


def _who_has(name: str) -> str:
    whose = _listed("__dataclass_fields__", name)
    return whose and f"{whose} {'have' if ' and ' in whose else 'has'} {name}"


def _listed(table: str, name: str) -> str:
    """The methods in one of whose tables this name is, as a list in words."""
    from deltasam import methods  # late: it imports this

    kinds = [(other, getattr(methods, other)) for other in methods.__all__]
    *first, last = [other for other, kind in kinds if name in getattr(kind, table, ())] or [""]
    return f"{', '.join(first)} and {last}" if first else last
