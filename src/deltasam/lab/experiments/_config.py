"""The one description of a run: what is trained on what, how, and with which seed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from deltasam.lab.experiments._components import Plain, build, options, plain, without_later
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._parts import FORMER_NAMES, Regulariser, named_plain, to_method, to_regulariser, to_task
from deltasam.lab.experiments._placed import placed
from deltasam.lab.experiments._sections import Batch, ModelConfig, Optimizer, Schedule
from deltasam.lab.tasks import Task
from deltasam.methods import ERM, Method
from deltasam.speed.splitting import OnOutOfMemory, check_out_of_memory
from deltasam.step.names import suggest

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

# What says where or how often something is stored, not what is computed: it does not make a run another run.
_NOT_IDENTITY = ("data", "checkpoint_every", "capture", "on_out_of_memory", "workers")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run, described completely. Written to YAML and read back it is the same run.

    Attributes:
        task: What is learnt.
        model: What is fine-tuned.
        method: How the gradient is taken.
        regularisers: Wrapped around the task's objective, the first one innermost.
        optimizer: AdamW.
        schedule: How long, and how the learning rate moves.
        batch: Instances per update.
        precision: ``fp32``; ``tf32``: its matrix products with TF32 (CUDA); or mixed precision by autocast.
        capture: On a GPU, record steps as CUDA graphs, see :class:`~deltasam.speed.capture.Captured`; texts are then padded
            to multiples of 32 tokens, so that few shapes occur. The same run, to rounding.
        on_out_of_memory: ``"stop"``: the run ends and says what to lower; ``"split"``: it goes on with the batches in
            parts, see :class:`~deltasam.speed.splitting.Splitting`. The same run, to rounding and dropout masks.
        workers: Processes that put batches together; 0 for none.
        seed: Of the head, the order of the data, the dropout masks, and everything else that is drawn.
        evaluate_every: ``"epoch"``, ``"end"``, or a number of updates.
        checkpoint_every: ``"epoch"``, ``"never"``, or a number of updates; an interrupted run goes on from there.
        data: Folder with the datasets; the hub or ``DELTASAM_DATA`` if None.

    Example:
        >>> config = RunConfig.from_plain({"task": "mrpc", "model": "bert-base-cased", "method": "delta-sam"})
        >>> config.method.rho, config == RunConfig.from_plain(config.to_plain()), len(config.run_id)
        (0.05, True, 12)
    """

    task: Task
    model: ModelConfig
    method: Method = field(default_factory=ERM)
    regularisers: tuple[Regulariser, ...] = ()
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
        """Checks what the types do not say."""
        for name in ("evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name}={value} must be at least 1 update")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in 0..{2**32 - 1}, which is what NumPy takes")
        if self.workers < 0:
            raise ValueError(f"workers={self.workers} must be at least 0")
        check_out_of_memory(self.on_out_of_memory, capture=self.capture)
        if self.schedule.kind == "polynomial" and self.schedule.lr_end >= self.optimizer.lr:
            raise ValueError(
                f"optimizer.lr={self.optimizer.lr} must be greater than schedule.lr_end={self.schedule.lr_end}, where "
                "the polynomial decay ends"
            )

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> RunConfig:
        """The configuration from plain data, as YAML holds it.

        Raises:
            ConfigError: A key is unknown, a value is wrong, or the task or model is missing.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                hint = placed(str(key), given) or suggest(str(key), known)
                raise ConfigError(f"{key}: unknown section of a run; {hint}")
        for key in ("task", "model"):
            if given.get(key) is None:
                raise ConfigError(f"the run has no {key}; name it: --{key} ...")
        parts: Plain = {
            "task": to_task(given["task"]),
            "model": _section(ModelConfig, _model(given["model"]), "model", given),
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
        for name, kind in (("optimizer", Optimizer), ("schedule", Schedule), ("batch", Batch)):
            parts[name] = _section(kind, given.get(name) or {}, name, given)
        rest = {key: value for key, value in given.items() if key not in parts and key != "method"}
        parts |= options(cls, rest, "")
        config: RunConfig = build(cls, parts, "")
        return config

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """The configuration in a YAML file, such as ``config.yaml`` of a run folder."""
        given = read_yaml(path)
        try:
            return cls.from_plain(given)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_plain(self) -> Plain:
        """All of it as plain data, defaults included."""
        chosen_by_name = {
            "task": named_plain(self.task),
            "method": named_plain(self.method),
            "regularisers": [named_plain(one) for one in self.regularisers],
        }
        names = [f.name for f in dataclasses.fields(self)]
        return {n: chosen_by_name[n] if n in chosen_by_name else plain(getattr(self, n)) for n in names}

    def to_yaml(self) -> str:
        """All of it as YAML."""
        return yaml.safe_dump(self.to_plain(), sort_keys=False, allow_unicode=True, width=119)

    @property
    def run_id(self) -> str:
        """A hash of everything that decides the outcome: equal configurations are the same run."""
        identity = {key: value for key, value in self.to_plain().items() if key not in _NOT_IDENTITY}
        method = without_later(self.method, identity["method"])
        identity["method"] = {FORMER_NAMES.get(name, name): value for name, value in method.items()}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def run_name(self) -> str:
        """A readable name for the run folder: task, model, method, seed, id."""
        model = Path(self.model.path).name
        method = "-".join([type(self.method).__name__, *(one.name for one in self.regularisers)])
        return f"{self.task.name}-{model}-{method}-s{self.seed}-{self.run_id}"


def read_yaml(path: Path) -> Plain:
    """The mapping in a YAML file.

    Raises:
        ConfigError: There is no such file, it holds no mapping, or a key stands twice in one.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except _TwiceError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not text, or no date
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{path}: not YAML ({str(error).splitlines()[0]}{line})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a mapping such as `task: mrpc`, not {reprlib.repr(found)}")
    return found


class _TwiceError(Exception):
    """A key stands twice in a mapping."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of two equal keys without a word, made to tell."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value != "<<" and isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise _TwiceError(f"{key.value!r} stands twice in a mapping, the second time in line {line}")
            seen.add(str(key.value))
        return node


def _model(given: Any) -> Any:
    return {"path": given} if isinstance(given, str) else given


def _section(kind: type, given: Any, where: str, run: Mapping[str, Any]) -> Any:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given!r}: must be a mapping of options, such as {where}.<option>=...")
    known, of_run = ({f.name for f in dataclasses.fields(each)} for each in (kind, RunConfig))
    for key in (key for key in given if key not in known):
        if hint := f"did you mean {key}?" if key in of_run - {where} else placed(str(key), run):
            raise ConfigError(f"{where}.{key}: unknown option of {kind.__name__}; {hint}")
    return build(kind, options(kind, given, where), where)
