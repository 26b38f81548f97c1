"""The paper's setups by name: YAML files, with inheritance and one variant per method.

A file ``glue/bert-base/mrpc.yaml`` is the preset ``glue/bert-base/mrpc``. Besides the sections of a run it may have
``base`` (the file it builds on, relative to itself) and ``variants``: ``glue/bert-base/mrpc/delta-sam`` is the preset
with its variant ``delta-sam`` laid over it. Files whose name starts with ``_`` are bases only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from deltasam.experiments._components import Plain, spelled, suggest
from deltasam.experiments._config import read_yaml
from deltasam.experiments._errors import ConfigError

_HERE = Path(__file__).parents[1]


@cache
def preset_folder() -> Path:
    """Where the presets are: inside the installed package, or ``configs`` of the checkout."""
    candidates = (_HERE / "configs", _HERE.parents[1] / "configs")
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        raise ConfigError(f"the presets are missing, there is no {candidates[0]}; install the package again")
    return found


def preset_names() -> list[str]:
    """All presets, each followed by its variants."""
    root = preset_folder()
    names = []
    for path in sorted(root.rglob("*.yaml")):
        if not path.name.startswith("_"):
            name = path.relative_to(root).with_suffix("").as_posix()
            names += [name, *(f"{name}/{variant}" for variant in _read(path)["variants"])]
    return names


def load_preset(name: str, method: str | None = None) -> tuple[Plain, bool]:
    """The sections of a preset, and whether its variant for ``method`` was found and taken.

    Raises:
        ConfigError: There is no such preset; the message names the nearest one.
    """
    root = preset_folder()
    path, variant = root / f"{name}.yaml", method
    if not path.is_file():
        parent, _, last = name.rpartition("/")
        path, variant = root / f"{parent}.yaml", last
        if not path.is_file() or _variant(_read(path)["variants"], last) is None:
            raise ConfigError(f"there is no preset {name!r}; {_nearest(name)}")
    from deltasam.experiments._resolve import merge  # it takes presets from here

    sections = dict(_read(path))
    variants = sections.pop("variants")
    chosen = _variant(variants, variant) if variant is not None else None
    if chosen is None:
        return sections, False
    taken_for_method = method is not None and spelled(chosen) == spelled(method)
    return merge(sections, variants[chosen] or {}), taken_for_method


def _read(path: Path) -> Plain:
    from deltasam.experiments._resolve import merge

    own = read_yaml(path)
    base: Plain = _read((path.parent / own.pop("base")).resolve()) if "base" in own else {"variants": {}}
    return merge(base, own)


def _variant(variants: dict[str, Any], name: str) -> str | None:
    return next((known for known in variants if spelled(known) == spelled(name)), None)


def _nearest(name: str) -> str:
    hint = suggest(name, preset_names())
    return hint if hint.startswith("did") else "`deltasam list presets` has them all"
