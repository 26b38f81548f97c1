"""The paper's setups by name: YAML files, with inheritance and one variant per method.

The file ``glue/bert-base/mrpc.yaml`` is the preset ``glue/bert-base/mrpc``. In addition to the sections of a run it
may have ``base`` (a file that it extends, relative to itself) and ``variants``: ``glue/bert-base/mrpc/delta-sam`` is
the preset merged with its variant ``delta-sam``. Files whose name starts with ``_`` are bases only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments.plain import Plain, merge, read_yaml
from deltasam.step.names import method_key, suggest

_HERE = Path(__file__).parents[2]


@cache
def preset_folder() -> Path:
    """Returns the folder of the presets: in the installed package, or ``configs`` of the checkout."""
    candidates = (_HERE / "configs", _HERE.parents[1] / "configs")
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        raise ConfigError(f"the presets are missing, there is no {candidates[0]}; install the package again")
    return found


def preset_variants() -> dict[str, list[str]]:
    """Returns all presets by name, each with the names of its variants."""
    root = preset_folder()
    found = {path: path.relative_to(root).parts for path in sorted(root.rglob("*.yaml"))}
    files = [path for path, parts in found.items() if path.name[0] != "_" and "sweeps" not in parts]
    return {path.relative_to(root).with_suffix("").as_posix(): list(_read(path)["variants"]) for path in files}


def preset_names() -> list[str]:
    """Returns the full names of all presets, each followed by its variants."""
    return [full for name, found in preset_variants().items() for full in (name, *(f"{name}/{v}" for v in found))]


def load_preset(name: str, method: str | None = None) -> tuple[Plain, bool]:
    """Returns the sections of a preset, and whether its variant for ``method`` was found and merged."""
    root = preset_folder()
    path, variant = root / f"{name}.yaml", method
    if not path.is_file():
        parent, _, last = name.rpartition("/")
        path, variant = root / f"{parent}.yaml", last
        if not path.is_file() or _variant(_read(path)["variants"], last) is None:
            hint = suggest(name, preset_names())
            hint = hint if hint.startswith("did") else "`deltasam list presets` lists them"
            raise ConfigError(f"there is no preset {name!r}; {hint}")
    sections = dict(_read(path))
    variants = sections.pop("variants")
    chosen = _variant(variants, variant) if variant is not None else None
    if chosen is None:
        return sections, False
    return merge(sections, variants[chosen]), variant == method


@cache  # callers copy before they change it
def _read(path: Path) -> Plain:
    own = read_yaml(path)
    base: Plain = _read((path.parent / own.pop("base")).resolve()) if "base" in own else {"variants": {}}
    return merge(base, own)


def _variant(variants: dict[str, Any], name: str) -> str | None:
    """Returns the variant of this name, or the one that sets only this method."""
    for known, sections in variants.items():
        method = sections.get("method", {})
        bare = (
            not sections.keys() & {"regularisers", "average"} and isinstance(method, dict) and method.get("name", "")
        )
        if method_key(name) in (method_key(known), method_key(bare or known)):
            return known
    return None
