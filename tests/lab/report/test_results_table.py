"""The table of any runs, and the signs that a run has learned nothing."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from deltasam.lab.experiments._data_record import FILE, LARGEST_CLASS
from deltasam.lab.report import (
    learning_problem,
    learning_problems,
    read_runs,
    result_tables,
    results_to_csv,
    results_to_latex,
    results_to_markdown,
)
from helpers.results import write_run

SCORES = {"ERM": (0.70, 0.72, 0.74), "SAM": (0.73, 0.76, 0.75), "PerInstanceSAM": (0.71,)}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, values in SCORES.items():
        rho = {} if name == "ERM" else {"rho": 0.01 if name == "SAM" else 0.005}
        for seed, value in enumerate(values, 1):
            more = {"loss": 1 - value, "accuracy_4bit": 0.5, "nll_on_qqp": 2.0}
            write_run(tmp_path, "own", {"name": name, **rho}, seed=seed, metrics={"accuracy": value, **more})
    return tmp_path


def test_means_intervals_and_p_against_plain_training(runs: Path) -> None:
    (table,) = result_tables(read_runs(runs))
    assert table.header == ("method", "settings", "seeds", "accuracy", "loss", "accuracy − plain", "p", "seconds")
    plain, sam, own = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert [row["method"] for row in (plain, sam, own)] == ["ERM", "SAM", "per-instance SAM"]
    assert [row["seeds"] for row in (plain, sam, own)] == ["3", "3", "1"]
    assert plain["accuracy"].startswith("0.7200 [0.7")
    assert (plain["accuracy − plain"], plain["p"]) == ("", "")
    assert sam["accuracy − plain"] == "+0.0267"
    assert sam["p"] == "0.25"  # all three differences have the same sign: 2 of 8 patterns
    assert own["accuracy"] == "0.7100"  # no interval, and no p, of one seed
    assert (own["accuracy − plain"], own["p"]) == ("+0.0100", "")
    assert any("radii rho differ" in note for note in table.notes)


def test_each_method_has_its_own_pairs(runs: Path) -> None:
    """The method with the fewest common seeds comes last."""
    for seed in (4, 5):
        write_run(runs, "own", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.7})
    (table,) = result_tables(read_runs(runs))
    _, sam, own = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert (sam["seeds"], sam["accuracy − plain"], sam["p"]) == ("5", "+0.0267 (3 pairs)", "0.25")
    assert own["accuracy − plain"] == "+0.0100"
    assert any("with 3 pairs no p below 0.25" in note for note in table.notes)


def test_methods_and_metrics_are_chosen_by_name(runs: Path) -> None:
    found = read_runs(runs)
    (table,) = result_tables(found, methods=["per-instance", "plain"], metrics=["accuracy_4bit"])
    assert [row[0] for row in table.rows] == ["ERM", "per-instance SAM"]
    assert table.header[3] == "accuracy_4bit"
    with pytest.raises(ValueError, match=r"methods=delta-sam: there is no run of it; there are ERM, SAM"):
        result_tables(found, methods=["delta-sam"])
    with pytest.raises(ValueError, match=r"metrics=acuracy: no run has it; did you mean accuracy\?"):
        result_tables(found, metrics=["acuracy"])


def test_files(runs: Path) -> None:
    tables = result_tables(read_runs(runs))
    rows = list(csv.DictReader(io.StringIO(results_to_csv(tables))))
    scores = [row for row in rows if row["metric"] == "accuracy"]
    assert [float(row["mean"]) for row in scores] == pytest.approx([0.72, 2.24 / 3, 0.71])
    assert [row["p"] for row in scores] == ["", "0.25", ""]
    assert [row["pairs"] for row in scores] == ["0", "3", "1"]
    assert float(scores[0]["ci_low"]) < 0.72 < float(scores[0]["ci_high"])
    assert all("bert-small-wiki" in row["setup"] for row in rows)
    assert "| SAM | lr 0.0001, rho 0.01 | 3 |" in results_to_markdown(tables)
    latex = results_to_latex(tables)
    assert latex.count(r"\\") == 4
    assert latex.isascii()


def one_run(folder: Path, accuracy: float, losses: list[float], share: float | None = 0.53) -> str:
    write_run(folder, "own", {"name": "SAM", "rho": 0.05}, seed=1, metrics={"accuracy": accuracy})
    (place,) = folder.glob("run-*")
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (place / "metrics.jsonl").write_text("\n".join(lines))
    if share is not None:
        (place / FILE).write_text(json.dumps({LARGEST_CLASS: {"validation": share, "train": 0.9}}))
    (run,) = read_runs(folder).finished
    return learning_problem(run)


FALLING = [0.7 - 0.02 * step for step in range(12)]


@pytest.mark.parametrize(
    ("accuracy", "losses", "share", "sign"),
    [
        (0.54, FALLING, 0.53, "largest class (0.5300)"),  # 256 rows: one standard error is 0.031
        (0.60, FALLING, 0.53, ""),
        (0.54, FALLING, None, ""),  # the share is unknown
        (0.60, [0.7, 0.69] * 6, 0.53, "has hardly fallen (0.69"),
        (0.60, [0.7, 0.69] * 3, 0.53, ""),  # too few entries to tell
        (0.60, [0.7, float("nan")] * 6, 0.53, ""),
    ],
)
def test_signs_that_nothing_was_learned(
    accuracy: float, losses: list[float], share: float | None, sign: str, tmp_path: Path
) -> None:
    found = one_run(tmp_path, accuracy, losses, share)
    assert sign in found
    assert bool(found) == bool(sign)
    if sign:
        assert "method.rho (now 0.05)" in found


@pytest.mark.parametrize(
    ("metrics", "classes", "sign"),
    [
        ({"accuracy": 0.7, "matthews": 0.0}, 2, "same answer"),
        ({"accuracy": 0.7, "matthews": 0.1}, 2, ""),
        ({"accuracy": 0.68, "f1": 2 * 0.68 / 1.68}, 2, "same answer"),
        ({"accuracy": 0.68, "f1": 0.0}, 2, "same answer"),
        ({"accuracy": 0.68, "f1": 0.75}, 2, ""),
        ({"accuracy": 0.52}, 2, "guessing one of 2"),
        ({"accuracy": 0.60}, 2, ""),
        ({"accuracy": 0.36}, 3, "guessing one of 3"),
        ({"accuracy": 0.45}, 3, ""),
        ({"pearson": 0.1}, 0, ""),
    ],
)
def test_signs_where_the_largest_class_is_not_known(
    metrics: dict[str, float], classes: int, sign: str, tmp_path: Path
) -> None:
    write_run(tmp_path, "own", seed=1, metrics=metrics)
    (place,) = tmp_path.glob("run-*/result.json")
    result = json.loads(place.read_text())
    result["config"]["task"]["classes"] = [str(number) for number in range(classes)]
    place.write_text(json.dumps(result))
    (run,) = read_runs(tmp_path).finished
    found = learning_problem(run)
    assert sign in found
    assert bool(found) == bool(sign)


def test_the_table_names_the_runs_that_did_not_learn(tmp_path: Path) -> None:
    one_run(tmp_path, 0.53, FALLING)
    found = read_runs(tmp_path)
    (problem,) = learning_problems(found.finished)
    (table,) = result_tables(found)
    assert problem in table.notes
    assert "0.5300" in table.title
