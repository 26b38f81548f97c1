"""``deltasam check``: accepts what the package writes and what the page describes, and names what is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.cli import main
from deltasam.lab.experiments import Result
from deltasam.lab.report import TABLES, read_runs
from deltasam.lab.report.checks import LARGEST, OPTIONAL, REQUIRED, SCHEMA, check_result, check_runs
from helpers.data import REPOSITORY

GOLDEN = Path(__file__).parent / "golden/runs"
PAGE = (REPOSITORY / "results/README.md").read_text()


@pytest.fixture
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sorted(GOLDEN.rglob("result.json"))[0].read_text())
    return found


def write(folder: Path, content: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(content))
    return folder


def test_the_fields_are_those_of_a_result() -> None:
    fields = {field.name: field for field in dataclasses.fields(Result)}
    assert fields.keys() <= REQUIRED.keys() | OPTIONAL.keys()
    needed = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    assert needed == REQUIRED.keys()
    assert fields["schema"].default == SCHEMA


def test_runs_of_this_package_pass() -> None:
    finished = [run.path for run in read_runs(GOLDEN).finished]
    assert len(finished) > 10
    assert not [problem for run in finished for problems in check_runs(run).values() for problem in problems]


def test_the_results_behind_the_pages_pass() -> None:
    found = check_runs(REPOSITORY / "results" / "frontier", REPOSITORY / "results" / "llm-radius")
    assert len(found) > 50
    assert not {run: problems for run, problems in found.items() if problems}


def test_the_example_of_the_page_passes_and_is_in_the_table(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    example = json.loads(text)
    assert not list(check_result(example))
    for seed in (1, 2, 3):
        run = {**example, "run_id": f"next-{seed}", "seed": seed, "config": {**example["config"], "seed": seed}}
        write(tmp_path / f"{seed}", run)
    assert main(["check", str(tmp_path)]) == 0
    table = TABLES["glue"](read_runs(tmp_path))
    (row,) = (row for row in table.rows if "NextSAM" in row.method)
    assert [len(cell.values) for cell in row.cells.values() if cell.values] == [3]


def test_the_page_describes_every_field() -> None:
    described = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## The file")[2], flags=re.MULTILINE)
    assert set(described) == REQUIRED.keys() | OPTIONAL.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": None}, "seed=None: must be an integer"),
        ({"seed": True}, "seed=True: must be an integer"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"schema": 2}, "schema=2: this version knows 1"),
        ({"primary_metric": "acc"}, "primary_metric='acc': metrics has no such entry"),
        ({"primary_value": 0.123}, "both must be the value of the final weights"),
        ({"metrics": {"accuracy": "0.8"}}, "metrics.accuracy='0.8': must be a number"),
        ({"trian_rows": 5}, "trian_rows: unknown field; did you mean train_rows?"),
        ({"model": "/models/bert"}, "model='/models/bert': a path of your machine"),
        ({"model": r"C:\models\bert"}, "a path of your machine"),
        ({"method": "Other"}, "must be the first part of method='Other'"),
        ({"config": {}}, "config.task=None"),
        ({"reliability": {"evaluation": [[1, 0.5]]}}, "reliability.evaluation: must be a list of bins"),
    ],
)
def test_what_is_wrong_is_named(result: dict[str, Any], change: dict[str, Any], message: str) -> None:
    assert not list(check_result(result))
    assert message in "\n".join(check_result({**result, **change}))


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(result: dict[str, Any], field: str) -> None:
    del result[field]
    assert any(problem.startswith(f"{field} is missing") for problem in check_result(result))


@pytest.mark.parametrize("section", ["task", "model", "method", "regularisers", "optimizer"])
def test_a_section_that_the_tables_read_is_named(result: dict[str, Any], section: str) -> None:
    del result["config"][section]
    assert any(problem.startswith(f"config.{section}=None") for problem in check_result(result))


def test_a_metric_that_is_not_finite_is_no_error(result: dict[str, Any]) -> None:
    result["metrics"][result["primary_metric"]] = result["primary_value"] = None
    assert not list(check_result(result))


def test_reliability_is_accepted(result: dict[str, Any]) -> None:
    assert not list(check_result({**result, "reliability": {"evaluation": [[0, None, None], [3, 0.9, 1.0]]}}))


def test_a_run_id_occurs_once_in_a_folder(result: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "sweep/a", result), write(tmp_path / "sweep/b", result), write(tmp_path / "other/a", result)
    found = {str(run.relative_to(tmp_path)): problems for run, problems in check_runs(tmp_path).items() if problems}
    assert list(found) == ["sweep/b"]
    assert "a has it, too" in found["sweep/b"][0]


def test_weights_are_not_shared(result: dict[str, Any], tmp_path: Path) -> None:
    model = write(tmp_path / "a", result) / "model/model.safetensors"
    model.parent.mkdir()
    model.write_bytes(bytes(LARGEST + 1))
    assert "model/model.safetensors has 1 MB" in check_runs(tmp_path)[tmp_path / "a"][0]


def test_the_command_fails_for_a_damaged_run(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "good", result)
    (write(tmp_path / "bad", {}) / "result.json").write_text("{")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text("")
    assert main(["check", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "bad: result.json is not JSON" in shown
    assert "unfinished: there is no result.json" in shown
    assert "3 runs, 2 with problems" in shown


def test_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
