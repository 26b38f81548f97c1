"""Checks that a tag can be released: one version everywhere, notes in the changelog, addresses in the metadata.

    python tools/check_release.py --tag v0.2.0 --repository https://github.com/OWNER/NAME
    python tools/check_release.py --notes   # the notes of this version, for the page of the release

Runs in the release workflow, before anything is built. Uses only the standard library of Python 3.11.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import tomllib

REPOSITORY = Path(__file__).parents[1]
ADDRESSES = ("Repository", "Issues", "Changelog", "Documentation")


def versions(root: Path) -> dict[str, str]:
    """Returns the version in each file that names it; an empty one where a file does not."""
    patterns = {"src/deltasam/__init__.py": r'^__version__ = "(.*)"$', "CITATION.cff": r"^version: (.*)$"}
    found = {"pyproject.toml": project(root)["version"]}
    for name, pattern in patterns.items():
        match = re.search(pattern, (root / name).read_text(), flags=re.MULTILINE)
        found[name] = match[1] if match else ""
    found["codemeta.json"] = json.loads((root / "codemeta.json").read_text())["version"]
    return found


def project(root: Path) -> dict[str, object]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def notes(root: Path, version: str) -> str:
    """Returns the section of the changelog about a version, without its heading; empty if there is none."""
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    found = (text.partition("\n")[2] for text in sections if text.startswith(f"[{version}]"))
    return next(found, "").strip()


def problems(root: Path, tag: str, repository: str) -> list[str]:
    """Returns what prevents the release, one sentence each."""
    wanted = tag.removeprefix("v")
    found = [f"{name}: version {v!r}, but the tag is {tag}" for name, v in versions(root).items() if v != wanted]
    if not notes(root, wanted):
        found.append(f"CHANGELOG.md: no section [{wanted}]; rename [Unreleased]")
    urls = project(root).get("urls", {})
    found += [f"pyproject.toml: project.urls has no {name}" for name in ADDRESSES if name not in urls]
    if urls.get("Repository", repository).removesuffix("/") != repository.removesuffix("/"):
        found.append(f"pyproject.toml: project.urls.Repository is {urls['Repository']}, but this is {repository}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag to release, such as v0.2.0")
    parser.add_argument("--repository", help="address of the repository on the web")
    parser.add_argument("--notes", action="store_true", help="print the notes of this version")
    options = parser.parse_args()
    if options.notes:
        print(notes(REPOSITORY, project(REPOSITORY)["version"]))
        return 0
    if not options.tag or not options.repository:
        parser.error("give --tag and --repository, or --notes")
    found = problems(REPOSITORY, options.tag, options.repository)
    print("\n".join(found) or f"{options.tag} can be released")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
