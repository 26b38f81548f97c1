"""``deltasam bench step``: the instruments are right, and the table holds what the methods promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltasam.bench import report
from deltasam.bench._contestants import BARE_SGD, Contestant, Optimizer, contestants, of_method
from deltasam.bench._measure import measure
from deltasam.bench._workbench import Workbench
from deltasam.bench.options import StepOptions
from deltasam.bench.report import Report
from deltasam.methods import ERM, SAM, DeltaSAM, LookSAM
from helpers.data import REPOSITORY

# Few instances and wide layers: parameters outweigh activations, so that extra memory is told in copies of them.
SMALL = StepOptions(model="mlp", batch=4, rounds=2, warmup=0, device="cpu", field=False)


@pytest.fixture(scope="module")
def measured() -> Report:
    return measure(SMALL)


def row(result: Report, name: str) -> report.Row:
    return next(each for each in result.rows if each.name == name)


def test_passes_are_those_of_the_cost_table(measured: Report) -> None:
    found = {each.name: (each.forwards, each.backwards) for each in measured.rows}
    assert found["ERM"] == (1, 1)
    assert found["SAM"] == found["ASAM"] == found["GSAM"] == (2, 2)
    assert found["DeltaSAM"] == (4, 2)
    k = LookSAM().k
    assert found["LookSAM"] == pytest.approx((1 + 1 / k, 1 + 1 / k))


def test_sam_and_delta_sam_need_one_copy_of_the_parameters(measured: Report) -> None:
    assert row(measured, "ERM").extra_copies == 0
    assert 0.9 < row(measured, "SAM").extra_copies <= 1.02
    assert 0.9 < row(measured, "DeltaSAM").extra_copies <= 1.02


def test_ratios_are_to_erm_and_to_sam(measured: Report) -> None:
    assert row(measured, "ERM").times_erm.median == 1
    assert row(measured, "SAM").times_sam.median == 1
    assert row(measured, "DeltaSAM").times_erm.median > row(measured, "ERM").times_erm.median


def test_a_contestant_that_lies_about_its_passes_is_counted_by_hooks() -> None:
    def build(bench: Workbench, optimizer: Optimizer) -> object:
        def work() -> None:
            for _ in range(3):
                bench.loss().backward()

        return work

    result = measure(SMALL, [of_method(ERM), of_method(SAM), Contestant("three", "field", build)])
    assert (row(result, "three").forwards, row(result, "three").backwards) == (3, 3)


def test_one_that_cannot_run_is_named_and_costs_the_others_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def build(bench: Workbench, optimizer: Optimizer) -> object:
        def work() -> None:
            raise RuntimeError("no kernel for this [type]\nand a long story")

        return work

    result = measure(SMALL, [of_method(ERM), of_method(SAM), Contestant("broken", "field", build)])
    assert [each.name for each in result.rows] == ["ERM", "SAM"]
    report.show(result)
    assert "broken could not run here: RuntimeError: no kernel for this [type]" in capsys.readouterr().out


def test_named_methods_come_with_erm_and_sam() -> None:
    assert [each.name for each in contestants(("delta_sam", "r-drop"), with_field=False, embeddings=True)] == [
        "ERM",
        "SAM",
        "DeltaSAM",
        "RDrop",
    ]
    with pytest.raises(ValueError, match="'delta-sma' is not a method; did you mean DeltaSAM"):
        contestants(("delta-sma",), with_field=False, embeddings=False)


def test_a_method_that_looks_rarely_is_timed_over_its_period() -> None:
    assert of_method(lambda: LookSAM(k=7)).period == 7
    assert of_method(lambda: DeltaSAM(probe_every=3)).period == 3
    assert of_method(SAM).period == 1


def test_the_field_takes_the_passes_its_authors_say() -> None:
    pytest.importorskip("pytorch_optimizer")
    result = measure(StepOptions(**{**vars(SMALL), "field": True, "methods": ("sam",)}))
    theirs = row(result, "pytorch_optimizer.SAM")
    assert (theirs.origin, theirs.forwards, theirs.backwards) == ("field", 2, 2)


def test_transformer_under_autocast() -> None:
    pytest.importorskip("transformers")
    options = StepOptions(
        model="bert-tiny", batch=2, length=4, precision="bf16", rounds=1, warmup=0, device="cpu",
        methods=("delta-sam",), field=False,
    )  # fmt: skip
    result = measure(options)
    assert row(result, "SAM").forwards == 2
    assert row(result, "DeltaSAM").forwards == 5  # the probes are in float32, so they need an l(w) of their own
    assert all(torch.isfinite(torch.tensor(each.seconds.median)) for each in result.rows)


def test_isolated_perturbation_beside_the_field() -> None:
    pytest.importorskip("pytorch_optimizer")
    result = measure(StepOptions(**{**vars(SMALL), "field": True, "isolate": True}))
    assert [each.name for each in result.rows] == [
        "deltasam", "pytorch_optimizer.SAM", "pytorch_optimizer.SAM(foreach=True)",
    ]  # fmt: skip
    assert row(result, "deltasam").times_ours.median == 1


def test_optimizer_of_the_memory_measurement_keeps_no_state() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = BARE_SGD.over(model)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert not any(optimizer.state.values())


def test_table_and_files(measured: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(measured)
    shown = capsys.readouterr().out
    assert "x ERM" in shown
    assert "DeltaSAM" in shown
    report.write_json(measured, tmp_path / "new" / "step.json")
    stored = json.loads((tmp_path / "new" / "step.json").read_text())
    assert stored["options"]["model"] == "mlp"
    assert [each["name"] for each in stored["rows"]] == [each.name for each in measured.rows]
    pytest.importorskip("matplotlib")
    report.plot(measured, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_runs_without_tyro_and_pydantic(tmp_path: Path) -> None:
    """On a machine with torch alone: the modules are made unimportable, the table is plain text."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('tyro', 'pydantic', 'yaml', 'rich')))"
    code = f"""{blocked}
from importlib import util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name in sys.modules and sys.modules[name] is None else find(name, *rest)
from deltasam.bench.step import main
sys.exit(main("--model mlp --hidden 8 --batch 2 --rounds 1 --warmup 0 --device cpu --methods --no-field".split()
              + ["--json", {str(tmp_path / "out.json")!r}]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY / "src"
    )
    assert result.returncode == 0, result.stderr
    assert "x ERM" in result.stdout
    assert (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch": 0}, "batch=0"), ({"dropout": 1.0}, "dropout=1.0"), ({"warmup": -1}, "warmup=-1")],
)
def test_bad_sizes_are_clear_errors(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepOptions(**change)
