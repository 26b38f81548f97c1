"""``python -m deltasam.lab.pages``: the committed tables and figures are those of results/, with correct numbers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from deltasam.lab.pages import figures, runs, speed_targets
from deltasam.lab.pages.__main__ import differs, main
from deltasam.lab.pages.prose import intervals, is_rounded, problems
from deltasam.lab.pages.runs import Selection
from deltasam.lab.pages.statistics import differences, means, pooled, stratified_interval, table
from helpers.results import ROOT, write_run

GENERATED = ROOT / "docs" / "_generated"


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> the other cells."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines}


def committed(name: str) -> dict[str, list[str]]:
    return rows((GENERATED / name).read_text(encoding="utf-8"))


def test_the_committed_files_are_what_results_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_file_is_found_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "_generated").mkdir(parents=True)
    (tmp_path / "results").symlink_to(ROOT / "results")
    options = ["--only", "coverage.md", "--root", str(tmp_path)]
    file = tmp_path / "docs" / "_generated" / "coverage.md"
    file.write_text((GENERATED / "coverage.md").read_text(encoding="utf-8").replace("84%", "95%"))
    assert main([*options, "--check"]) == 1
    assert "coverage.md" in capsys.readouterr().out
    file.with_name("dropped.md").write_text("")
    assert main(options) == 0
    assert [path.name for path in file.parent.iterdir()] == ["coverage.md"]
    assert main([*options, "--check"]) == 0


def test_figures_are_compared_by_their_data() -> None:
    old, new = (f"<svg>Matplotlib v3.{minor}.1, data {'a' * 64} {minor}</svg>" for minor in (8, 11))
    assert not differs("x.svg", old, new)
    assert differs("x.svg", old, new.replace("a" * 64, "b" * 64))
    assert differs("x.svg", old, "<svg></svg>")


@pytest.mark.parametrize(("value", "same"), [(3.0000000001, True), (3.001, False), (0.0, False)])
def test_the_digest_of_a_figure_ignores_the_last_digits(value: float, same: bool) -> None:
    def digest(*ends: float) -> list[str]:
        return re.findall("data [0-9a-f]{64}", figures.forest({"RTE": {"SAM": ends}, "CoLA": {}}, "points"))

    assert len(digest(0.0, -1.0, 3.0)) == 1
    assert (digest(0.0, -1.0, 3.0) == digest(-1e-16, -1.0, value)) == same
    with figures.not_drawn():
        assert digest(0.0, -1.0, 3.0) == [figures.forest({"RTE": {"SAM": (0.0, -1.0, 3.0)}, "CoLA": {}}, "points")]
        quick = digest(0.0, -1.0, 3.0)
    assert quick == digest(0.0, -1.0, 3.0)


# -- numbers against a slow reference, from the JSON files ---------------------------------------------------------


def scores(folder: str, task: str, name: str, rho: float | None = None, weights: str | None = None) -> pd.Series:
    """Final scores by seed, read without the tool."""
    found = {}
    for path in (ROOT / "results" / folder).glob(f"{task}-*/result.json"):
        result = json.loads(path.read_bytes())
        config, own = result["config"], result["config"]["method"]
        plain = not config["regularisers"] and not config["task"]["eval_split"].endswith("]")
        weighting = (own.get("weighting") or {"name": None})["name"]
        usual = weights or ("FiniteDifference" if name == "DeltaSAM" else None)
        if plain and (own["name"], own.get("rho"), weighting) == (name, rho, usual):
            found[result["seed"]] = 100 * result["metrics"][result["primary_metric"]]
    return pd.Series(found).sort_index()


def permutation_p(first: pd.Series, second: pd.Series) -> float:
    result = stats.permutation_test(
        (first.to_numpy(), second.to_numpy()),
        lambda x, y: np.mean(x - y),
        permutation_type="samples",
        n_resamples=2**11,
    )
    return float(result.pvalue)


def test_a_difference_on_cola_against_scipy() -> None:
    sam = scores("glue", "cola", "SAM", 0.01)
    others = [
        scores("glue", "cola", "DeltaSAM", 0.01),
        scores("glue", "cola", "PerInstanceSAM", 0.005),
        *(
            scores("glue-weightings", "cola", "DeltaSAM", 0.01, name)
            for name in ("Directional", "LossWeights", "OwnGradient", "RandomWeights")
        ),
    ]
    assert [len(each) for each in (sam, *others)] == [10] * 7
    ps = sorted(permutation_p(each, sam) for each in others)
    holm = np.maximum.accumulate([min(1, (6 - rank) * p) for rank, p in enumerate(ps)])
    own = permutation_p(others[0], sam)
    difference = others[0] - sam
    bca = stats.bootstrap(
        (difference,), np.mean, n_resamples=50_000, random_state=np.random.default_rng(0)
    ).confidence_interval
    cell = committed("glue-differences.md")["δ-SAM - SAM"][3]
    mean, low, high, n, p = map(float, re.findall(r"-?[\d.]+", cell))
    assert (mean, n) == (round(difference.mean(), 2), 10)
    assert p == float(f"{holm[ps.index(own)]:.2g}")
    assert (low, high) == pytest.approx(tuple(bca), abs=0.1)


def test_a_mean_on_mrpc_against_scipy() -> None:
    found = scores("glue", "mrpc", "PerInstanceSAM", 0.005)
    bca = stats.bootstrap(
        (found,), np.mean, n_resamples=50_000, random_state=np.random.default_rng(0)
    ).confidence_interval
    mean, low, high = map(float, re.findall(r"[\d.]+", committed("glue-scores.md")["per-instance SAM"][0]))
    assert mean == round(found.mean(), 1)
    assert (low, high) == pytest.approx(tuple(bca), abs=0.1)


def test_the_pooled_difference_counts_every_task_the_same() -> None:
    """The mean of the task means, with an interval of resampled seeds within each task."""
    radii = {"mrpc": 0.01, "rte": 0.02, "stsb": 0.01, "qnli": 0.01, "mnli": 0.01, "qqp": 0.01, "sst2": 0.01}
    tasks = []
    for task, rho in radii.items():
        folder = "glue" if task in ("mrpc", "rte", "stsb") else "glue-larger"
        plain = scores(folder, task, "ERM")
        if task in ("mrpc", "rte"):
            plain = plain.combine_first(scores("adversarial-risk", task, "ERM"))
        tasks.append((scores(folder, task, "SAM", rho) - plain).dropna().to_numpy())
    assert [len(each) for each in tasks] == [10, 10, 10, 5, 5, 5, 5]
    random = np.random.default_rng(3)
    drawn = [np.mean([random.choice(each, len(each)).mean() for each in tasks]) for _ in range(4000)]
    mean, low, high, _ = map(float, re.findall(r"-?[\d.]+", committed("pooled.md")["SAM - ERM"][2]))
    assert mean == round(float(np.mean([each.mean() for each in tasks])), 2)
    assert (low, high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.03)


# -- which runs a table shows --------------------------------------------------------------------------------------


def test_glue_shows_the_settings_chosen_on_training_data(tmp_path: Path) -> None:
    folder = tmp_path / "glue"
    for rho, score in ((0.01, 0.70), (0.02, 0.75)):
        for seed in (101, 102):
            for name in ("SAM", "DeltaSAM"):
                tuning = {"seed": seed, "metrics": {"accuracy": score}, "split": "train[90%:]"}
                write_run(folder, "rte", {"name": name, "rho": rho}, **tuning)
    for seed in range(1, 7):
        write_run(folder, "rte", seed=seed, metrics={"accuracy": 0.6 + seed / 100})
        # Better on the development set, at the radius that the training data did not choose: must not be shown.
        write_run(folder, "rte", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.9})
        write_run(folder, "rte", {"name": "SAM", "rho": 0.02}, seed=seed, metrics={"accuracy": 0.62 + seed / 100})
    for rho, score in ((0.01, 0.9), (0.02, 0.61)):
        own = {"name": "DeltaSAM", "rho": rho, "weighting": {"name": "Directional"}}
        write_run(folder, "rte", own, seed=1, metrics={"accuracy": score})
    chosen, fixed = Selection(("glue",)), Selection(("glue",), fixed=True)
    found = rows(means(runs.scores(tmp_path, chosen)))
    assert found["SAM"][0].startswith("65.5 [")
    assert found["δ-SAM, directional weights"] == ["61.0 (n = 1)"]
    assert rows(means(runs.scores(tmp_path, fixed)))["SAM"][0].startswith("90.0 [")
    tuned = runs.scores(tmp_path, Selection(("glue",), tuned_only=True))
    assert set(tuned["row"]) == {"ERM", "SAM"}
    assert rows(differences(runs.scores(tmp_path, chosen), [("SAM", "ERM")]))["SAM - ERM"] == [
        "2.00 [2.00, 2.00] (n = 6, p = 0.031)"
    ]
    assert "| SAM | rho = 0.02 | **75.0** |" in runs.grid(tmp_path, chosen)
    assert "| SAM | rho = 0.01 | 70.0 |" in runs.grid(tmp_path, chosen)
    assert "| SAM | 68.0 (69.3) |" in runs.paper_protocol(tmp_path, chosen), "the best epoch of seeds 1 to 5"


def test_risk_has_a_row_for_every_radius_and_length(tmp_path: Path) -> None:
    cases = (
        (None, 3, 10, 2.0, 0.8), ({"name": "SAM", "rho": 0.05}, 3, 10, 1.0, 0.7),
        ({"name": "PerInstanceSAM", "rho": 0.05}, 3, 10, 0.5, 0.6),
        ({"name": "PerInstanceSAM", "rho": 0.05}, 6, 20, 0.4, 0.65),
        ({"name": "PerInstanceSAM", "rho": 0.01}, 3, 10, 0.9, 0.75),
    )  # fmt: skip
    for seed in range(1, 11):
        for method, epochs, steps, risk, score in cases:
            result = {"metrics": {"accuracy": score + seed / 1000}, "risk": risk, "epochs": epochs, "steps": steps}
            write_run(tmp_path / "adversarial-risk", "rte", method, seed=seed, **result)
    found = rows(runs.risk_table(tmp_path, "rte"))
    longer = "per-instance SAM, twice as long"
    assert list(found)[2:] == ["ERM", "SAM", "per-instance SAM", longer, "per-instance SAM, rho = 0.01"]
    assert found[longer][:2] == ["10", "0.40 [0.40, 0.40]"]
    assert found[longer][-1] == "0.65; 70.0 / 71.5", "the per-instance runs of the paper were twice as long"
    assert found["per-instance SAM"][-1] == "-"


def test_the_untrained_model_is_not_a_seed(tmp_path: Path) -> None:
    sets = ("sts_average", "sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")
    for rho, score in ((0.02, 0.5), (0.1, 0.7)):
        tuning = {"seed": 101, "metrics": {"sts_average": score}, "split": "validation"}
        write_run(tmp_path / "sts", "mirror", {"name": "SAM", "rho": rho}, **tuning)
    for seed in range(1, 6):
        for method, score in ((None, 0.6), ({"name": "SAM", "rho": 0.1}, 0.7), ({"name": "SAM", "rho": 0.02}, 0.9)):
            write_run(tmp_path / "sts", "mirror", method, seed=seed, metrics=dict.fromkeys(sets, score), split="test")
    write_run(tmp_path / "sts", "mirror", seed=1, metrics=dict.fromkeys(sets, 0.4), split="test", lr=0.0)
    found = rows(runs.trained_table(tmp_path, "sts", runs.SETS, {"SAM": "75.50"}, spread=1))
    assert found["without training"][1:3] == ["1", "40.00"]
    assert found["Mirror-BERT"][1] == "5"
    assert found["SAM"][:3] == ["rho = 0.1", "5", "70.00 [70.00, 70.00]"]
    assert found["SAM"][-1] == "75.50"


# -- statistics ----------------------------------------------------------------------------------------------------


def long(values: dict[tuple[str, str], list[float]]) -> pd.DataFrame:
    cells = [(row, column, unit, v) for (row, column), each in values.items() for unit, v in enumerate(each)]
    return pd.DataFrame(cells, columns=["row", "column", "unit", "value"])


def test_pairs_share_seeds_and_families_share_the_second_method() -> None:
    frame = long({("ERM", "RTE"): [1.0] * 6, ("SAM", "RTE"): [2.0] * 6, ("DeltaSAM", "RTE"): [4.0] * 5})
    found = rows(differences(frame, [("SAM", "ERM"), ("DeltaSAM", "ERM"), ("DeltaSAM", "SAM"), ("GSAM", "ERM")]))
    # 2 / 2^6 twice, then 2 / 2^5; alone in its family 2 / 2^5.
    assert found["SAM - ERM"] == ["1.00 [1.00, 1.00] (n = 6, p = 0.062)"]
    assert found["δ-SAM - ERM"] == ["3.00 [3.00, 3.00] (n = 5, p = 0.062)"]
    assert found["δ-SAM - SAM"] == ["2.00 [2.00, 2.00] (n = 5, p = 0.062)"]
    assert "GSAM - ERM" not in found


def test_pooling_leaves_cola_out_by_name() -> None:
    tasks = {"CoLA": 4.0, "RTE": 1.0, "QNLI": -2.0, "CoLA, second encoder": 100.0}
    frame = long(
        {(row, task): [at * gain] * 3 for task, gain in tasks.items() for row, at in (("ERM", 0), ("SAM", 1))}
    )
    found = rows(pooled(frame, [("SAM", "ERM")]))["SAM - ERM"]
    assert found[0] == "4"
    assert found[1].startswith("25.75 [25.75, 25.75] (p = ")
    assert found[2].startswith("-0.50 [-0.50, -0.50] (p = ")
    assert found[3] == "3 of 4"
    assert stratified_interval({"a": [1.0, 3.0], "b": [0.0] * 9})[0] == 1.0


def test_a_head_may_hold_two_columns() -> None:
    assert table(["a | b", "c"], [["1 | 2", "3"]]) == "| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |"


# -- speed ---------------------------------------------------------------------------------------------------------


def test_ratios_of_rounds_and_of_memory(tmp_path: Path) -> None:
    def row(name: str, *seconds: float, peak: int | None = None) -> dict[str, Any]:
        return {"name": name, "rounds": list(seconds), "peak_bytes": peak}

    steps = [row("ERM captured", 1.0, 10.0), row("SAM captured", 2.0, 20.0, peak=100)]
    steps.append(row("PerInstanceSAM captured", 2.4, 24.0, peak=200))
    options = {"model": "bert-base", "batch": 32, "length": 128, "precision": "bf16"}
    record = {"options": options, "rows": steps, "machine": {"parameter_bytes": "100"}}
    (tmp_path / "speed" / "figures").mkdir(parents=True)
    (tmp_path / "speed" / "figures" / "a.json").write_text(json.dumps(record))
    (tmp_path / "speed" / "figures" / "b.json").write_text(json.dumps({"options": options, "failed": "no memory"}))
    found = rows(speed_targets.ratios(tmp_path, speed_targets.RATIOS))
    assert found["captured SAM / (2 x captured ERM)"][3] == "1.00 ±0.00 ✓"
    assert found["captured exact per-instance / captured SAM"][3] == "1.20 ±0.00 ✗"
    assert found["eager exact per-instance / eager SAM"][3] == "-"
    memory = rows(speed_targets.ratios(tmp_path, speed_targets.MEMORY))
    assert memory["per-instance, captured, total"][3] == "1.25 ✓", "(200 + 3 x 100) / (100 + 3 x 100)"
    assert memory["per-instance, captured, beyond weights and optimizer"][3] == "2.00 ✗"


# -- numbers in the text -------------------------------------------------------------------------------------------


def test_intervals_of_the_text_are_found_and_compared_as_they_are_rounded() -> None:
    assert intervals("by 0.30 above\n[0.1, 0.5] and 2 [1, 3]") == [("0.30", "0.1", "0.5"), ("2", "1", "3")]
    assert is_rounded(("0.4", "0.2", "0.6"), ("0.43", "0.25", "0.61"))
    assert is_rounded(("0.11", "-0.03", "0.25"), ("-0.11", "-0.25", "0.03")), "b - a"
    assert not is_rounded(("0.4", "0.2", "0.7"), ("0.43", "0.25", "0.61"))
    pages = [ROOT / "docs" / "results.md", *(ROOT / "docs" / "results").glob("*.md")]
    assert len([found for page in pages for found in intervals(page.read_text(encoding="utf-8"))]) > 90


@pytest.mark.parametrize(
    ("page", "old", "new", "problem"),
    [
        ("docs/results/accuracy.md", "0.45 [0.23, 0.67]", "0.45 [0.23, 0.68]", "0.45 [0.23, 0.68] is in no table"),
        ("docs/results/accuracy.md", "p = 0.0015", "p = 0.0019", "p = 0.0019 is in no table"),
        ("docs/results/noise.md", "../_generated/noise-ece.md", "../_generated/gone.md", "noise-ece.md is on no page"),
        ("docs/results/noise.md", "../_generated/noise-ece.md", "../_generated/gone.md", "gone.md, which is not"),
        ("docs/results.md", "{{ ece_sam }}", "{{ ece_gone }}", "shows the answer ece_sam"),
        ("docs/results.md", "{{ ece_sam }}", "-4.2", "-4.2 is typed"),
        ("docs/results.md", "## All pages", "word " * 1500, "at most 1500"),
    ],
)
def test_text_that_does_not_fit_the_tables_is_found(
    tmp_path: Path, page: str, old: str, new: str, problem: str
) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "*.svg"))
    for figure in GENERATED.glob("*.svg"):
        (tmp_path / "docs" / "_generated" / figure.name).touch()
    file = tmp_path / page
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    assert any(problem in found for found in problems(tmp_path))


def test_the_speed_figures_of_the_readme_are_in_the_table() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = re.search(r"per-instance SAM takes ([\d.]+) to ([\d.]+) times the time of SAM", text)
    assert found is not None
    cells = committed("speed-ratios.md")["captured exact per-instance / captured SAM"][1:]
    ratios = sorted(cell.partition(" ")[0] for cell in cells)
    assert found.groups() == (ratios[0], ratios[-1])
