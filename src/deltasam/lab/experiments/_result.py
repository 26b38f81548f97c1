"""What a run came to: the schema of ``result.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltasam.lab.experiments._errors import ConfigError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished run. Every field is a key of ``result.json``.

    Attributes:
        schema: Version of this schema.
        run_id: Hash of the configuration.
        task: Name of the task.
        model: The model as it was named.
        method: Class of the method, and of the regularisers, joined by ``+``.
        seed: Seed of the run.
        primary_metric: Name of the metric that runs are compared by.
        primary_value: Its value for the final weights.
        higher_is_better: Whether more of it is better.
        best_value: Its best value among the evaluations of the run, the final one included.
        best_step: The update after which it was reached.
        metrics: All metrics for the final weights.
        steps: Updates made.
        train_rows: Rows trained on.
        eval_rows: Rows evaluated on.
        origins: Where the splits came from.
        parameters: Trainable parameters of the model.
        train_seconds: Wall time of the training without evaluation, also over interruptions.
        eval_seconds: Wall time of the evaluations.
        forward_passes: Forward passes of the training.
        backward_passes: Backward passes of the training.
        skipped_steps: Steps that left the perturbation out because its gradient was zero or not finite.
        peak_memory_bytes: Of the GPU's memory, or of the process on a CPU.
        device: What was computed on.
        config: The configuration as resolved.
        environment: Versions, platform and commit.
    """

    schema: int = SCHEMA
    run_id: str
    task: str
    model: str
    method: str
    seed: int
    primary_metric: str
    primary_value: float
    higher_is_better: bool
    best_value: float
    best_step: int
    metrics: dict[str, float]
    steps: int
    train_rows: int
    eval_rows: int
    origins: dict[str, str]
    parameters: int
    train_seconds: float
    eval_seconds: float
    forward_passes: int
    backward_passes: int
    skipped_steps: int
    peak_memory_bytes: int
    device: str
    config: dict[str, Any] = field(repr=False)
    environment: dict[str, str] = field(repr=False)

    @property
    def score(self) -> float:
        """What settings are chosen by: the primary metric, or nan if any metric is not finite.

        A model whose weights are not finite predicts one class, which may well be the most frequent one.
        """
        return self.primary_value if all(map(math.isfinite, self.metrics.values())) else math.nan

    def to_json(self) -> str:
        """The content of ``result.json``."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file.

        Raises:
            ConfigError: The file is no result, or one of another version of this package.
        """
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            if int(found.get("schema", SCHEMA)) > SCHEMA:
                raise ConfigError(
                    f"{path}: written by a newer version of deltasam (schema {found['schema']}, this one knows "
                    f"{SCHEMA}); update the package, or choose another folder by --output"
                )
            needed = (f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING)
            missing = next((name for name in needed if name not in found), None)
            if missing is not None:
                raise ValueError(f"it has no {missing}")
            found["primary_value"] = float(found["primary_value"])
            found["metrics"] = {name: float(value) for name, value in dict(found["metrics"]).items()}
            return cls(**found)
        except ConfigError:
            raise
        except (OSError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: not a result of this version ({error}); remove it, and the run is made again"
            ) from error


def rank(value: float, *, higher_is_better: bool) -> tuple[bool, float]:
    """What to take the greatest of to have the best value; one that is not finite, of a run that diverged, is last.

    Example:
        >>> max([float("nan"), 0.5, 0.7], key=lambda value: rank(value, higher_is_better=True))
        0.7
    """
    if not math.isfinite(value):
        return False, 0.0
    return True, value if higher_is_better else -value
