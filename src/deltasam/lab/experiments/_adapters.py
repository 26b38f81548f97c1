"""LoRA adapters of a run's model, from PEFT, which is imported on first use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._sections import Lora

# PEFT trains a new head along with the adapters if it knows the kind of the model.
_KINDS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def add_adapters(model: Any, lora: Lora) -> Any:
    """Returns the model with new adapters, which alone are trained, and a new head, if it has one.

    Raises:
        ConfigError: PEFT is not installed, or the model cannot have adapters in these layers.
    """
    check_installed()
    from peft import LoraConfig, get_peft_model

    kind = next((kind for end, kind in _KINDS.items() if type(model).__name__.endswith(end)), None)
    targets = lora.targets if len(lora.targets) > 1 else lora.targets[0]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        task_type=kind,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets={list(lora.targets)}: {error}") from error


def load_adapters(model: Any, folder: str) -> Any:
    """Returns the model with the adapters that a run has saved, trainable as they were."""
    check_installed()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def check_installed() -> None:
    """Raises a ConfigError if PEFT is not installed."""
    if find_spec("peft") is None:
        raise ConfigError("model.lora: needs peft, which is not installed: pip install 'deltasam[peft]'")
