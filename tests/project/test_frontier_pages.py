"""The tables and the figure of the frontier sweeps, from made-up results: pairs, missing runs, costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deltasam.lab.pages import frontier
from deltasam.lab.pages.plan import planned
from deltasam.lab.sweeps import final_runs, read_sweep

SWEEPS = {
    "frontier": """
tasks: [mrpc, rte]
models: [bert-small-wiki]
methods:
  erm: ERM
  sam: {method: {name: SAM, rho: 0.01}}
  friendly-sam: {method: {name: FriendlySAM, rho: 0.01}}
  ema: {average: {kind: ema, decay: 0.99}}
seeds: [1, 2, 3]
common: {optimizer: {lr: 1.0e-4}}
""",
    "frontier-classes": """
tasks: [mrpc]
models: [bert-small-wiki]
methods:
  label-smoothing: {regularisers: [{name: LabelSmoothing, smoothing: 0.1}]}
seeds: [1, 2, 3]
common: {optimizer: {lr: 1.0e-4}}
""",
    "frontier-llm": """
tasks: [mnli-prompt]
models: [{path: smollm2-135m, lora: true}]
methods:
  erm: ERM
  sam: {method: {name: SAM, rho: 0.01}}
  sam-base: {method: {name: SAM, rho: 0.003, params: base}}
seeds: [1, 2]
common: {optimizer: {lr: 1.0e-4}}
""",
}
ABOVE = {"erm": 0.0, "sam": 0.01, "ema": 0.02, "label-smoothing": -0.03, "sam-base": -0.05}
PASSES = {"sam": 2, "sam-base": 2}


def write(root: Path, sweep: str, folder: str, *arms: str, above: float = 0.0) -> None:
    """Writes the runs of some arms of a sweep: seed / 100 above 0.8, plus the gain of the arm."""
    file = root / "configs" / "sweeps" / "evidence" / f"{sweep}.yaml"
    for run in final_runs(read_sweep(file), {}):
        if run.method not in arms:
            continue
        config, place = run.config, root / "results" / folder / run.config.run_name
        score = 0.8 + config.seed / 100 + ABOVE[run.method] + above
        metrics = {"accuracy": score, "nll": 1 - score, "ece": 0.1, "forgetting": 0.0, "accuracy_4bit": score / 2}
        passes = 10 * PASSES.get(run.method, 1)
        result = {
            "run_id": config.run_id, "task": config.task.name, "model": config.model.path, "seed": config.seed,
            "method": "+".join(config.arm), "primary_metric": "accuracy", "higher_is_better": True,
            "best_value": score, "metrics": metrics, "steps": 10, "eval_rows": 100, "train_seconds": 1.0,
            "forward_passes": passes, "backward_passes": passes, "peak_memory_bytes": 1, "device": "cpu",
            "config": config.to_plain(),
        }  # fmt: skip
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps(result))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "configs" / "sweeps" / "evidence"
    folder.mkdir(parents=True)
    for name, text in SWEEPS.items():
        (folder / f"{name}.yaml").write_text(text)
    write(tmp_path, "frontier", "glue", "erm", "sam")
    return tmp_path


def lines(text: str) -> dict[str, list[str]]:
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {line[0]: line[1:] for line in found}


def test_arms_without_runs_are_listed(root: Path) -> None:
    found = lines(frontier.encoder_table(root / "results"))
    assert found["method"] == ["passes", "MRPC", "RTE", "mean over the tasks"]
    assert found["SAM"] == ["2 / 2", "1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]"]
    assert found["FriendlySAM"] == found["EMA of the weights"] == found["label smoothing"] == ["-"] * 4
    assert lines(frontier.llm_table(root / "results"))["SAM, frozen weights"] == ["-"] * 5
    assert {"ema", "friendly-sam", "label-smoothing"} <= set(planned(root).query("not done")["method"])
    drawn = frontier.figure(root / "results")
    assert ">SAM<" in drawn
    assert "FriendlySAM" not in drawn


def test_runs_pair_by_seed_and_the_newer_folder_counts(root: Path) -> None:
    write(root, "frontier", "frontier", "ema", "erm", above=-0.005)  # plain training was run again, half a point lower
    write(root, "frontier-classes", "frontier", "label-smoothing")
    removed = next((root / "results" / "frontier").glob("rte-*-ERM-EMA-s3-*/result.json"))
    removed.unlink()
    found = lines(frontier.encoder_table(root / "results"))
    assert found["SAM"][1] == "1.50 [1.50, 1.50]"
    assert found["EMA of the weights"] == [
        "1 / 1", "2.00 [2.00, 2.00]", "2.00 [2.00, 2.00] (n = 2)", "2.00 [2.00, 2.00]",
    ]  # fmt: skip
    assert found["label smoothing"] == ["1 / 1", "-2.50 [-2.50, -2.50]", "-", "-2.50 [-2.50, -2.50] (1 of 2 tasks)"]
    drawn = frontier.figure(root / "results")
    order = re.findall(r">(x 1|x 2|SAM|EMA of the weights|label smoothing)<", drawn)
    assert sorted(order) == ["EMA of the weights", "SAM", "label smoothing", "x 1", "x 2"]
    assert order.index("EMA of the weights") < order.index("label smoothing") < order.index("SAM"), (
        "by cost, then gain"
    )


def test_adapters_and_frozen_weights_are_two_arms(root: Path) -> None:
    write(root, "frontier-llm", "frontier-llm", "erm", "sam", "sam-base")
    found = lines(frontier.llm_table(root / "results"))
    assert found["ERM"] == ["81.50", "18.50", "10.00", "0.00", "40.75"], "itself, not a difference"
    assert found["difference to ERM"] == ["accuracy", "NLL x 100", "ECE x 100", "forgetting x 100", "4 bits"]
    assert found["SAM"][:2] == ["1.00 [1.00, 1.00]", "-1.00 [-1.00, -1.00]"]
    assert found["SAM, frozen weights"][0] == "-5.00 [-5.00, -5.00]"
    assert found["SAM, frozen weights"][4] == "-2.50 [-2.50, -2.50]"
