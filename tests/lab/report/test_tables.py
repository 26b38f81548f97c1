"""The paper's tables from real results of this project: golden files, round trips, missing cells."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from deltasam.lab.report import (
    TABLES,
    Cell,
    Column,
    Row,
    Table,
    by_cell,
    compare,
    count_wins,
    paper,
    read_runs,
    table_notes,
    to_csv,
    to_latex,
    to_markdown,
)

# Made with `deltasam sweep` from its YAML files: models of a few thousand weights, a few rows, a dozen updates.
GOLDEN = Path(__file__).parent / "golden"
WRITERS = {"md": to_markdown, "tex": to_latex, "csv": to_csv}


@pytest.fixture(scope="module")
def runs():
    return read_runs(GOLDEN / "runs")


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("name", TABLES)
def test_golden(name: str, ending: str, runs) -> None:
    """After a change on purpose: REWRITE_GOLDEN=1 pytest tests/lab/report/test_tables.py, and read the difference."""
    path = GOLDEN / f"{name}.{ending}"
    text = WRITERS[ending](TABLES[name](runs))
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert _to_ten_places(text) == _to_ten_places(path.read_text(encoding="utf-8"))


def _to_ten_places(text: str) -> str:
    """The order of summation, and with it the last digits, differs between machines."""
    return re.sub(r"-?\d+\.\d{6,}", lambda number: f"{float(number[0]):.10f}", text)


@pytest.mark.parametrize("name", TABLES)
def test_without_the_paper_only_methods_with_runs_are_shown(name: str, runs) -> None:
    table = TABLES[name](runs)
    ran = {row.label for row in table.rows if any(cell.values for cell in row.cells.values())}
    shown = list(table.lines(paper=False))
    assert {line.label for line in shown if line.kind != "group"} == ran
    assert all(after.kind == "ours" for line, after in itertools.pairwise(shown) if line.kind == "group")
    for write in (to_markdown, to_latex):
        assert "paper:" not in write(table, paper=False)
        assert "paper:" in write(table)


def test_a_cell_is_the_mean_of_its_results(runs) -> None:
    """By hand from the files: the variant with the most seeds, the best mean among those."""
    variants: dict[str, list[float]] = {}
    for path in (GOLDEN / "runs").rglob("result.json"):
        result = json.loads(path.read_text())
        if result["task"] == "mrpc" and result["method"] == "SAM":
            variants.setdefault(str(result["config"]["method"]["rho"]), []).append(result["metrics"]["accuracy"])
    assert sorted(map(len, variants.values())) == [1, 3]  # one point of the grid was not chosen
    wanted = 100 * fmean(max(variants.values(), key=len))
    (row,) = [row for row in TABLES["glue"](runs).rows if row.group == "BERT-base" and row.method == "SAM"]
    assert row.cells["mrpc"].ours("mean") == pytest.approx(wanted)
    assert row.cells["mrpc"].paper == 88.2
    assert row.cells["mrpc"].difference("max") == pytest.approx(row.cells["mrpc"].ours("max") - 88.2)
    assert row.cells["mnli"].ours("mean") is None


@pytest.mark.parametrize("name", TABLES)
def test_csv_has_every_cell_with_all_digits(name: str, runs) -> None:
    table = TABLES[name](runs)
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert len(lines) == len(table.rows) * len(table.columns)
    for line in lines:
        (row,) = [row for row in table.rows if (row.group, row.method) == (line["group"], line["method"])]
        cell = row.cells[line["column"]]
        assert tuple(map(float, line["values"].split())) == cell.values
        assert line["paper"] == ("" if cell.paper is None else str(cell.paper))
        if cell.values:
            assert float(line["mean"]) == cell.summary.mean
            assert float(line["ours"]) == cell.ours(line["aggregate"])


@pytest.mark.parametrize("name", TABLES)
def test_aggregates_are_named_and_missing_cells_marked(name: str, runs) -> None:
    for aggregate in ("mean", "median", "max"):
        text = to_markdown(TABLES[name](runs, aggregate=aggregate))
        assert aggregate in text.splitlines()[0]
    empty = to_markdown(TABLES[name](read_runs(GOLDEN / "nothing")))
    assert "no run" in empty
    assert "There are no runs" in empty


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(runs, tmp_path: Path) -> None:
    tables = [TABLES[name](runs, aggregate="mean") for name in TABLES]
    hostile = r"""<script>_^~#%&{}$\ 🙂 [x]"""
    rows = tuple(dataclasses.replace(row, group=hostile, label=hostile) for row in tables[0].rows[:2])
    tables.append(dataclasses.replace(tables[0], rows=rows, notes=(hostile,)))
    body = "\n".join(to_latex(table, spread="ci") for table in tables)
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "t.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in done.stdout


def test_hostile_names_do_not_break_markdown(runs) -> None:
    table = TABLES["glue"](runs)
    row = dataclasses.replace(table.rows[0], label="<b>a|b\nc*d*</b>")
    (line,) = [
        line
        for line in to_markdown(dataclasses.replace(table, rows=(row,))).splitlines()
        if "a\\|b" in line and "no" in line
    ]
    assert line.count(" | ") == len(table.columns)
    assert "\\<b\\>" in line


def test_the_papers_figures_give_its_counts() -> None:
    """27 of 30 setups better than SAM: GLUE, and STS with random noise."""

    def setups(method: str, noisy: str) -> dict[tuple[str, str], float]:
        rows = [(m, f[method]) for m, f in paper.GLUE.figures.items()]
        rows += [(m, f[noisy]) for m, f in paper.STS.figures.items()]
        return {(m, column): value for m, row in rows for column, value in row.items() if column != "avg"}

    ours, theirs = setups("DeltaSAM", "DeltaSAM+EmbeddingNoise"), setups("SAM", "SAM+EmbeddingNoise")
    assert str(count_wins(ours, theirs)) == "27 of 30"


def test_the_papers_columns_give_its_averages() -> None:
    for source in (paper.GLUE, paper.STS):
        for model, methods in source.figures.items():
            for method, row in methods.items():
                columns = [value for column, value in row.items() if column != "avg"]
                if "avg" in row:
                    assert row["avg"] == pytest.approx(fmean(columns), abs=0.11), (model, method)


def test_broken_and_unfinished_folders_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("task: mrpc")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/result.json").write_text('{"run_id": "x"')
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures/c.txt").write_text("Traceback")
    found = read_runs(tmp_path)
    text = to_markdown(TABLES["glue"](found))
    assert "1 run not finished" in text
    assert "1 run failed" in text
    assert "1 run unreadable" in text


def test_a_run_that_failed_and_then_finished_has_not_failed(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "runs", tmp_path / "runs")
    (tmp_path / "runs/failures").mkdir()
    done = read_runs(tmp_path / "runs").finished[0].path.name
    for name in (done, "lost"):
        (tmp_path / f"runs/failures/{name}.txt").write_text("Traceback")
    found = read_runs(tmp_path / "runs")
    assert [path.stem for path in found.failed] == ["lost"]
    assert "1 run failed, see failures/ of the sweep" in found.problems()


def test_the_same_run_in_two_folders_counts_once(tmp_path: Path, runs) -> None:
    one = runs.finished[0].path
    for name in ("d", "b", "e", "a", "c"):  # not the order in which the disk has them
        shutil.copytree(one, tmp_path / "several" / name)
    assert [run.path.name for run in read_runs(tmp_path / "several").finished] == ["a"]
    shutil.copytree(GOLDEN / "runs", tmp_path / "copy")
    assert len(read_runs(GOLDEN / "runs", tmp_path / "copy").finished) == len(runs.finished)


def test_command_writes_every_format(tmp_path: Path, runs) -> None:
    for form, writer in (("markdown", to_markdown), ("latex", to_latex), ("csv", to_csv)):
        out = tmp_path / form
        arguments = ["table", "glue", str(GOLDEN / "runs"), "--format", form, "--output", str(out)]
        subprocess.run([sys.executable, "-m", "deltasam", *arguments], check=True)
        assert out.read_text(encoding="utf-8") == writer(TABLES["glue"](runs))
    shown = subprocess.run(
        [sys.executable, "-m", "deltasam", "table", "adversarial-risk", str(GOLDEN / "runs")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "per-instance SAM" in shown.stdout
    assert "Ours at rho = 0.05." in shown.stdout
    assert table_notes(TABLES["glue"](runs))[0].startswith("n = ")
    missing = subprocess.run(
        [sys.executable, "-m", "deltasam", "table", "glue", str(tmp_path / "nowhere")], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert missing.returncode == 2
    assert "no such folder" in missing.stderr


def test_several_metrics_of_one_run_are_one_pair() -> None:
    # Three ROUGEs of two runs are not six observations: they rise and fall together.
    plain = {"rouge1": {1: 30.0, 2: 31.0}, "rouge2": {1: 11.0, 2: 12.0}, "rougeL": {1: 28.0, 2: 29.0}}
    scores = {
        ("m", "ERM"): plain,
        ("m", "SAM"): {name: {seed: value + 1 for seed, value in found.items()} for name, found in plain.items()},
    }
    comparison, wins = compare(scores, "SAM", "ERM", of_one_run=True)
    assert (comparison.pairs, comparison.p, comparison.smallest_p) == (2, 0.5, 0.5)
    assert comparison.difference == pytest.approx(1.0)
    assert str(wins) == "3 of 3"
    assert compare(scores, "SAM", "ERM")[0].pairs == 6  # as runs of three tasks
    scores["m", "SAM"]["rouge2"].pop(2)  # a run that lacks a measure has no mean over all of them
    assert compare(scores, "SAM", "ERM", of_one_run=True)[0].pairs == 1


def test_runs_that_chose_the_settings_are_not_reported(tmp_path: Path) -> None:
    # Tuned on a part of the training set: better there, but not evaluated on the development set.
    source = next(path for path in sorted((GOLDEN / "runs").rglob("result.json")) if "SAM" in path.parent.name)
    found = json.loads(source.read_text())
    for name, split, value in (("final", "validation", 0.5), ("tuning", "train[90%:]", 0.9)):
        changed = {**found, "run_id": name, "metrics": {**found["metrics"], found["primary_metric"]: value}}
        changed["config"] = {**found["config"], "task": {**found["config"]["task"], "eval_split": split}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(changed))
    cells = by_cell(read_runs(tmp_path).finished)
    assert [[run.run_id for run in cell] for cell in cells.values()] == [["final"]]


def test_other_weights_are_another_method(tmp_path: Path) -> None:
    source = next(path for path in (GOLDEN / "runs").rglob("result.json") if "DeltaSAM" in path.parent.name)
    found = json.loads(source.read_text())
    method = {**found["config"]["method"], "weighting": {"name": "RandomWeights"}}
    changed = {**found, "run_id": "other", "config": {**found["config"], "method": method}}
    for name, result in (("paper", found), ("shuffled", changed)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    assert {run.method.partition("+")[0] for run in read_runs(tmp_path).finished} == {
        "DeltaSAM",
        "DeltaSAM(RandomWeights)",
    }


def test_unusual_numbers_of_seeds_are_in_the_cells() -> None:
    """More seeds as well as fewer; the note below the table gives the number of the other cells."""
    columns = tuple(Column(key=key, header=key) for key in "abcd")
    cells = {key: Cell(tuple(range(1, n + 1))) for key, n in zip("abcd", (2, 2, 3, 1), strict=True)}
    source = paper.Source(table="Table 0", aggregate="mean", figures={})
    table = Table("own", "Own", columns, (Row("model", "SAM", "SAM", cells),), "mean", source)
    (ours,) = [line for line in table.lines(spread="none") if line.kind == "ours"]
    assert ours.cells == ("1.5", "1.5", "2.0 (n=3)", "1.0 (n=1)")
    assert table_notes(table)[0] == "n = 2 where a cell does not say otherwise."
