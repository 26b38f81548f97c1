"""``deltasam bench step``: the results agree with the documented costs of the methods."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from deltasam.lab.bench import _candidates, report, step
from deltasam.lab.bench._candidates import Candidate, candidates, of_method
from deltasam.lab.bench._measure import measure
from deltasam.lab.bench._output import write_record
from deltasam.lab.bench._plot import plot
from deltasam.lab.bench._workbench import NO_OPTIMIZER, Optimizer, Workbench, adamw, set_up
from deltasam.lab.bench.options import StepOptions
from deltasam.lab.bench.report import Report
from deltasam.methods import ERM, SAM, DeltaSAM, FriendlySAM, LookSAM, Method, MomentumSAM
from deltasam.speed import capture
from deltasam.speed.capture import Captured
from helpers.clocks import StoodClock
from helpers.data import REPOSITORY
from helpers.taped import play_graphs_on_the_cpu

# Few instances and wide layers: the parameters are larger than the activations.
SMALL = StepOptions(model="mlp", batch=4, rounds=2, warmup=0, device="cpu", third_party=False)


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
    for base, found in (("ERM", row(measured, "DeltaSAM").times_erm), ("SAM", row(measured, "DeltaSAM").times_sam)):
        pairs = zip(row(measured, "DeltaSAM").rounds, row(measured, base).rounds, strict=True)
        assert found.median == pytest.approx(statistics.median(one / other for one, other in pairs))


def known(clock: StoodClock, **seconds: float) -> list[Candidate]:
    """Candidates whose steps take this long, by the clock."""
    return [
        Candidate(name, "third_party", lambda bench, optimizer, taken=taken: clock.work(taken), period=2)
        for name, taken in seconds.items()
    ]


def test_the_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StepOptions(**{**vars(SMALL), "memory": False, "hidden": 4})
    result = measure(options, known(StoodClock(monkeypatch), ERM=1 / 64, SAM=1 / 32, other=1 / 8))
    other = row(result, "other")
    assert (other.seconds.median, other.times_erm.median, other.times_sam.median) == (1 / 8, 8.0, 4.0)


def stood(clock: StoodClock, method: str, taken: float, way: str = "eager") -> Candidate:
    name = method if way == "eager" else f"{method} {way}"
    return Candidate(name, "deltasam", lambda bench, optimizer: clock.work(taken), method=method, way=way)


def test_the_first_line_is_the_cost_in_plain_steps_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = StoodClock(monkeypatch)
    options = StepOptions(**{**vars(SMALL), "memory": False, "hidden": 4})
    both = [stood(clock, "ERM", 1 / 64), stood(clock, "SAM", 1 / 32)]
    more = [stood(clock, "SAM", 1 / 128, "captured"), stood(clock, "PerInstanceSAM", 3 / 64)]
    report.show(measure(options, [*both, *more]))
    expected = "A step of SAM costs 2.00 plain steps here; captured 0.50; per-instance 3.00."
    assert capsys.readouterr().out.splitlines()[0] == expected
    result = measure(options, both)
    assert report.headlines(result) == ["A step of SAM costs 2.00 plain steps here."]
    assert report.record(result)["headlines"] == report.headlines(result)


def test_micro_batches_take_the_passes_of_all_of_them() -> None:
    options = StepOptions(
        **{**vars(SMALL), "methods": ("per-instance-sam",), "accumulate": 3, "hidden": 8, "memory": False}
    )
    found = {each.name: (each.forwards, each.backwards) for each in measure(options).rows}
    assert {name: passes for name, passes in found.items() if "micro" in name} == {
        "ERM, 3 micro-batches": (3, 3), "SAM, 3 micro-batches": (6, 6), "PerInstanceSAM, 3 micro-batches": (6, 6),
    }  # fmt: skip
    assert found["SAM"] == (2, 2)


def test_passes_are_counted_by_hooks() -> None:
    def build(bench: Workbench, optimizer: Optimizer) -> object:
        def work() -> None:
            for _ in range(3):
                bench.loss().backward()

        return work

    result = measure(SMALL, [of_method(ERM), of_method(SAM), Candidate("three", "third_party", build)])
    assert (row(result, "three").forwards, row(result, "three").backwards) == (3, 3)


def test_a_candidate_that_fails_is_reported_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    def build(bench: Workbench, optimizer: Optimizer) -> object:
        def work() -> None:
            raise RuntimeError("no kernel for this [type]\nand a long story")

        return work

    result = measure(SMALL, [of_method(ERM), of_method(SAM), Candidate("broken", "third_party", build)])
    assert [each.name for each in result.rows] == ["ERM", "SAM"]
    report.show(result)
    assert "broken could not run: RuntimeError: no kernel for this [type]" in capsys.readouterr().out


def test_named_methods_come_with_erm_and_sam() -> None:
    assert [each.name for each in candidates(("delta_sam", "r-drop"), third_party=False, embeddings=True)] == [
        "ERM",
        "SAM",
        "DeltaSAM",
        "RDrop",
    ]
    with pytest.raises(ValueError, match="'delta-sma' is not a method; did you mean DeltaSAM"):
        candidates(("delta-sma",), third_party=False, embeddings=False)


def test_the_period_of_a_method() -> None:
    assert of_method(lambda: LookSAM(k=7)).period == 7
    assert of_method(lambda: DeltaSAM(probe_every=3)).period == 3
    assert of_method(SAM).period == 1


@pytest.mark.parametrize("make", [SAM, FriendlySAM, MomentumSAM, partial(DeltaSAM, probe_every=3)])
def test_after_the_first_steps_captured_steps_are_replayed(
    make: Callable[[], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(_candidates, "GRAPHS", ("cpu",))
    built: list[Captured] = []
    monkeypatch.setattr(capture, "Captured", lambda *given, **more: built.append(Captured(*given, **more)) or built[0])
    entry = of_method(make, way="captured")
    step = entry.build(set_up(StepOptions(**{**vars(SMALL), "hidden": 8})), NO_OPTIMIZER)
    for _ in range(entry.first_steps - 1):  # the last of them is a replay already
        step()
    before = replace(built[0].report)
    for _ in range(entry.period):
        step()
    assert built[0].report == replace(before, replayed=before.replayed + entry.period)


def test_passes_of_third_party_implementations() -> None:
    pytest.importorskip("pytorch_optimizer")
    result = measure(StepOptions(**{**vars(SMALL), "third_party": True, "methods": ("sam",)}))
    theirs = row(result, "pytorch_optimizer.SAM")
    assert (theirs.origin, theirs.forwards, theirs.backwards) == ("third_party", 2, 2)


def test_transformer_under_autocast() -> None:
    pytest.importorskip("transformers")
    options = StepOptions(
        model="bert-tiny", batch=2, length=4, precision="bf16", rounds=1, warmup=0, device="cpu",
        methods=("delta-sam",), third_party=False,
    )  # fmt: skip
    result = measure(options)
    assert row(result, "SAM").forwards == 2
    assert row(result, "DeltaSAM").forwards == 5  # the probes run in float32 and need another l(w)
    assert all(torch.isfinite(torch.tensor(each.seconds.median)) for each in result.rows)


def test_isolated_perturbation() -> None:
    pytest.importorskip("pytorch_optimizer")
    result = measure(StepOptions(**{**vars(SMALL), "third_party": True, "isolate": True}))
    assert [each.name for each in result.rows] == [
        "deltasam", "pytorch_optimizer.SAM", "pytorch_optimizer.SAM(foreach=True)",
    ]  # fmt: skip
    assert row(result, "deltasam").times_ours.median == 1
    assert report.headlines(result) == [], "no step is taken"


def test_optimizer_of_the_memory_measurement_keeps_no_state() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = NO_OPTIMIZER.over(model)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert not any(optimizer.state.values())


def test_the_implementation_of_adamw_is_the_one_that_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    asked = {kind: adamw(kind).over(model).param_groups[0] for kind in ("fused", "foreach", "for-loop")}
    found = {kind: (group["fused"], group["foreach"]) for kind, group in asked.items()}
    assert found == {"fused": (True, False), "foreach": (False, True), "for-loop": (False, False)}
    result = measure(StepOptions(**{**vars(SMALL), "methods": ("sam",), "adamw": ("fused", "for-loop")}))
    assert [each.name for each in result.rows] == ["ERM", "SAM", "ERM, for-loop AdamW", "SAM, for-loop AdamW"]
    assert row(result, "ERM, for-loop AdamW").peak_bytes is None  # memory is measured without an optimizer


def test_memory_is_relative_to_sam_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_candidates, "GRAPHS", ("cuda", "cpu"))  # eager steps instead of replayed ones
    options = {"methods": ("per-instance-sam",), "ways": ("eager", "captured"), "hidden": 16}
    result = measure(StepOptions(**{**vars(SMALL), **options}))
    captured = row(result, "PerInstanceSAM captured")
    assert (captured.method, captured.way) == ("PerInstanceSAM", "captured")
    assert captured.memory_times_sam == captured.peak_bytes / row(result, "SAM captured").peak_bytes
    assert (captured.forwards, captured.backwards) == (2, 2)
    assert len(captured.rounds) == SMALL.rounds
    assert result.engine == {"low-rank": 4, "materialised": 0}  # rank one


def test_nothing_is_captured_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(StepOptions(**{**vars(SMALL), "methods": ("sam",), "ways": ("captured",), "hidden": 8}))
    assert [each.name for each in result.rows] == ["ERM", "SAM"]
    report.show(result)
    shown = capsys.readouterr().out
    assert "SAM captured could not run: RuntimeError: not captured: there are no CUDA graphs on a CPU" in shown


def test_the_title_names_the_sizes_that_were_given(measured: Report) -> None:
    assert ": mlp, " in measured.title
    options = StepOptions(**{**vars(SMALL), "methods": ("sam",), "layers": 1, "hidden": 8, "memory": False})
    assert ": mlp (layers 1, hidden 8), 0.0M parameters" in measure(options).title


def test_a_copy_of_the_model_counts_as_the_model() -> None:
    """SMART's teacher is a copy that the first step creates; docs/howto/regularisers.md documents 4/3."""
    pytest.importorskip("transformers")
    options = {"model": "bert-tiny", "batch": 2, "length": 4, "methods": ("SMART",), "memory": False, "rounds": 1}
    smart = row(measure(StepOptions(**{**vars(SMALL), **options})), "SMART")
    assert (smart.forwards, smart.backwards) == (4, 3)


@pytest.mark.slow
def test_compiled_steps_are_measured_with_the_passes_of_eager_ones() -> None:
    result = measure(StepOptions(**{**vars(SMALL), "methods": ("sam",), "ways": ("compiled",), "hidden": 8}))
    assert [each.name for each in result.rows] == ["ERM", "SAM", "ERM compiled", "SAM compiled"], result.failures
    assert (row(result, "SAM compiled").forwards, row(result, "SAM compiled").backwards) == (2, 2)


def test_the_engine_materialises_gradients_where_that_is_cheaper() -> None:
    pytest.importorskip("transformers")
    options = {"model": "bert-tiny", "batch": 2, "methods": ("per-instance-sam",), "memory": False, "rounds": 1}
    forms = {length: measure(StepOptions(**{**vars(SMALL), **options, "length": length})).engine for length in (4, 20)}
    # The products of low rank grow with the square of the length: all matrices of the layers switch, not the last two.
    assert forms == {4: {"low-rank": 14, "materialised": 0}, 20: {"low-rank": 2, "materialised": 12}}


def test_steps_per_round_fill_the_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StepOptions(**{**vars(SMALL), "seconds": 1 / 8, "memory": False, "hidden": 4})
    entries = known(StoodClock(monkeypatch), ERM=1 / 64, SAM=1 / 1024, odd=3 / 128, slow=1.0)
    result = measure(options, entries)
    # A round has 1/16 s. Three steps of the third would be enough, but are not a multiple of the period.
    assert {each.name: each.in_a_row for each in result.rows} == {"ERM": 4, "SAM": 64, "odd": 4, "slow": 2}


def test_threads_are_respected() -> None:
    before = torch.get_num_threads()
    try:
        result = measure(StepOptions(**{**vars(SMALL), "threads": 2, "methods": ("sam",), "hidden": 4}))
        assert torch.get_num_threads() == 2
        assert result.machine["threads"] == "2"
    finally:
        torch.set_num_threads(before)


def test_table_and_files(measured: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(measured)
    shown = capsys.readouterr().out
    assert "x ERM" in shown
    assert "DeltaSAM" in shown
    assert shown.count("±") >= 3 * len(measured.rows)  # spread of the time and of both ratios
    write_record(report.record(measured), tmp_path / "new" / "step.json")
    stored = json.loads((tmp_path / "new" / "step.json").read_text())
    assert stored["options"]["model"] == "mlp"
    assert [each["name"] for each in stored["rows"]] == [each.name for each in measured.rows]
    spread = stored["rows"][1]["seconds"]
    assert spread["low"] <= spread["median"] <= spread["high"]
    pytest.importorskip("matplotlib")
    plot(measured, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
    plot(measured, tmp_path / "step.svg")
    drawn = (tmp_path / "step.svg").read_text()
    for text in ("time / eager SAM's", "milliseconds", "peak memory, MiB", "DeltaSAM"):
        assert text in drawn


def test_a_plot_that_cannot_be_drawn_raises_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured_all_the_same(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("deltasam.lab.bench._measure.measure", measured_all_the_same)
    with pytest.raises(ValueError, match=r"plot=out\.gif must end in \.png, \.pdf or \.svg"):
        step.run(StepOptions(plot=Path("out.gif")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"plot=out\.svg needs matplotlib"):
        step.run(StepOptions(plot=Path("out.svg")))


def test_runs_without_tyro_and_pydantic(tmp_path: Path) -> None:
    """Without these modules the table is plain text."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('tyro', 'pydantic', 'yaml', 'rich')))"
    code = f"""{blocked}
from importlib import util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name in sys.modules and sys.modules[name] is None else find(name, *rest)
from deltasam.lab.bench.step import main
sys.exit(main("--model mlp --hidden 8 --batch 2 --rounds 1 --warmup 0 --device cpu --methods --no-third-party".split()
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
    [
        ({"batch": 0}, "batch=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"seconds": 0}, "seconds=0"),
        ({"adamw": ()}, "adamw=\\(\\)"),
        ({"accumulate": 0}, "accumulate=0"),
    ],
)
def test_bad_values_raise(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepOptions(**change)
