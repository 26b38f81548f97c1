"""LoRA adapters on all linear layers: PEFT's if it is installed, else the same computation without PEFT."""

from __future__ import annotations

from importlib import import_module, metadata, util
from typing import Any, Literal

import torch
from torch import Tensor, nn

Library = Literal["peft", "built-in"]
HALF = (torch.bfloat16, torch.float16)


class LoraLinear(nn.Module):
    r"""A frozen linear layer with a low-rank adapter, with the attributes of PEFT's layer.

    .. math:: y = W x + b + s \, B A x

    Base and adapter compute in the order and types of PEFT: the input is cast to the type of A, and the result to that
    of the base layer.
    """

    adapter_layer_names = ("lora_A", "lora_B")
    merged = False

    def __init__(self, base_layer: nn.Linear, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        inputs, outputs = base_layer.in_features, base_layer.out_features
        # PEFT makes the adapters of a half-precision base in float32 (autocast_adapter_dtype=True).
        half = base_layer.weight.dtype in HALF
        kind: dict[str, Any] = {
            "bias": False,
            "dtype": torch.float32 if half else base_layer.weight.dtype,
            "device": base_layer.weight.device,
        }
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, **kind)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, **kind)})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of the base layer plus the adapter's."""
        result: Tensor = self.base_layer(x)
        down: Any = self.lora_A["default"]
        x = self.lora_dropout["default"](x.to(down.weight.dtype))
        adapted: Tensor = self.lora_B["default"](down(x)) * self.scaling["default"]
        return (result + adapted).to(result.dtype)


def with_adapters(
    model: nn.Module, *, rank: int, dropout: float = 0.0, library: Library | None = None
) -> tuple[nn.Module, str]:
    """Returns the model with adapters on all linear layers except the head, and the library that made them.

    Everything else is frozen. Both factors of an adapter are random. PEFT would start with B = 0, where the gradient
    of A is zero.

    Args:
        model: A causal language model of transformers. It is changed in place.
        rank: Rank of the adapters; the scaling is alpha / rank = 2.
        dropout: Dropout on the inputs of the adapters.
        library: ``"peft"`` or ``"built-in"``. Defaults to PEFT if it is installed.
    """
    if library is None:
        library = "built-in" if util.find_spec("peft") is None else "peft"
    if library == "peft":
        return _with_peft(model, rank, dropout), f"peft {metadata.version('peft')}"
    return _built_in(model, rank, dropout), "built-in"


def _with_peft(model: nn.Module, rank: int, dropout: float) -> nn.Module:
    peft: Any = import_module("peft")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _built_in(model: nn.Module, rank: int, dropout: float) -> nn.Module:
    model.requires_grad_(False)
    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and layer is not head:
                setattr(parent, name, LoraLinear(layer, rank=rank, alpha=2 * rank, dropout=dropout))
    return model
