"""The sections of the page of results appear with their results, and say what made-up results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.results import cells, script, write_run


def test_no_results_no_sections(tmp_path: Path) -> None:
    page = script("page")["page"](tmp_path)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## Not measured yet"]
    for name in script("missing")["SWEEPS"]:
        assert f"`configs/sweeps/evidence/{name}.yaml`" in page


def test_risk_has_a_row_for_every_radius_weighting_and_length(tmp_path: Path) -> None:
    folder = tmp_path / "adversarial-risk"
    for seed in range(1, 11):
        noise = (seed + seed % 2) / 1000
        for method, epochs, risk, score in (
            (None, 3, 2.0, 0.8), ({"name": "SAM", "rho": 0.05}, 3, 1.0, 0.7),
            ({"name": "PerInstanceSAM", "rho": 0.05}, 3, 0.5, 0.6),
            ({"name": "PerInstanceSAM", "rho": 0.05}, 6, 0.4, 0.65),
            ({"name": "PerInstanceSAM", "rho": 0.01}, 3, 0.9, 0.75),
            ({"name": "DeltaSAM", "rho": 0.05, "weighting": {"name": "OwnGradient"}}, 3, 0.8, 0.72),
        ):  # fmt: skip
            write_run(folder, "rte", method, seed=seed, metrics={"accuracy": score + noise}, risk=risk, epochs=epochs)
    text = script("risk")["risk_section"](tmp_path)
    assert "### RTE" in text
    assert "### MRPC" not in text
    names = [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ")]
    assert names[1:7] == [
        "ERM", "SAM", "δ-SAM, weights along own gradients", "per-instance SAM", "per-instance SAM, twice as long",
        "per-instance SAM, rho = 0.01",
    ]  # fmt: skip
    (longer,) = cells(text, "per-instance SAM, twice as long")
    assert longer[1:3] == ["10", "0.40 [0.40, 0.40]"]
    assert longer[4] == "65.6 / 66.0"
    assert longer[-1] == "0.65; 70.0 / 71.5", "the paper's per-instance runs were twice as long"
    (difference,) = cells(text, "per-instance SAM, rho = 0.01 - SAM")
    # 10 pairs, all of one sign: 2 / 2^10, and four methods are compared with SAM.
    assert difference[1:] == ["-0.10 [-0.10, -0.10] (n = 10, p = 0.0078)", "5.00 [5.00, 5.00] (n = 10, p = 0.0078)"]


def glue_runs(folder: Path) -> None:
    for rho, score in ((0.01, 0.70), (0.02, 0.75)):
        for seed in (101, 102):
            metrics = {"accuracy": score}
            write_run(folder, "rte", {"name": "SAM", "rho": rho}, seed=seed, metrics=metrics, split="train[90%:]")
            write_run(folder, "rte", {"name": "DeltaSAM", "rho": rho}, seed=seed, metrics=metrics, split="train[90%:]")
    for seed in (1, 2, 3, 4, 5, 6):
        write_run(folder, "rte", seed=seed, metrics={"accuracy": 0.6 + seed / 100})
        # Better on the development set at the radius that training data did not choose: must not be reported.
        write_run(folder, "rte", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.9})
        write_run(folder, "rte", {"name": "SAM", "rho": 0.02}, seed=seed, metrics={"accuracy": 0.62 + seed / 100})


def test_glue_reports_the_settings_chosen_on_training_data(tmp_path: Path) -> None:
    glue_runs(tmp_path / "glue")
    for rho, score in ((0.01, 0.9), (0.02, 0.61)):
        own = {"name": "DeltaSAM", "rho": rho, "weighting": {"name": "Directional"}}
        write_run(tmp_path / "glue-weightings", "rte", own, seed=1, metrics={"accuracy": score})
    # Plain training of the other table counts, at the same number of epochs.
    write_run(tmp_path / "adversarial-risk", "rte", seed=7, metrics={"accuracy": 0.6}, risk=1.0)
    write_run(tmp_path / "adversarial-risk", "rte", seed=8, metrics={"accuracy": 0.6}, risk=1.0, epochs=6)
    glue = script("glue")
    text = glue["glue_section"](tmp_path)
    assert cells(text, "ERM")[0][1].endswith("]"), "of most seeds"
    assert "\n\n7 seeds, but where a cell says n.\n" in text
    found = cells(text, "SAM")
    assert found[0][1].startswith("65.5 [64.")
    assert found[0][1].endswith("(n = 6)")
    assert found[1][1] == "65.5 / 68.0"
    assert found[2][1] == "68.0 (69.3)", "the best of seeds 1 to 5, each at its best epoch, beside the paper's"
    assert cells(text, "δ-SAM, directional weights")[0][1] == "61.0 (n = 1)"
    assert cells(text, "SAM - ERM")[0][1] == "2.00 [2.00, 2.00] (n = 6, p = 0.062)", "two methods against ERM"
    chosen = [row for row in cells(glue["tuning_section"](tmp_path), "SAM") if "**" in row[2]]
    assert chosen == [["SAM", "rho = 0.02", "**75.0**"]]


def test_larger_tasks_are_called_subsets(tmp_path: Path) -> None:
    write_run(tmp_path / "glue-larger", "sst2", seed=1, metrics={"accuracy": 0.9}, epochs=1)
    text = script("glue")["larger_section"](tmp_path)
    assert "**Subsets**" in text
    assert "SST-2 on all 67,349 rows" in text


def test_larger_tasks_at_the_radius_chosen_on_them(tmp_path: Path) -> None:
    folder = tmp_path / "glue-larger"
    for seed in (1, 2, 3):
        write_run(folder, "qnli", seed=seed, metrics={"accuracy": 0.7})
        write_run(folder, "qnli", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.72})
        write_run(folder, "qnli", regularisers=({"name": "R3F"},), seed=seed, metrics={"accuracy": 0.75})
    chosen = script("chosen")
    assert chosen["larger_section"](tmp_path) == ""
    for rho, score in ((0.01, 0.6), (0.02, 0.65)):
        for seed in (101, 102):
            method = {"name": "SAM", "rho": rho}
            write_run(folder, "qnli", method, seed=seed, metrics={"accuracy": score}, split="train[90%:]")
    assert chosen["second_encoder_section"](tmp_path) == ""
    for seed in (1, 2, 3, 4):
        write_run(folder, "qnli", {"name": "SAM", "rho": 0.02}, seed=seed, metrics={"accuracy": 0.71})
    text = chosen["larger_section"](tmp_path)
    assert cells(text, "SAM")[:2] == [["SAM", "rho = 0.01", "60.0"], ["SAM", "rho = 0.02", "**65.0**"]]
    assert cells(text, "SAM")[2][1].startswith("71.0 [")
    assert cells(text, "SAM - ERM")[0][1].startswith("1.00 [1.00, 1.00] (n = 3")
    assert "R3F" not in text, "nothing of it was chosen"
    assert cells(text, "SAM")[3][1] == "-1.00 [-1.00, -1.00]", "by the three seeds that both settings have"
    assert "Mean over the choices that differ (1): -1.0 points." in text
    # The section at one setting has neither the runs that chose nor those at what was chosen.
    at_one = script("glue")["larger_section"](tmp_path)
    assert cells(at_one, "SAM")[0][1].startswith("72.0 [")
    assert "3 seeds." in at_one
    page = script("page")["page"](tmp_path)
    assert "## The radius, chosen on the larger tasks" in page


def test_a_choice_that_is_the_one_setting_gave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    for seed in (1, 2):
        write_run(folder, "rte", seed=seed, metrics={"accuracy": 0.5})
        write_run(folder, "rte", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.6})
    for rho, score in ((0.01, 0.65), (0.02, 0.6)):
        method = {"name": "SAM", "rho": rho}
        write_run(folder, "rte", method, seed=101, metrics={"accuracy": score}, split="train[90%:]")
    text = script("chosen")["second_encoder_section"](tmp_path)
    assert cells(text, "SAM - ERM")[0][1].startswith("10.00 ")
    assert "What the choice gave" not in text


def test_a_choice_counts_where_both_settings_were_run(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    scores = {("rte", 0.01): 0.6, ("rte", 0.02): 0.62, ("cola", 0.02): 0.3, ("mrpc", 0.01): 0.8}
    for (task, rho), score in scores.items():
        metrics = {"matthews" if task == "cola" else "accuracy": score}
        method = {"name": "SAM", "rho": rho}
        for seed in (1, 2):
            write_run(folder, task, method, seed=seed, metrics=metrics)
        # On MRPC the one setting is chosen, on the others the larger one.
        best = 0.01 if task == "mrpc" else 0.02
        write_run(folder, task, {"name": "SAM", "rho": best}, seed=101, metrics=metrics, split="train[90%:]")
    for task in ("rte", "cola", "mrpc"):
        write_run(folder, task, seed=1, metrics={"matthews" if task == "cola" else "accuracy": 0.2})
    text = script("chosen")["second_encoder_section"](tmp_path)
    assert cells(text, "SAM")[-1] == ["SAM", "=", "2.00 [2.00, 2.00]", "-"]
    assert "Mean over the choices that differ (1): 2.0 points." in text


def test_all_tasks_together_count_the_same(tmp_path: Path) -> None:
    for task, folder, metric, gain, seeds in (
        ("cola", "glue", "matthews", 0.04, (1, 2, 3, 4, 5, 6)), ("rte", "glue", "accuracy", 0.01, (1, 2, 3, 4)),
        ("qnli", "glue-larger", "accuracy", -0.02, (1, 2)),
    ):  # fmt: skip
        for seed in seeds:
            score = 0.5 + seed / 100
            write_run(tmp_path / folder, task, seed=seed, metrics={metric: score})
            write_run(tmp_path / folder, task, {"name": "SAM", "rho": 0.01}, seed=seed, metrics={metric: score + gain})
    text = script("pooled")["pooled_section"](tmp_path)
    (row,) = cells(text, "SAM - ERM")
    assert row[1] == "3"
    assert row[2].startswith("1.00 [1.00, 1.00] (p = "), "the mean of 4, 1 and -2 points"
    assert row[3].startswith("-0.50 [-0.50, -0.50] (p = ")
    assert row[4] == "2 of 3"
    drawn = script("pooled")["plots"](tmp_path)["pooled.svg"]
    assert "SAM - ERM, all tasks: 1.00 [1.00, 1.00]" in drawn
    assert "SAM - ERM, without CoLA: -0.50 [-0.50, -0.50]" in drawn


def test_all_tasks_together_at_the_radius_that_each_chose(tmp_path: Path) -> None:
    tasks = {"rte": "glue", "mrpc": "glue", "qnli": "glue-larger", "mnli": "glue-larger"}
    for task, folder in tasks.items():
        for seed in (1, 2, 3):
            write_run(tmp_path / folder, task, seed=seed, metrics={"accuracy": 0.5})
            write_run(tmp_path / folder, task, regularisers=({"name": "RDrop"},), seed=seed, metrics={"accuracy": 0.6})
            write_run(tmp_path / folder, task, {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"accuracy": 0.54})
    pooled = script("pooled")["pooled_section"]
    assert "### With the radius chosen on every task" not in pooled(tmp_path)
    for task in ("qnli", "mnli"):
        chosen = {"name": "SAM", "rho": 0.02}
        write_run(tmp_path / "glue-larger", task, chosen, seed=101, metrics={"accuracy": 0.7}, split="train[90%:]")
        for seed in (1, 2, 3):
            write_run(tmp_path / "glue-larger", task, chosen, seed=seed, metrics={"accuracy": 0.5})
    text = pooled(tmp_path)
    at_one, each = cells(text, "SAM - ERM")
    assert at_one[2].startswith("4.00 [4.00, 4.00]")
    # 4 and 4 points, then 0 and 0; six pairs that differ, all of one sign: 2 / 2^6.
    assert each[1:3] == ["4", "2.00 [2.00, 2.00] (p = 0.031)"]
    assert len(cells(text, "R-Drop - ERM")) == 1, "it has no radius"
    assert "second encoder" not in text


def test_all_tasks_of_the_second_encoder_together(tmp_path: Path) -> None:
    for task, gain in (("rte", 0.02), ("mrpc", 0.04), ("cola", 0.12)):
        metric = "matthews" if task == "cola" else "accuracy"
        for folder, sign in (("glue", 1), ("minilm", -1)):
            for seed in (1, 2):
                write_run(tmp_path / folder, task, seed=seed, metrics={metric: 0.5})
                method = {"name": "SAM", "rho": 0.01}
                write_run(tmp_path / folder, task, method, seed=seed, metrics={metric: 0.5 + sign * gain})
    for seed in (1, 2):  # a larger task of that encoder
        write_run(tmp_path / "minilm-larger", "qnli", seed=seed, metrics={"accuracy": 0.5})
        write_run(tmp_path / "minilm-larger", "qnli", method, seed=seed, metrics={"accuracy": 0.56})
    first, second, both = cells(script("pooled")["pooled_section"](tmp_path), "SAM - ERM")
    assert [each.split(" (")[0] for each in first[2:4]] == ["6.00 [6.00, 6.00]", "3.00 [3.00, 3.00]"]
    assert [each.split(" (")[0] for each in second[2:4]] == ["-3.00 [-3.00, -3.00]", "0.00 [0.00, 0.00]"]
    assert second[4] == "1 of 4"
    # 2, 4 and 12 points of the one, -2, -4, -12 and 6 of the other; CoLA of neither in the last column.
    assert [both[1], *(each.split(" (")[0] for each in both[2:4])] == ["7", "0.86 [0.86, 0.86]", "1.20 [1.20, 1.20]"]
    assert both[4] == "4 of 7"


def test_the_best_learning_rates_of_both_encoders_are_bold(tmp_path: Path) -> None:
    for folder, scores in (("lr-glue", (0.6, 0.7)), ("lr-minilm", (0.8194444444444444, 0.8194444444444446))):
        for lr, score in zip((5e-5, 1e-4), scores, strict=True):
            for seed in (101, 102):
                metrics = {"accuracy": score}
                write_run(tmp_path / folder, "qqp", seed=seed, metrics=metrics, lr=lr, split="train[90%:]")
    text = script("glue")["learning_rates"](tmp_path)
    assert cells(text, "QQP") == [["QQP", "60.0", "**70.0**"]]
    assert cells(text, "QQP, second encoder") == [["QQP, second encoder", "**81.9**", "**81.9**"]]


def test_the_larger_tasks_of_the_second_encoder_name_their_sweeps(tmp_path: Path) -> None:
    assert script("glue")["second_larger_section"](tmp_path) == ""
    for seed, score in ((1, 0.5), (2, 0.6)):
        write_run(tmp_path / "minilm-larger", "qqp", seed=seed, metrics={"accuracy": score}, lr=2e-4)
        sam = {"name": "SAM", "rho": 0.01}
        write_run(tmp_path / "minilm-larger", "qqp", sam, seed=seed, metrics={"accuracy": score + 0.03}, lr=2e-4)
    text = script("glue")["second_larger_section"](tmp_path)
    assert "evidence/minilm-qqp.yaml --output results/minilm-larger" in text
    assert "0.0002 on QQP" in text
    assert cells(text, "SAM - ERM")[0][1].startswith("3.00 ")


def test_the_second_encoder_is_compared_with_its_own_plain_training(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "minilm", "cola", seed=seed, metrics={"matthews": 0.2})
        write_run(tmp_path / "minilm", "cola", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"matthews": 0.25})
    text = script("glue")["second_encoder_section"](tmp_path)
    assert "learning rate 0.0001" in text
    assert cells(text, "SAM - ERM")[0][1].startswith("5.00 ")


def test_labels_have_a_row_for_every_weighting_and_model(tmp_path: Path) -> None:
    folder = tmp_path / "weights-by-label"
    folder.mkdir()
    for updates in (60, 20):
        lines = {"with_loss": [0.1, 0.3], "by_label": {"0": [1.5, 1.5], "1": [0.8, 0.8]}}
        record = {
            "updates": updates, "rows": 64, "batch": 32, "rho": 0.01, "device": "cpu", "commit": "0123456789",
            "weightings": {"FiniteDifference": lines, "RandomWeights": lines},
        }  # fmt: skip
        (folder / f"cola-erm-{updates}.json").write_text(json.dumps(record))
    text = script("labels")["labels_section"](tmp_path)
    assert [row[1] for row in cells(text, "20")] == ["Eq. 5", "Eq. 5, shuffled"]
    assert text.index("| 20 |") < text.index("| 60 |")
    assert cells(text, "60")[0][2].startswith("0.20 [")
    assert "commit 0123456" in text


def test_eta_has_a_row_for_every_model_and_radius(tmp_path: Path) -> None:
    folder = tmp_path / "weights-eta"
    folder.mkdir()
    for task, label, updates in (
        ("cola", "erm-20", 20),
        ("mrpc", "erm-60", 60),
        ("mrpc", "sam-9", 9),
        ("mrpc", "erm-9", 9),
    ):
        lines = {
            "0.0001": {"floor": [0.5, 0.75], "cosine": [1.0, 1.0]},
            "0.001": {"floor": [1.0, 1.0], "cosine": [0.9, 0.9]},
        }
        record = {
            "task": task, "updates": updates, "rows": 64, "batch": 32, "device": "cpu, 2 threads",
            "commit": "0123456789", "eta": {"0.01": lines, "0.05": lines},
        }  # fmt: skip
        (folder / f"{task}-{label}.json").write_text(json.dumps(record))
    text = script("eta")["eta_section"](tmp_path)
    assert [row[1:3] for row in cells(text, "MRPC")] == [["9", "0.01"], ["9", "0.05"], ["60", "0.01"], ["60", "0.05"]]
    assert cells(text, "CoLA")[0][3:] == ["0.62 [0.50, 0.75]", "1.00 [1.00, 1.00]", "0.900 [0.900, 0.900]"]
    assert text.index("MRPC") < text.index("CoLA"), "as the page has its tasks"
    assert "eta = 0.0001 | eta = 0.001 |" in text
    assert "float32, cpu, commit 0123456" in text
    assert "--sweep configs/sweeps/evidence/weights-cola.yaml" in text


def test_sts_shows_the_chosen_radius_beside_the_paper(tmp_path: Path) -> None:
    sets = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")

    def metrics(value: float) -> dict[str, float]:
        return {"sts_average": value, **dict.fromkeys(sets, value)}

    folder = tmp_path / "sts"
    for rho, score in ((0.02, 0.5), (0.1, 0.7)):
        own = {"name": "SAM", "rho": rho}
        write_run(folder, "mirror", own, seed=101, metrics={"sts_average": score}, split="validation")
    for seed in range(1, 6):
        write_run(folder, "mirror", seed=seed, metrics=metrics(0.6 + seed / 100), split="test")
        write_run(folder, "mirror", {"name": "SAM", "rho": 0.1}, seed=seed, metrics=metrics(0.7), split="test")
    write_run(folder, "mirror", seed=1, metrics=metrics(0.4), split="test", lr=0.0)
    text = script("other")["sts_section"](tmp_path)
    assert cells(text, "without training")[0][2:5] == ["1", "40.00", "40.00"]
    assert cells(text, "Mirror-BERT")[0][2] == "5", "the untrained encoder is not one of the seeds"
    (sam,) = cells(text, "SAM")
    assert sam[1:3] == ["rho = 0.1", "5"]
    assert sam[-1] == "75.50"
    (difference,) = cells(text, "SAM - Mirror-BERT")
    assert difference[1].startswith("7.00 [")
    assert difference[1].endswith("(n = 5, p = 0.062)")


def test_summarization_says_how_small_it_is(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for regularisers, score in (((), 0.3), (({"name": "R3F"},), 0.31)):
            metrics = {"rouge1": score, "rouge2": 0.1, "rougeLsum": 0.2, "words": 40.0}
            folder = tmp_path / "summarization"
            write_run(folder, "cnn_dailymail", seed=seed, metrics=metrics, regularisers=regularisers)
    text = script("other")["summarization_section"](tmp_path)
    assert "trained for 10 updates on 492 articles, evaluated on 256" in text
    assert cells(text, "R3F")[0][2:4] == ["3", "31.00 [31.00, 31.00]"]
    assert cells(text, "R3F - ERM")[0][1] == "1.00 [1.00, 1.00] (n = 3, p = 0.25)"


def test_running_times_from_the_files_of_bench_train(tmp_path: Path) -> None:
    train = pytest.importorskip("deltasam.lab.bench.train")
    seconds = {"sam": 60.0, "delta-sam": 90.0}

    def run(each: Any, number: int) -> Any:
        took = seconds[each.method] / (1 if each.way == "eager" else 3)
        return train.Trained(
            train_seconds=took, seconds_per_update=took / 100, updates=100, forwards=1, backwards=1, skipped=0,
            metric="accuracy", value=0.5, peak_bytes=1, device="a GPU",
        )  # fmt: skip

    plan = [train.Training(method, way) for way in ("eager", "captured") for method in seconds]
    options = {"task": "rte", "model": "m", "precision": "tf32", "epochs": 3.0, "steps": None, "batch": 32,
               "repeats": 1, "seed": 1, "settings": ["batch.size=32"]}  # fmt: skip
    report = train.measure(plan, run, repeats=1, options=options, machine={"torch": "2"})
    train.write_json(report, tmp_path / "times" / "rte.json")
    text = script("times")["times_section"](tmp_path)
    row = next(row for row in cells(text, "RTE") if row[1] == "δ-SAM")
    assert row[2:] == ["100", "1.500", "1.50", "0.500", "1.50", "0.33", "16", "1.07"]
    assert "deltasam bench train rte batch.size=32 --model m --epochs 3 --precision tf32" in text
    assert "Running times" not in script("page")["page"](tmp_path).partition("## Not measured yet")[2]


def test_radii_are_compared_at_the_same_radius(tmp_path: Path) -> None:
    assert script("radius")["radius_section"](tmp_path) == ""
    weighting = {"name": "FiniteDifference"}
    for seed in (1, 2, 3):
        write_run(tmp_path / "glue", "cola", seed=seed, metrics={"matthews": 0.2})
        write_run(tmp_path / "glue", "cola", {"name": "SAM", "rho": 0.01}, seed=seed, metrics={"matthews": 0.1})
        for name, value in (("SAM", 0.3), ("DeltaSAM", 0.34)):
            method = {"name": name, "rho": 0.005, **({"weighting": weighting} if name == "DeltaSAM" else {})}
            write_run(tmp_path / "radius-cola", "cola", method, seed=seed, metrics={"matthews": value})
    text = script("radius")["radius_section"](tmp_path)
    assert cells(text, "method")[0][1:] == ["rho = 0.005", "rho = 0.01"]
    assert [value.partition(" ")[0] for value in cells(text, "SAM")[0][1:]] == ["30.0", "10.0"]
    assert [value.partition(" ")[0] for value in cells(text, "SAM - ERM")[0][1:]] == ["10.00", "-10.00"]
    assert [value.partition(" ")[0] for value in cells(text, "δ-SAM - SAM")[0][1:]] == ["4.00", "-"]
    assert list(script("radius")["plots"](tmp_path)) == ["radius.svg"]
