"""The configuration of a run: task, model, method, schedule, seed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._parts import FORMER_NAMES, Regulariser, named_plain, to_method, to_regulariser, to_task
from deltasam.lab.experiments._sections import Average, Batch, Lora, ModelConfig, Optimizer, Schedule
from deltasam.lab.experiments.plain import (
    Plain,
    build,
    option_types,
    options,
    plain,
    read_yaml,
    section,
    without_later,
)
from deltasam.lab.tasks import Task
from deltasam.methods import ERM, Method
from deltasam.speed.splitting import OnOutOfMemory, check_out_of_memory
from deltasam.step.checks import check_number
from deltasam.step.names import normalized, suggest

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

# Options that do not change what is computed; they are not part of the run id.
_NOT_IDENTITY = ("data", "checkpoint_every", "capture", "on_out_of_memory", "workers")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete configuration of a run. Written to YAML and read back, it is the same run.

    Attributes:
        task: The task.
        model: The model to fine-tune.
        method: How the gradient is computed.
        regularisers: Wrapped around the task's objective, the first one innermost.
        average: Evaluate and keep an average of the weights: ``ema``, ``swa``, or options such as
            ``{kind: ema, decay: 0.99}``.
        optimizer: Options of AdamW.
        schedule: Length of the training and learning rate.
        batch: Instances per update.
        precision: ``fp32``; ``tf32``: fp32 with TF32 matrix products (CUDA); or mixed precision by autocast.
        capture: On a GPU, record steps as CUDA graphs, see :class:`~deltasam.speed.capture.Captured`. Texts are padded
            to multiples of 32 tokens, so that few shapes occur. The result is the same up to rounding.
        on_out_of_memory: ``"stop"``: the run ends with advice what to lower; ``"split"``: it continues with smaller
            parts of batches, see :class:`~deltasam.speed.splitting.Splitting`. The result is the same up to rounding
            and dropout masks.
        workers: Processes of the data loader; 0 loads in the main process.
        seed: Seeds the head, the order of the data, the dropout masks and all other random draws.
        evaluate_every: ``"epoch"``, ``"end"``, or a number of updates.
        checkpoint_every: ``"epoch"``, ``"never"``, or a number of updates; an interrupted run resumes from there.
        data: Folder with the datasets; None: ``DELTASAM_DATA``, or the hub.

    Example:
        >>> config = RunConfig.from_plain({"task": "mrpc", "model": "bert-base-cased", "method": "delta-sam"})
        >>> config.method.rho, config == RunConfig.from_plain(config.to_plain()), len(config.run_id)
        (0.01, True, 12)
    """

    task: Task
    model: ModelConfig
    method: Method = field(default_factory=ERM)
    regularisers: tuple[Regulariser, ...] = ()
    average: Average | None = field(default=None, metadata={"later": (None,)})
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = "fp32"
    capture: bool = False
    on_out_of_memory: OnOutOfMemory = "stop"
    workers: int = 0
    seed: int = 42
    evaluate_every: Literal["epoch", "end"] | int = "epoch"
    checkpoint_every: Literal["epoch", "never"] | int = "epoch"
    data: str | None = None

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every"):
            if not isinstance(getattr(self, name), str):
                check_number(name, getattr(self, name), 1, whole=True)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in 0..{2**32 - 1}, the range of NumPy's seeds")
        check_number("workers", self.workers, 0, whole=True)
        check_out_of_memory(self.on_out_of_memory, capture=self.capture)
        if self.schedule.kind == "polynomial" and self.schedule.lr_end >= self.optimizer.lr:
            raise ValueError(
                f"optimizer.lr={self.optimizer.lr} must be greater than schedule.lr_end={self.schedule.lr_end}, where "
                "the polynomial decay ends"
            )

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> RunConfig:
        """Builds the configuration from plain data, as read from YAML.

        Raises:
            ConfigError: A key is unknown, a value is wrong, or the task or model is missing.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                hint = option_hint(str(key), given) or suggest(str(key), known)
                raise ConfigError(f"{key}: unknown section of a run; {hint}")
        for key in ("task", "model"):
            if given.get(key) is None:
                raise ConfigError(f"the run has no {key}; set it by --{key} ...")
        model = {"path": given["model"]} if isinstance(given["model"], str) else given["model"]
        parts: Plain = {
            "task": to_task(given["task"]),
            "model": _section(ModelConfig, _with_lora(model), "model", given),
        }
        if given.get("method") is not None:
            parts["method"] = to_method(given["method"])
        wrappers = given.get("regularisers") or ()
        listed = [wrappers] if isinstance(wrappers, (str, Mapping)) else wrappers
        if not isinstance(listed, (list, tuple)):
            raise ConfigError(
                f"regularisers={wrappers!r}: must be a name, a mapping with `name`, or a list of them, such as [RDrop]"
            )
        parts["regularisers"] = tuple(to_regulariser(one, f"regularisers.{i}") for i, one in enumerate(listed))
        if given.get("average"):
            average = {"kind": given["average"]} if isinstance(given["average"], str) else given["average"]
            parts["average"] = _section(Average, average, "average", given)
        for name, kind in (("optimizer", Optimizer), ("schedule", Schedule), ("batch", Batch)):
            parts[name] = _section(kind, given.get(name) or {}, name, given)
        rest = {key: value for key, value in given.items() if key not in parts and key not in ("method", "average")}
        parts |= options(cls, rest, "")
        config: RunConfig = build(cls, parts, "")
        return config

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """Reads a YAML file, such as ``config.yaml`` of a run folder."""
        given = read_yaml(path)
        try:
            return cls.from_plain(given)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_plain(self) -> Plain:
        """Returns all options as plain data, defaults included."""
        chosen_by_name = {
            "task": named_plain(self.task),
            "method": named_plain(self.method),
            "regularisers": [named_plain(one) for one in self.regularisers],
        }
        names = [f.name for f in dataclasses.fields(self)]
        return {n: chosen_by_name[n] if n in chosen_by_name else plain(getattr(self, n)) for n in names}

    def to_yaml(self) -> str:
        """Returns all options as YAML."""
        return yaml.safe_dump(self.to_plain(), sort_keys=False, allow_unicode=True, width=119)

    @cached_property
    def run_id(self) -> str:
        """A hash of all options that affect the result: equal ids are the same run."""
        return hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:12]

    def with_seed(self, seed: int) -> RunConfig:
        """Returns the run with another seed. Reading and describing a run takes milliseconds: both are shared."""
        other = dataclasses.replace(self, seed=seed)
        other.__dict__["_identity"] = {**self._identity, "seed": seed}
        return other

    @cached_property
    def _identity(self) -> Plain:
        """All options that affect the result."""
        described = without_later(self, self.to_plain())
        identity = {key: value for key, value in described.items() if key not in _NOT_IDENTITY}
        identity["model"] = without_later(self.model, identity["model"])
        identity["task"] = without_later(self.task, identity["task"])
        method = without_later(self.method, identity["method"])
        if self.model.lora is not None and self.method.params == "all":  # "trained" has the id of the former "all"
            method["params"] = "trained or frozen"
        identity["method"] = {FORMER_NAMES.get(name, name): value for name, value in method.items()}
        return identity

    @property
    def run_name(self) -> str:
        """A readable name for the run folder: task, model, method, seed, id."""
        return f"{self.task.name}-{Path(self.model.path).name}-{'-'.join(self.arm)}-s{self.seed}-{self.run_id}"

    @property
    def arm(self) -> tuple[str, ...]:
        """The names of the method, the regularisers and the average of the weights."""
        averages = () if self.average is None else (self.average.name,)
        return (type(self.method).__name__, *(one.name for one in self.regularisers), *averages)


def _with_lora(model: Any) -> Any:
    """Returns the section of the model with its adapters built: from true, a rank or a mapping of options."""
    given = model.get("lora") if isinstance(model, Mapping) else None
    if given is None or given is False:
        return {**model, "lora": None} if given is False else model
    whole = {} if given is True else {"r": given} if isinstance(given, (int, float, str)) else given
    return {**model, "lora": given if isinstance(given, Lora) else section(Lora, whole, "model.lora")}


def _section(kind: type, given: Any, where: str, run: Mapping[str, Any]) -> Any:
    for key in given if isinstance(given, Mapping) else ():
        if key not in option_types(kind) and (hint := option_hint(str(key), run)):
            raise ConfigError(f"{where}.{key}: unknown option of {kind.__name__}; {hint}")
    return section(kind, given, where)


def option_hint(option: str, given: Mapping[str, Any]) -> str:
    """Returns ``did you mean schedule.epochs?`` for an option that belongs to another section; else ``""``.

    Args:
        option: The unknown option, such as ``epochs``, or section and option in one: ``batch_size``.
        given: The configuration of the run; its task and method decide which options these two have.
    """
    kinds: dict[str, type] = {"model": ModelConfig, "optimizer": Optimizer, "schedule": Schedule, "batch": Batch}
    for name, to_part in (("method", to_method), ("task", to_task)):
        with suppress(ConfigError):  # a mistake in the section itself is reported once this one is fixed
            kinds[name] = type(to_part(given.get(name)))
    kinds["average"] = Average
    places = [name for name in option_types(RunConfig) if name not in kinds]
    places += [f"{name}.{key}" for name, kind in kinds.items() for key in option_types(kind) if key != "name"]
    for place in places:
        if normalized(option) in (normalized(place.rpartition(".")[2]), normalized(place.replace(".", ""))):
            return f"did you mean {place}?"
    return ""
