"""Who takes part: every method of this package, and the implementations of others that are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, util
from typing import Any, Literal

import torch

from deltasam.lab.bench._optimizers import Optimizer
from deltasam.lab.bench._workbench import Workbench
from deltasam.lab.bench.options import AdamW, Way
from deltasam.lab.catalogue import METHODS, find_method
from deltasam.lab.plugins import load_plugins
from deltasam.methods import ERM, DeltaSAM, Method, PerInstanceSAM
from deltasam.objectives import R3F, SMART, VAT, Objective, RDrop
from deltasam.step.names import spelled
from deltasam.weighting import Directional, FiniteDifference

Work = Callable[[], None]
REGULARISERS: dict[str, Callable[[Objective], Objective]] = {
    "RDrop": RDrop,
    "R3F": R3F,
    "SMART": lambda objective: SMART(objective, total_steps=1000),
    "VAT": VAT,
}
VARIANTS: dict[str, Callable[[], Method]] = {
    # probes in the precision of the other passes: two extra forwards also under autocast and TF32
    "DeltaSAM-ambient": lambda: DeltaSAM(weighting=FiniteDifference(precision="ambient")),
    "DeltaSAM-every-4": lambda: DeltaSAM(weighting=FiniteDifference(precision="ambient"), probe_every=4),
    "PerInstanceSAM-loop": lambda: PerInstanceSAM(engine="loop"),  # one instance after the other, as the paper has it
    "PerInstanceSAM-exact": lambda: PerInstanceSAM(factors="exact"),  # the default rounds where TF32 does
    "DeltaSAM-directional": lambda: DeltaSAM(weighting=Directional()),
}
GRAPHS = ("cuda",)  # the devices on which steps can be captured
PERIODS = ("k", "probe_every")  # the hyperparameters by which a method says how often it takes its expensive step


@dataclass(frozen=True)
class Candidate:
    """One row of the table: ``build`` makes a function that takes one training step, optimizer included.

    Attributes:
        name: The method, with the way it runs and the AdamW behind it where they are not the usual ones.
        origin: Ours or the field's.
        build: Makes the step, for a workbench and an optimizer.
        method: The method alone; those of one name take the same passes.
        way: How it runs.
        ordinary: The same step run eagerly, to count passes: a replayed graph calls no hooks.
        period: Steps until the costs repeat; a method with a rare expensive step is timed over a whole period.
        adamw: The implementation of AdamW, if not the one behind all others.
    """

    name: str
    origin: Literal["deltasam", "field"]
    build: Callable[[Workbench, Optimizer], Work]
    method: str = ""
    way: Way = "eager"
    ordinary: Callable[[Workbench, Optimizer], Work] | None = None
    period: int = 1
    adamw: AdamW | None = None

    @property
    def tries(self) -> int:
        """Steps until nothing is done for the first time: a captured one is ordinary, then recorded, then replayed."""
        return 1 if self.way == "eager" else 2 * self.period + 1


def candidates(
    names: tuple[str, ...],
    *,
    ways: tuple[Way, ...] = ("eager",),
    with_field: bool,
    embeddings: bool,
    adamw: tuple[AdamW, ...] = (),
) -> list[Candidate]:
    """ERM, SAM and the named methods (all if none is named), then the installed packages of others.

    Args:
        names: Methods and regularisers; a regulariser is measured under plain training.
        ways: How to run each of them; ERM and SAM run eagerly in any case, everything is compared with those.
        with_field: Also the packages of others.
        embeddings: The model has input embeddings, which some methods and the regularisers perturb.
        adamw: Further implementations of AdamW, to run ERM and SAM with.
    """
    load_plugins()
    of_embeddings = {name for name, kind in METHODS.items() if kind.perturbs == "embeddings"}
    every = [*METHODS, *REGULARISERS] if embeddings else [name for name in METHODS if name not in of_embeddings]
    chosen = ("ERM", "SAM", *(names or every))
    entries = [_named(name) for name in ("ERM", "SAM")] + [_named(name, way) for way in ways for name in chosen]
    entries += [
        replace(entry, name=f"{entry.name}, {kind} AdamW", adamw=kind) for kind in adamw for entry in entries[:2]
    ]
    ours = {entry.name: entry for entry in entries}
    return [*ours.values(), *(field(embeddings=embeddings) if with_field else [])]


def _named(name: str, way: Way = "eager") -> Candidate:
    for known, kind in REGULARISERS.items():
        if spelled(name) == spelled(known):
            return of_method(ERM, known, wrap=kind, way=way)
    for known, make in VARIANTS.items():
        if spelled(name) == spelled(known):
            return of_method(make, known, way=way)
    return of_method(find_method(name), way=way)


def of_method(
    make: Callable[[], Method],
    name: str | None = None,
    *,
    wrap: Callable[[Objective], Objective] | None = None,
    way: Way = "eager",
) -> Candidate:
    """A method of this package, in the loop its users write, over an objective that ``wrap`` may change."""
    sample = make()
    label = name or type(sample).__name__

    def build(bench: Workbench, optimizer: Optimizer) -> Work:
        method = make()  # its own state
        objective = bench.objective if wrap is None else wrap(bench.objective)
        model = bench.compiled() if "compiled" in way else bench.model
        if "captured" in way:
            return _captured(bench, method, model, objective, optimizer)
        stepper = optimizer.over(bench.model)

        def work() -> None:
            with bench.precision():
                method.backward(model, bench.batch, objective)
            stepper.step()
            stepper.zero_grad()

        return work

    return Candidate(
        name=label if way == "eager" else f"{label} {way}",
        origin="deltasam",
        build=build,
        method=label,
        way=way,
        ordinary=None if way == "eager" else of_method(make, label, wrap=wrap).build,
        period=max(int(getattr(sample, attribute, 1)) for attribute in PERIODS),
    )


def _captured(bench: Workbench, method: Method, model: Any, objective: Objective, optimizer: Optimizer) -> Work:
    """The whole step, optimizer included, as a CUDA graph, and where there are none, an error."""
    from deltasam.speed.capture import Captured

    if bench.device.type not in GRAPHS:
        raise RuntimeError(f"not captured: there are no CUDA graphs on a {bench.device.type.upper()}")

    captured = Captured(method, optimizer=optimizer.over(bench.model, captured=True))

    def work() -> None:
        with bench.precision():
            captured.step(model, bench.batch, objective)
        if captured.report.obstacles:  # it would be an ordinary step under a false name
            raise RuntimeError(f"not captured: {next(iter(captured.report.obstacles))}")

    return work


def field(*, embeddings: bool) -> list[Candidate]:
    """The implementations of other packages, as far as they are installed here."""
    found = []
    if util.find_spec("pytorch_optimizer") is not None:
        found += [_closure_style(name) for name in ("SAM", "FriendlySAM", "LookSAM")]
    if embeddings and util.find_spec("smart_pytorch") is not None:
        found.append(Candidate("smart_pytorch.SMARTLoss", "field", _smart_pytorch))
    return found


def _closure_style(name: str) -> Candidate:
    def build(bench: Workbench, optimizer: Optimizer) -> Work:
        kind = getattr(import_module("pytorch_optimizer"), name)
        stepper = kind(bench.model.parameters(), optimizer.kind, **optimizer.options)

        def closure() -> torch.Tensor:
            with bench.precision():
                loss = bench.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        def work() -> None:
            closure()
            stepper.step(closure)
            stepper.zero_grad()

        return work

    return Candidate(f"pytorch_optimizer.{name}", "field", build, period=10 if name == "LookSAM" else 1)


def _smart_pytorch(bench: Workbench, optimizer: Optimizer) -> Work:
    """SMART's adversarial part as its package documents it: embeddings in, logits out, symmetric KL."""
    package: Any = import_module("smart_pytorch")
    model: Any = bench.model
    stepper = optimizer.over(model)
    mask, labels = bench.batch["attention_mask"], bench.batch["labels"]

    def logits(embeddings: torch.Tensor) -> Any:
        return model(inputs_embeds=embeddings, attention_mask=mask).logits

    smart = package.SMARTLoss(logits, package.kl_loss, loss_last_fn=package.sym_kl_loss)

    def work() -> None:
        with bench.precision():
            embeddings = model.get_input_embeddings()(bench.batch["input_ids"])
            state = logits(embeddings)
            loss = torch.nn.functional.cross_entropy(state.float(), labels) + smart(embeddings, state)
        loss.backward()
        stepper.step()
        stepper.zero_grad()

    return work
