"""The tables and figures by topic, from made-up runs: what is compared with what, and what is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from deltasam.lab.pages import answers, base, calibration, directions, llm, rounding, shift, stress
from deltasam.lab.pages.answers import Question
from helpers.evidence import table_rows, write_evidence

SAM = {"name": "SAM", "rho": 0.01}
INSTANCE = {"name": "PerInstanceSAM", "rho": 0.01, "group": 1}
ENCODERS = ("bert-small-wiki", "minilm-l6")


def measured(score: float, ece: float, drop: float) -> dict[str, float]:
    """Metrics of a run that loses ``drop`` at 4 bits, twice as much at 3 bits, and nothing at 8."""
    bits = {
        f"accuracy_{n}bit{suffix}": score - lost
        for n, lost in ((8, 0.0), (4, drop), (3, 2 * drop))
        for suffix in ("", "_channel")
    }
    return {
        **bits,
        "ece": ece,
        "nll": 10 * ece,
        "brier": ece,
        "ece_scaled": ece / 2,
        "nll_scaled": 0.4,
        "temperature": 2,
    }


def write_both(folder: Path, models: Sequence[str], seeds: int) -> None:
    """SAM halves the calibration error, loses half as much at 4 bits, and gains with wrong labels or few rows."""
    for model in models:
        for seed in range(1, seeds + 1):
            noise = seed / 1000
            for method, ece, drop in (("ERM", 0.1, 0.04), (SAM, 0.05, 0.02)):
                own = {"model": model, "seed": seed}
                gain = 0.0 if method == "ERM" else 0.01
                bins = [[0, 0.0, 0.0], [10, 0.5, 0.5], [seed, 0.9, 0.9 - ece]]
                write_evidence(
                    folder, "mrpc", method, score=0.8 + noise, metrics=measured(0.8 + noise, ece + noise, drop),
                    reliability={"evaluation": bins, "scaled": bins}, **own,
                )  # fmt: skip
                for level in (0.1, 0.2, 0.4):
                    write_evidence(folder, "mrpc", method, score=0.8 + gain - level, label_noise=level, **own)
                for rows in (250, 1000):
                    write_evidence(folder, "mrpc", method, score=0.7 + 2 * gain + noise, rows=rows, **own)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    write_both(root / "pays", ENCODERS, 3)
    return root


def legend(drawn: str) -> set[str]:
    return set(re.findall(r">(plain training|SAM|δ-SAM|R-Drop|No runs yet\.)<", drawn))


def test_calibration_before_and_after_scaling(results: Path) -> None:
    found = table_rows(calibration.differences(results))
    head = found["difference to ERM"]
    assert found["ERM"][head.index("ECE x 100")] == "10.20"
    assert found["SAM"][head.index("ECE x 100")] == "-5.00 [-5.00, -5.00]"
    assert found["SAM"][head.index("ECE x 100, scaled")] == "-2.50 [-2.50, -2.50]"
    assert found["R-Drop"] == ["-"] * len(head)
    tasks = table_rows(calibration.by_setup_differences(results, "ece"))
    assert tasks["SAM"][tasks["difference to ERM"].index("MRPC, minilm-l6")] == "-5.00 [-5.00, -5.00]"
    assert ">SAM<" in calibration.dots(results)


def test_bins_are_summed_over_runs() -> None:
    bins = [[[0, 0, 0], [1, 0.5, 1.0]], [[0, None, None], [3, 0.9, 0.0]]]
    assert calibration.summed(bins) == [(4.0, pytest.approx(0.8), pytest.approx(0.25))]


def test_the_reliability_diagram_shows_the_runs_that_both_have(tmp_path: Path) -> None:
    for root in (tmp_path / "a", tmp_path / "b"):
        write_both(root / "pays", ENCODERS[:1], 2)
    own = {"evaluation": [[99, 0.9, 0.1]] * 3}
    write_evidence(tmp_path / "b" / "pays", "mrpc", seed=9, score=0.8, reliability=own)  # SAM has no such seed
    one, other = (calibration.reliability(tmp_path / name) for name in "ab")
    assert legend(one) == {"plain training", "SAM"}
    assert re.findall("data [0-9a-f]{64}", one) == re.findall("data [0-9a-f]{64}", other)


def test_what_rounding_costs(results: Path) -> None:
    found = table_rows(rounding.drops(results))
    head = found["difference to ERM"]
    assert found["ERM"][head.index("4 bits, groups of 64")] == "4.00"
    assert found["SAM"][head.index("4 bits, groups of 64")] == "-2.00 [-2.00, -2.00]"
    assert found["SAM"][head.index("3 bits, one scale per channel")] == "-4.00 [-4.00, -4.00]"
    assert table_rows(rounding.scores(results))["SAM"][2] == "78.2", "80.2 - 2"
    assert legend(rounding.figure(results)) == {"plain training", "SAM"}


@pytest.mark.parametrize(
    ("axis", "column", "gain"),
    [("noise", "20% wrong labels (2 setups)", "1.00"), ("rows", "250 rows (2 setups)", "2.00")],
)
def test_stress_is_compared_within_a_condition(results: Path, axis: str, column: str, gain: str) -> None:
    found = table_rows(stress.differences(results, axis, "score"))
    head = found["difference to ERM"]
    assert found["SAM"][head.index(column)] == f"{gain} [{gain}, {gain}]"
    assert found["SAM"][0] == "0.00 [0.00, 0.00]"
    assert legend(stress.figure(results, axis)) == {"plain training", "SAM"}


def test_a_line_uses_the_setups_that_all_lines_have(tmp_path: Path) -> None:
    write_both(tmp_path / "pays", ENCODERS[:1], 3)
    for seed in (1, 2, 3):  # a task that SAM lacks, and on which plain training is bad
        write_evidence(tmp_path / "pays", "rte", seed=seed, score=0.1, metrics=measured(0.1, 0.1, 0.0))
    lines = rounding.common_lines(rounding.runs(tmp_path), ("ERM", "SAM", "R-Drop"), {32.0: "score"})
    assert set(lines) == {"ERM", "SAM"}
    assert lines["ERM"][32.0][0] == pytest.approx(80.2)


def test_a_setup_with_few_seeds_of_one_arm_is_in_no_line(tmp_path: Path) -> None:
    """A mean over setups leaves out those with two seeds: it must do so for all lines, or they compare tasks."""
    write_both(tmp_path / "pays", ENCODERS[:1], 3)
    for method, seeds in (("ERM", (1, 2, 3)), (SAM, (1, 2))):
        for seed in seeds:
            write_evidence(tmp_path / "pays", "rte", method, seed=seed, score=0.1, metrics=measured(0.1, 0.1, 0.0))
    frame = rounding.runs(tmp_path)
    lines = rounding.common_lines(frame, ("ERM", "SAM"), {32.0: "score"})
    assert lines["ERM"][32.0][0] == lines["SAM"][32.0][0] == pytest.approx(80.2)


def test_a_panel_of_wrong_labels_has_one_task_and_the_levels_of_several_arms(tmp_path: Path) -> None:
    write_both(tmp_path / "pays", ENCODERS[:1], 3)
    for seed in (1, 2, 3):  # plain training alone, and SAM with too few seeds
        write_evidence(tmp_path / "pays", "rte", seed=seed, score=0.6)
        write_evidence(tmp_path / "pays", "rte", seed=seed, score=0.5, label_noise=0.1)
    frames = {level: stress.at(tmp_path, "noise", level) for level in stress.NOISE}
    assert stress.lines_of(frames, "bert-small-wiki", "rte") == {}
    lines = stress.lines_of(frames, "bert-small-wiki", "mrpc")
    assert list(lines) == ["ERM", "SAM"]
    assert {level: round(mean) for level, (mean, _, _) in lines["SAM"].items()} == {0: 80, 0.1: 71, 0.2: 61, 0.4: 41}
    drawn = stress.figure(tmp_path, "noise")
    assert ">MRPC, bert-small-wiki<" in drawn
    assert ">RTE, bert-small-wiki<" not in drawn


def test_all_points_of_a_curve_of_forgetting_rest_on_the_same_tasks(tmp_path: Path) -> None:
    for task, forgetting in (("mnli-prompt", 0.0), ("cola-prompt", 0.5)):
        for seed in (1, 2, 3):
            common = {"seed": seed, "model": "smollm2-135m", "lora": True}
            write_evidence(tmp_path / "pays-llm", task, score=0.6, metrics={"forgetting": 0.0}, **common)
            for rho in (0.005, 0.02):
                if rho == 0.005 or task == "mnli-prompt" or seed < 3:  # two seeds of the second task
                    frozen = {"name": "PerInstanceSAM", "rho": rho, "params": "base"}
                    own = {"forgetting": forgetting + rho}
                    write_evidence(tmp_path / "pays-llm", task, frozen, score=0.6, metrics=own, **common)
    drawn = llm.forgetting(tmp_path)
    assert ">per-instance SAM, frozen weights (LoRA; MNLI)<" in drawn


def test_other_sets_are_averaged_within_a_run(tmp_path: Path) -> None:
    for seed in (1, 2, 3, 4):
        for method, gain in (("ERM", 0.0), (SAM, 0.02)):
            sets = {"accuracy_on_qqp": 0.5 + gain, "accuracy_on_paws": 0.6 + 2 * gain, "ece_on_qqp": 0.2}
            write_evidence(tmp_path / "shift", "mrpc", method, seed=seed, score=0.8, metrics=sets)
            write_evidence(tmp_path / "shift", "qqp", method, seed=seed, score=0.8, metrics={"accuracy_on_mrpc": 0.6})
    found = table_rows(shift.overall(tmp_path))
    assert found["ERM"] == ["80.00", "57.50", "-", "20.00"]
    assert found["SAM"][1] == "1.50 [1.50, 1.50]", "3 on one setup, 0 on the other"
    text = shift.by_set(tmp_path)
    first = table_rows(text.split("\n\n")[1])
    assert first["difference to ERM"] == ["mrpc to qqp", "mrpc to paws", "qqp to mrpc"]
    assert first["SAM"] == ["2.00 [2.00, 2.00]", "4.00 [4.00, 4.00]", "0.00 [0.00, 0.00]"]


def test_base_size_shows_the_radius_of_each_task_in_one_row(tmp_path: Path) -> None:
    for task, rho in (("mrpc", 0.01), ("rte", 0.02)):
        for seed in (1, 2, 3):
            write_evidence(tmp_path / "base", task, seed=seed, score=0.8, model="x/mpnet")
            own = {"name": "SAM", "rho": rho}
            write_evidence(tmp_path / "base", task, own, seed=seed, score=0.82, model="x/mpnet")
    found = table_rows(base.differences(tmp_path))
    assert found["difference to ERM"] == ["MRPC, mpnet", "RTE, mpnet"]
    assert found["SAM"] == ["2.00 [2.00, 2.00]"] * 2


def test_runs_with_other_dropout_masks_count_once_plain_training_has_them(tmp_path: Path) -> None:
    """Then they are paired with it, and not with plain training of the same seed that has the first masks."""
    write_both(tmp_path / "pays", ENCODERS, 3)
    other = tmp_path / "pays-other-masks"
    for seed in (1, 2, 3):
        write_evidence(other, "mrpc", "ERM", seed=seed, score=0.5, rows=250)
        write_evidence(other, "mrpc", "DeltaSAM", seed=seed, score=0.51 + seed / 1000, rows=250)
        write_evidence(other, "mrpc", "DeltaSAM", seed=seed, score=0.9, rows=1000)  # without plain training
        write_evidence(other, "mrpc", SAM, seed=seed, score=0.9, rows=250)  # has its runs with the first masks
    found = table_rows(stress.differences(tmp_path, "rows", "score"))
    few, many = (found["difference to ERM"].index(f"{rows} rows (2 setups)") for rows in ("250", "1,000"))
    assert found["δ-SAM"][few].startswith("1.20 [")
    assert found["δ-SAM"][many] == "-"
    assert found["SAM"][few] == "2.00 [2.00, 2.00]"


def test_groups_and_noise_are_compared_with_the_own_direction(tmp_path: Path) -> None:
    write_both(tmp_path / "pays", ENCODERS, 1)
    for seed in (1, 2, 3):
        for group, nll in ((1, 0.5), (8, 0.6)):
            own = {**INSTANCE, "group": group}
            write_evidence(tmp_path / "pays-groups", "mrpc", own, seed=seed, score=0.8, metrics={"nll": nll})
        for name, rho, nll in (
            ("SAM", 0.01, 0.7),
            ("RandomPerturbation", 0.01, 0.9),
            ("RandomPerturbation", 0.02, 9.0),
        ):
            own = {"name": name, "rho": rho}
            write_evidence(tmp_path / "pays-groups", "mrpc", own, seed=seed, score=0.8, metrics={"nll": nll})
    found = table_rows(directions.differences(tmp_path))
    column = found["difference to per-instance SAM, group = 1"].index("NLL x 100")
    assert found["per-instance SAM, group = 1"][column] == "50.00"
    assert found["per-instance SAM, group = 8"][column] == "10.00 [10.00, 10.00]"
    assert found["random perturbation"][column] == "40.00 [40.00, 40.00]"
    assert set(directions.runs(tmp_path)["setup"]) == {"MRPC, bert-small-wiki"}, "the setups with groups"
    assert answers.own_direction(tmp_path, "SAM") == {"MRPC, bert-small-wiki": pytest.approx([-20.0] * 3)}


def test_summaries_as_chat_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Each part is compared with its own plain training, and no run counts among the tasks with classes."""
    for seed in (1, 2, 3):
        for lora, plain, moved in ((False, 0.2, 0.25), (True, 0.3, 0.29)):
            common = {"seed": seed, "model": "smollm2-135m", "lora": lora, "primary": "rougeLsum"}
            for method, score in (("ERM", plain), ({"name": "SAM", "rho": 0.01}, moved)):
                own = {"nll": 2.0, "forgetting": 0.0, "rougeLsum_4bit": score / 2}
                write_evidence(tmp_path / "llm-chat", "cnn_dailymail-chat", method, score=score, metrics=own, **common)
    whole, lora = llm.chat(tmp_path).split("**LoRA**")
    for text, metric, difference, rounded in ((whole, "20.00", "5.00", "2.50"), (lora, "30.00", "-1.00", "-0.50")):
        found = table_rows(text)
        column = found["difference to ERM"].index("4 bits")
        assert found["ERM"][0] == metric
        assert found["SAM"][0] == f"{difference} [{difference}, {difference}]"
        assert found["SAM"][column] == f"{rounded} [{rounded}, {rounded}]"
    assert llm.runs(tmp_path, "LoRA").empty


def test_language_models_by_part_and_radius(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        common = {"seed": seed, "model": "smollm2-135m"}
        for lora in (False, True):
            own = {"nll": 0.9, "ece": 0.1, "forgetting": 0.0, "accuracy_4bit": 0.4}
            write_evidence(tmp_path / "pays-llm", "mnli-prompt", score=0.6, lora=lora, metrics=own, **common)
        for rho in (0.005, 0.02):
            frozen = {"name": "PerInstanceSAM", "rho": rho, "params": "base"}
            own = {"nll": 0.8, "ece": 0.1, "forgetting": rho, "accuracy_4bit": 0.5}
            write_evidence(tmp_path / "pays-llm", "mnli-prompt", frozen, score=0.65, lora=True, metrics=own, **common)
    found = table_rows(llm.differences(tmp_path, "LoRA"))
    head = found["difference to ERM"]
    assert found["per-instance SAM, frozen weights, rho = 0.02"][head.index("forgetting x 100")] == "2.00 [2.00, 2.00]"
    assert found["per-instance SAM, frozen weights, rho = 0.005"][head.index("4 bits")] == "10.00 [10.00, 10.00]"
    assert list(table_rows(llm.differences(tmp_path, "")))[2:] == [
        "ERM",
        "SAM",
        "per-instance SAM",
        "random perturbation",
    ]
    last = table_rows(llm.by_task(tmp_path, "LoRA"))["MNLI"]
    assert last[:3] == ["per-instance SAM, frozen weights, rho = 0.02", "3", "5.00 [5.00, 5.00]"]
    drawn = llm.forgetting(tmp_path)
    assert ">per-instance SAM, frozen weights (LoRA; MNLI)<" in drawn
    assert ">0.005<" in drawn
    assert answers.QUESTIONS["llm_bits"].groups(tmp_path) == {"MNLI, smollm2-135m, LoRA": pytest.approx([10.0] * 3)}


def test_nothing_fails_without_runs(tmp_path: Path) -> None:
    tables = [
        calibration.differences, rounding.scores, rounding.drops, shift.overall, shift.by_set, base.overall,
        base.scores, directions.differences, lambda r: stress.differences(r, "noise", "ece"),
        lambda r: stress.gaps(r, "rows"), lambda r: llm.differences(r, "LoRA"), lambda r: llm.by_task(r, ""),
    ]  # fmt: skip
    assert {make(tmp_path) for make in tables} == {"No runs yet."}
    figures = [calibration.reliability, lambda r: stress.figure(r, "noise"), llm.forgetting]
    assert all(legend(make(tmp_path)) == {"No runs yet."} for make in figures)


def test_verdicts_follow_the_test_and_the_direction() -> None:
    lower = {"a": [-1.0] * 6, "b": [-1.0] * 6}
    questions = {
        "lower": Question(lambda _: lower, -1),
        "higher": Question(lambda _: lower, 1),
        "few": Question(lambda _: {"a": [-1.0] * 3}, -1),
        "none": Question(lambda _: {}),
    }
    found = json.loads(answers.answers(Path(), questions))
    # 2 / 2^12 for twelve pairs, times three for the first two of Holm's steps, times two for the second.
    assert found["lower"] == "**yes**: -1.00 [-1.00, -1.00], 2 setups, p = 0.0015"
    assert found["higher"] == "**no, the opposite**: -1.00 [-1.00, -1.00], 2 setups, p = 0.0015"
    assert found["few"] == "**not shown**: -1.00 [-1.00, -1.00], 1 setup, p = 0.25"
    assert found["none"] == "not measured yet"
