"""The result of a run: the schema of ``result.json``."""

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
        model: The model as named in the configuration.
        method: Names of the method, the regularisers and the average of the weights, joined by ``+``.
        seed: Seed of the run.
        primary_metric: Name of the metric by which runs are compared.
        primary_value: Its value for the final weights.
        higher_is_better: Whether higher values of it are better.
        best_value: Its best value among all evaluations of the run, including the final one.
        best_step: The update at which it was reached.
        metrics: All metrics for the final weights.
        steps: Number of updates.
        train_rows: Number of training rows.
        eval_rows: Number of evaluation rows.
        origins: Where the splits were loaded from.
        parameters: Number of trainable parameters.
        train_seconds: Wall time of the training without evaluation, summed over interruptions.
        eval_seconds: Wall time of the evaluations.
        forward_passes: Forward passes of the training.
        backward_passes: Backward passes of the training.
        skipped_steps: Steps without a perturbation because the gradient was zero or not finite.
        captured_steps: Steps replayed from CUDA graphs since the last interruption; an update may take several.
        peak_memory_bytes: Peak memory of the GPU, or of the process on a CPU.
        device: Name of the device.
        config: The resolved configuration.
        environment: Versions, platform and commit.
        reliability: Bins ``[count, confidence, accuracy]`` of reliability diagrams, by condition.
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
    reliability: dict[str, list[list[float]]] = field(default_factory=dict, repr=False)
    captured_steps: int = 0

    @property
    def score(self) -> float:
        """The primary metric, or nan if any metric is not finite; points of a grid are chosen by it.

        A diverged model may predict only the most frequent class and still reach a high accuracy.
        """
        return self.primary_value if all(map(math.isfinite, self.metrics.values())) else math.nan

    def to_json(self) -> str:
        """Returns the content of ``result.json``."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads a result.

        Raises:
            ConfigError: The file is not a result, or was written by a newer version.
        """
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            if int(found.get("schema", SCHEMA)) > SCHEMA:
                raise ConfigError(
                    f"{path}: written by a newer version of deltasam (schema {found['schema']}, this one knows "
                    f"{SCHEMA}); update the package, or choose another folder by --output"
                )
            needed = (f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING)
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
                f"{path}: not a result of this version ({error}); remove it to repeat the run"
            ) from error


def rank(value: float, *, higher_is_better: bool) -> tuple[bool, float]:
    """Returns a sort key: the best value has the largest one, values that are not finite have the smallest.

    Example:
        >>> max([float("nan"), 0.5, 0.7], key=lambda value: rank(value, higher_is_better=True))
        0.7
    """
    if not math.isfinite(value):
        return False, 0.0
    return True, value if higher_is_better else -value
