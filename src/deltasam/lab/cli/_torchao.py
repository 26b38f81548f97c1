"""The metrics of a model whose weights torchao has quantized."""

from __future__ import annotations

import copy
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasam.lab.experiments import Loaded


def torchao_metrics(loaded: Loaded, batch_size: int) -> dict[str, float]:
    """Returns the essential metrics with weights of int8 (per channel) and int4 (groups of 64).

    What is not installed, or not supported for this model or device, is skipped with a line on stderr.
    """
    if find_spec("torchao") is None:
        _skip("not installed: pip install 'deltasam[torchao]'")
        return {}
    found: dict[str, float] = {}
    for name in ("int8", "int4"):
        try:
            model = _quantized(loaded.model, name)
            measured = _essentials(loaded, model, batch_size)
        except (ImportError, AttributeError, NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
            _skip(f"{name} is not supported here ({(str(error) or repr(error)).splitlines()[0]})")
            continue
        found |= {f"{key}_torchao_{name}": value for key, value in measured.items()}
    return found


def _quantized(model: Any, name: str) -> Any:
    logging.disable(logging.WARNING)  # it warns of kernels of other machines
    try:
        quantization: Any = import_module("torchao.quantization")
        torch: Any = import_module("torch")  # its annotations lack the types below int8
        # int4 in the plain layout, which runs on every device: the fast one needs a package of kernels and a GPU.
        config = (
            quantization.Int8WeightOnlyConfig()
            if name == "int8"
            else quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(64))
        )
        copied = copy.deepcopy(model)
        quantization.quantize_(copied, config)
    finally:
        logging.disable(logging.NOTSET)
    return copied


def _essentials(loaded: Loaded, model: Any, batch_size: int) -> dict[str, float]:
    task, tokenizer, rows = loaded.task, loaded.tokenizer, loaded.rows
    if hasattr(task, "essentials"):
        outputs, _ = task.outputs(model, tokenizer, rows, batch_size=batch_size)  # type: ignore[attr-defined]
        return dict(task.essentials(outputs, rows))
    return {task.primary: task.evaluate(model, tokenizer, rows, batch_size=batch_size)[task.primary]}


def _skip(reason: str) -> None:
    print(f"torchao skipped: {reason}", file=sys.stderr)
