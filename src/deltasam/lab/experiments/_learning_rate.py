"""The learning rate of a run that names none: chosen by the size of the model, and recorded as a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments.plain import Plain, merge
from deltasam.lab.tasks import DataError, find_model

# Below so many parameters, the learning rate. 1e-4 is the best of three on most GLUE tasks for encoders of 22M and 29M
# parameters (docs/results/measured.md). After three epochs of 600 rows of SST-2 they score 0.77 and 0.73 with it, and
# 0.54 and 0.63 at 1e-5 (one seed, batch 32; the largest class: 0.52). The other rates are usual for such sizes.
_ALL_WEIGHTS = ((50e6, 1e-4), (200e6, 3e-5), (1e9, 2e-5), (float("inf"), 1e-5))
_LORA = ((500e6, 5e-4), (float("inf"), 2e-4))


def usual_learning_rate(parameters: int, *, lora: bool = False) -> float:
    """Returns the peak learning rate for a model of this size.

    Args:
        parameters: Parameters of the model, without head and adapters.
        lora: Whether only LoRA adapters are trained.

    Example:
        >>> usual_learning_rate(22_000_000), usual_learning_rate(135_000_000, lora=True)
        (0.0001, 0.0005)
    """
    return next(lr for below, lr in (_LORA if lora else _ALL_WEIGHTS) if parameters < below)


def with_learning_rate(sections: Plain, note: Callable[[str], object] = lambda text: None) -> Plain:
    """Returns the sections of a run with a learning rate: their own, or the usual one for the model.

    Args:
        sections: The run as plain data.
        note: Called with a sentence if the learning rate was chosen.

    Raises:
        ConfigError: The run has no learning rate, and the size of its model cannot be read.
    """
    optimizer = sections.get("optimizer") or {}
    if not isinstance(optimizer, Mapping) or optimizer.get("lr") is not None:
        return sections
    model = RunConfig.from_plain({**sections, "optimizer": {}}).model
    size, lora = _parameters(model.path), model.lora is not None
    lr = usual_learning_rate(size, lora=lora)
    note(f"learning rate {lr:g} (chosen for {'LoRA on ' * lora}{_millions(size)} parameters; set optimizer.lr)")
    return merge(sections, {"optimizer": {**optimizer, "lr": lr}})


@cache  # a sweep asks for every run
def _parameters(path: str) -> int:
    """The number of parameters of a model without its head, from its configuration: no weights are loaded."""
    import torch
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(find_model(path))
        with torch.device("meta"):
            return sum(p.numel() for p in AutoModel.from_config(config).parameters())
    except (DataError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{reason} (the size of the model is needed to choose the learning rate; choose another model, or set "
            "optimizer.lr)"
        ) from error


def _millions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count:,}"
