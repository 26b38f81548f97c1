"""The candidates of the benchmark: all methods of this package, and installed third-party implementations."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, util
from typing import Any, Literal

import torch

from deltasam.lab.bench._workbench import Optimizer, Workbench
from deltasam.lab.bench.options import AdamW, Way
from deltasam.lab.catalogue import METHODS, find_method
from deltasam.lab.plugins import load_plugins
from deltasam.methods import ERM, DeltaSAM, Method, PerInstanceSAM
from deltasam.objectives import R3F, SMART, VAT, Objective, RDrop
from deltasam.step.names import look_up
from deltasam.weighting import Directional, FiniteDifference

Work = Callable[[], None]
REGULARISERS: dict[str, Callable[[Objective], Objective]] = {
    "RDrop": RDrop,
    "R3F": R3F,
    "SMART": lambda objective: SMART(objective, total_steps=1000),
    "VAT": VAT,
}
VARIANTS: dict[str, Callable[[], Method]] = {
    # Probes in the precision of the other passes: two extra forwards even with autocast and TF32.
    "DeltaSAM-ambient": lambda: DeltaSAM(weighting=FiniteDifference(precision="ambient")),
    "DeltaSAM-every-4": lambda: DeltaSAM(weighting=FiniteDifference(precision="ambient"), probe_every=4),
    "PerInstanceSAM-loop": lambda: PerInstanceSAM(engine="loop"),  # one instance at a time, as in the paper
    "PerInstanceSAM-exact": lambda: PerInstanceSAM(factors="exact"),  # the default rounds factors with TF32
    "DeltaSAM-directional": lambda: DeltaSAM(weighting=Directional()),
}
GRAPHS = ("cuda",)  # devices with CUDA graphs
PERIODS = ("k", "probe_every")  # hyperparameters that set how often a method takes its expensive step


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes:
        name: The method, with the way it runs and the AdamW implementation if they are not the defaults.
        origin: This package, or a third-party one.
        build: Returns a function that takes one training step, including the optimizer's.
        method: The method. Candidates of the same method take the same passes.
        way: How to run it.
        build_eager: The same step in eager mode, to count passes: a replayed graph calls no hooks.
        period: Number of steps until the costs repeat. A method is timed over whole periods.
        adamw: The implementation of AdamW, if it is not the default one.
        first_steps: Number of steps before the timing.
    """

    name: str
    origin: Literal["deltasam", "third_party"]
    build: Callable[[Workbench, Optimizer], Work]
    method: str = ""
    way: Way = "eager"
    build_eager: Callable[[Workbench, Optimizer], Work] | None = None
    period: int = 1
    adamw: AdamW | None = None
    first_steps: int = 1


def candidates(
    names: tuple[str, ...],
    *,
    ways: tuple[Way, ...] = ("eager",),
    third_party: bool,
    embeddings: bool,
    adapters: bool = False,
    adamw: tuple[AdamW, ...] = (),
    accumulate: int = 1,
) -> list[Candidate]:
    """Returns ERM, SAM and the named methods (all if none is named), then the third-party implementations.

    Args:
        names: Methods, with or without options, and regularisers. A regulariser is measured with plain training.
        ways: How to run each method. ERM and SAM always run eagerly as well, as the basis of comparison.
        third_party: Whether to include installed third-party implementations.
        embeddings: Whether the model has input embeddings, which some methods and the regularisers perturb.
        adapters: Whether the model has adapters, which some methods need.
        adamw: Further implementations of AdamW, to be measured with ERM and SAM.
        accumulate: If more than 1, each method is also measured over this many batches in one step.
    """
    load_plugins()
    of_embeddings = {name for name, kind in METHODS.items() if "embeddings" in kind.__dataclass_fields__}
    every = [*METHODS, *REGULARISERS] if embeddings else [name for name in METHODS if name not in of_embeddings]
    every = [name for name in every if adapters or name not in METHODS or not METHODS[name].needs_adapters]
    chosen = ("ERM", "SAM", *(names or every))
    parts = dict.fromkeys((1, accumulate))
    entries = [named(name) for name in ("ERM", "SAM")]
    entries += [named(name, way, parts=number) for number in parts for way in ways for name in chosen]
    entries += [
        replace(entry, name=f"{entry.name}, {kind} AdamW", adamw=kind) for kind in adamw for entry in entries[:2]
    ]
    ours = {entry.name: entry for entry in entries}
    return [*ours.values(), *(_third_party(embeddings=embeddings) if third_party else [])]


def named(text: str, way: Way = "eager", *, parts: int = 1) -> Candidate:
    """Returns a candidate by name, or by ``name:option=value,option=value``; ``parts`` as in :func:`of_method`.

    Raises:
        ValueError: The name is unknown, or an option does not fit the method.
    """
    name, _, own = text.partition(":")
    known = look_up({each: each for each in (*REGULARISERS, *VARIANTS)}, name)
    if own:
        if known is not None:
            raise ValueError(f"methods={text}: {known} takes no options here")
        return of_method(*_with_options(text, find_method(name), own), way=way, parts=parts)
    if known is None:
        return of_method(find_method(name), way=way, parts=parts)
    return of_method(VARIANTS.get(known, ERM), known, wrap=REGULARISERS.get(known), way=way, parts=parts)


def _with_options(text: str, kind: type[Method], own: str) -> tuple[Callable[[], Method], str]:
    """Returns the method with these options, and its name in the table."""
    options: dict[str, Any] = {}
    for part in own.split(","):
        option, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"methods={text}: write options as name:option=value,option=value")
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # text without quotes
            options[option] = value
    make = partial(kind, **options)
    try:
        make()
    except (TypeError, ValueError) as error:
        raise ValueError(f"methods={text}: {error}") from error
    return make, f"{kind.__name__}({', '.join(own.split(','))})"


def of_method(
    make: Callable[[], Method],
    name: str | None = None,
    *,
    wrap: Callable[[Objective], Objective] | None = None,
    way: Way = "eager",
    parts: int = 1,
) -> Candidate:
    """Returns a method of this package in a plain training loop.

    Args:
        make: Returns the method with fresh state.
        name: Its name. Defaults to that of the class.
        wrap: Changes the objective.
        way: How to run it.
        parts: Number of micro-batches of a step; each has the size of the batch.
    """
    sample = make()
    plain = name or type(sample).__name__
    label = plain if parts == 1 else f"{plain}, {parts} micro-batches"
    period = max(int(getattr(sample, attribute, 1)) for attribute in PERIODS)
    # A captured step runs eagerly, then is recorded, then replayed. Buffers take one more eager step to allocate.
    first_steps = 1 if way == "eager" else 2 * period + 1 + bool(sample.buffers)

    def build(bench: Workbench, optimizer: Optimizer) -> Work:
        method = make()  # with fresh state
        objective = bench.objective if wrap is None else wrap(bench.objective)
        model = bench.compiled() if "compiled" in way else bench.model
        batch = bench.batch if parts == 1 else bench.micro_batches(parts)
        if "captured" in way:
            return _captured(bench, method, model, batch, objective, optimizer)
        stepper = optimizer.over(bench.model)

        def work() -> None:
            with bench.precision():
                method.backward(model, batch, objective)
            stepper.step()
            stepper.zero_grad()

        return work

    return Candidate(
        name=label if way == "eager" else f"{label} {way}",
        origin="deltasam",
        build=build,
        method=label,
        way=way,
        build_eager=None if way == "eager" else of_method(make, plain, wrap=wrap, parts=parts).build,
        period=period,
        first_steps=first_steps,
    )


def _captured(
    bench: Workbench, method: Method, model: Any, batch: Any, objective: Objective, optimizer: Optimizer
) -> Work:
    """Returns the whole step, including the optimizer's, as a CUDA graph. Raises where there are no CUDA graphs."""
    from deltasam.speed.capture import Captured

    if bench.device.type not in GRAPHS:
        raise RuntimeError(f"not captured: there are no CUDA graphs on a {bench.device.type.upper()}")

    captured = Captured(method, optimizer=optimizer.over(bench.model, captured=True))

    def work() -> None:
        with bench.precision():
            captured.step(model, batch, objective)
        if captured.report.obstacles:  # it ran eagerly
            raise RuntimeError(f"not captured: {next(iter(captured.report.obstacles))}")

    return work


def _third_party(*, embeddings: bool) -> list[Candidate]:
    """Returns the installed third-party implementations."""
    found = []
    if util.find_spec("pytorch_optimizer") is not None:
        found += [_closure_style(name) for name in ("SAM", "FriendlySAM", "LookSAM")]
    if embeddings and util.find_spec("smart_pytorch") is not None:
        found.append(Candidate("smart_pytorch.SMARTLoss", "third_party", _smart_pytorch))
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

    return Candidate(f"pytorch_optimizer.{name}", "third_party", build, period=10 if name == "LookSAM" else 1)


def _smart_pytorch(bench: Workbench, optimizer: Optimizer) -> Work:
    """Returns SMART's adversarial term as its package documents it: embeddings in, logits out, symmetric KL."""
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
