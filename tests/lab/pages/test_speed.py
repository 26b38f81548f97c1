"""The tables of the speed page: what is compared with what, marks of targets, and measurements that are missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.pages import speed_costs, speed_growth, speed_tables, speed_targets
from deltasam.lab.pages.contents import CONTENTS
from helpers.evidence import table_rows

MAKERS = {name: make for name, make in CONTENTS.items() if name.startswith("speed-")}


def write(results: Path, part: str, size: str, milliseconds: dict[str, float], **more: Any) -> None:
    """A measurement of one round with these steps; the options of the shape are those of BERT-base in bf16."""
    batch, length = map(int, size.split("x"))
    options = {"model": "bert-base", "batch": batch, "length": length, "precision": "bf16", **more.pop("options", {})}
    spreads = {name: {"median": ms / 1e3, "low": ms / 1e3, "high": ms / 1e3} for name, ms in milliseconds.items()}
    one = {"median": 1.0}
    rows = [
        {"name": name, "rounds": [spread["median"]], "seconds": spread, "times_erm": one, "times_sam": one,
         "forwards": 1, "backwards": 1, "peak_bytes": more.get("peaks", {}).get(name)}
        for name, spread in spreads.items()
    ]  # fmt: skip
    machine = {"device": "GPU", "torch": "x", "commit": "c", "parameters": "109000000", "parameter_bytes": "100"}
    record = {
        "part": part,
        "command": "python x",
        "options": options,
        "rows": rows,
        "failures": {},
        "machine": machine,
    }
    place = results / "speed" / part / f"{options['model']}-{size}-{options['precision']}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({**record, **more}))


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_needs_a_measurement(name: str, tmp_path: Path) -> None:
    made = MAKERS[name](tmp_path)
    assert made
    assert not re.search(r"\d\.\d\d(?! /| at| \|)", made) or name.endswith(
        (".svg", "ratios.md", "memory.md", "long.md")
    )


def test_costs_are_in_eager_plain_steps_of_the_same_measurement(tmp_path: Path) -> None:
    write(tmp_path, "eager", "16x64", {"ERM": 10.0, "SAM": 20.0})
    write(tmp_path, "figures", "16x64", {"ERM": 40.0, "SAM": 90.0, "SAM captured": 10.0})
    write(tmp_path, "compiled", "16x64", {"ERM": 10.0, "SAM": 20.0, "SAM compiled": 15.0, "ERM compiled": 8.0})
    found = table_rows(speed_costs.costs(tmp_path))
    assert found["SAM"] == ["2.00", "0.25", "1.50", "-", "-", "-", "-", "-"]
    assert found["plain training"][:3] == ["1", "-", "0.80"]
    assert found["exact per-instance"] == ["-"] * 8


def test_answers_are_ranges_over_shapes_of_what_was_measured(tmp_path: Path) -> None:
    assert "not measured yet" in speed_costs.answers(tmp_path)
    for part, size, ratio in (("figures", "16x64", 0.98), ("figures", "32x128", 1.04), ("long", "4x1024", 1.5)):
        write(tmp_path, part, size, {"SAM captured": 100.0, "PerInstanceSAM captured": 100 * ratio})
    speed_targets.measured.cache_clear()
    (line,) = (line for line in speed_costs.answers(tmp_path).splitlines() if "per-instance perturbation, in" in line)
    assert "0.98 to 1.04 captured" in line
    assert "1.50 captured at 1,024 tokens" in line
    assert "eager" not in line
    assert "at 512" not in line


def test_long_texts_have_their_own_target(tmp_path: Path) -> None:
    for part, size, ratio in (("long", "8x512", 1.1), ("growth", "16x1024", 1.11)):
        write(tmp_path, part, size, {"SAM captured": 100.0, "PerInstanceSAM captured": 100 * ratio})
    cells = table_rows(speed_targets.long_texts(tmp_path))[speed_targets.CAPTURED_INSTANCE]
    assert cells == ["1.1", "1.10 ±0.00 ✓", "-", "-", "-", "-", "1.11 ±0.00 ✗"]


def test_memory_has_different_targets_in_both_precisions(tmp_path: Path) -> None:
    peaks = {"SAM captured": 100, "PerInstanceSAM captured": 130}
    for precision in ("bf16", "tf32"):
        steps = dict.fromkeys(peaks, 1.0)
        write(tmp_path, "figures", "32x128", steps, peaks=peaks, options={"precision": precision})
    cells = table_rows(speed_targets.ratios(tmp_path, speed_targets.MEMORY))
    assert cells["per-instance, captured, beyond weights and optimizer"][3:5] == ["1.30 ✗", "1.30 ✓"]


def test_other_packages_should_take_longer(tmp_path: Path) -> None:
    times = {"ERM": 10.0, "SAM": 20.0, "SAM captured": 8.0, "pytorch_optimizer.SAM": 20.0}
    write(tmp_path, "peers", "16x64", times)
    found = table_rows(speed_tables.peers(tmp_path))
    assert found["pytorch_optimizer.SAM"][-2:] == ["1.00 ✓", "2.50 ✓"]
    assert found["SAM of davda54's kind"][-2:] == ["-", "-"]
    write(tmp_path, "mlp", "16x1", {"ERM": 1.0, "SAM": 2.2, "pytorch_optimizer.SAM": 2.0}, options={"model": "mlp"})
    small = table_rows(speed_tables.mlp(tmp_path))
    assert small["pytorch_optimizer.SAM"][1:] == ["2.00", "1.10 ±0.00 ✗"]
    assert small["ours"][1] == "2.20"


def test_micro_batches_are_compared_with_as_many_steps(tmp_path: Path) -> None:
    times = {"SAM": 10.0, "SAM, 4 micro-batches": 36.0, "SAM captured": 2.0}
    write(tmp_path, "accumulation", "16x64", times, failures={"SAM, 4 micro-batches captured": "RuntimeError: no"})
    assert table_rows(speed_tables.accumulation(tmp_path))["SAM"] == ["36.0", "0.90", "-", "-"]
    assert "SAM, 4 micro-batches captured | RuntimeError: no" in speed_tables.failures(tmp_path)


def test_methods_with_steps_of_different_kinds(tmp_path: Path) -> None:
    write(tmp_path, "relatives", "16x64", {"SAM": 20.0, "LookSAM": 15.0, "SAM captured": 5.0, "LookSAM captured": 3.0})
    found = table_rows(speed_tables.relatives(tmp_path))
    assert found["`LookSAM`"] == ["15.0", "0.75", "3.0", "0.60", "0.20"]
    assert found["`ESAM`"] == ["-"] * 5


def test_growth_shows_every_axis_and_copes_with_steps_that_failed(tmp_path: Path) -> None:
    write(tmp_path, "growth", "16x64", {"ERM captured": 5.0, "SAM captured": 10.0, "PerInstanceSAM captured": 10.24})
    write(tmp_path, "growth", "16x1024", {"ERM captured": 5.0, "SAM captured": 10.0})
    lines = [line.split(" | ") for line in speed_growth.growth(tmp_path).splitlines()[2:]]
    assert [line[0].strip("| ") for line in lines] == ["instances N", "tokens T", "tokens T", "million parameters"]
    assert lines[0][5:7] == ["1.02", "10.0"], "1,024 tokens in 10.24 ms"
    assert lines[2][1] == "1,024"
    assert lines[2][5:7] == ["-", "-"]
    assert ">PerInstanceSAM<" in speed_growth.figure(tmp_path)


def test_trainings_of_several_tasks(tmp_path: Path) -> None:
    run = {"seconds_per_update": 0.01, "forwards": 2, "backwards": 2, "updates": 1, "prepare_seconds": 3.0}
    row = {"name": "delta-sam captured", "seconds": {"median": 4.0}, "times_sam": {"median": 0.6}, "times_erm": None}
    for task in ("mrpc", "mnli"):
        options = {"task": task, "model": "m", "precision": "bf16", "batch": 16}
        machine = {"device": "GPU", "torch": "x", "commit": "c"}
        (tmp_path / "speed" / "train").mkdir(parents=True, exist_ok=True)
        record = {"options": options, "machine": machine, "rows": [{**row, "runs": [run]}]}
        (tmp_path / "speed" / "train" / f"{task}.json").write_text(json.dumps(record))
    found = table_rows(speed_tables.trainings(tmp_path))
    assert found["MNLI"] == ["delta-sam captured", "4.0", "3.0", "0.60 ✗", "-", "10.0", "2/2"]
    assert len(speed_tables.training_settings(tmp_path).splitlines()) == 2


def test_operations_stand_beside_the_times_of_the_same_shape(tmp_path: Path) -> None:
    write(tmp_path, "eager", "16x64", {"ERM": 10.0, "SAM": 20.0, "PerInstanceSAM": 25.0})
    counts = {"ERM": 100, "SAM": 200, "PerInstanceSAM": 300}
    rows = [{"name": name, "operations": count} for name, count in counts.items()]
    (folder := tmp_path / "speed" / "operations").mkdir()
    for size in ("16x64", "32x128"):
        options = {"model": "bert-base", "size": size, "precision": "bf16"}
        (folder / f"{size}.json").write_text(json.dumps({"options": options, "rows": rows}))
    found = table_rows(speed_tables.operations(tmp_path))
    assert found["bert-base, 16 x 64, bf16"] == ["100", "200", "300", "1.50", "1.25"]
    assert found["bert-base, 32 x 128, bf16"][-1] == "-"


def test_the_time_of_compiling_with_and_without_tuning(tmp_path: Path) -> None:
    (folder := tmp_path / "speed" / "compile-time").mkdir(parents=True)
    for tuned in (True, False):
        record = {"method": "erm", "tuned": tuned, "kernels": 7, "compile_seconds": 9.6, "step_seconds": 0.0123}
        (folder / f"{tuned}.json").write_text(json.dumps(record))
    lines = speed_tables.compile_time(tmp_path).splitlines()[2:]
    assert lines == ["| erm | no | 7 | 10 | 12.30 |", "| erm | yes | 7 | 10 | 12.30 |"]
