"""``deltasam bench step --lora``: adapters as PEFT computes them, ratios to plain LoRA, and a table that survives."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltasam.lab.bench import _candidates, report
from deltasam.lab.bench._candidates import Candidate, named, of_method
from deltasam.lab.bench._llama import LLAMAS, chosen_shape
from deltasam.lab.bench._lora import LoraLinear, with_adapters
from deltasam.lab.bench._lora_steps import lora_candidates, plain_loop
from deltasam.lab.bench._measure import measure
from deltasam.lab.bench._memory import peak_of_steps
from deltasam.lab.bench._plot import plot
from deltasam.lab.bench._workbench import NO_OPTIMIZER, Optimizer, Workbench, set_up
from deltasam.lab.bench.options import StepOptions
from deltasam.lab.bench.report import PLAIN_LORA, Report, Row
from deltasam.methods import ERM, MomentumSAM
from deltasam.step.adapters import adapted_layers, base_matrices
from helpers.clocks import StoodClock
from helpers.data import REPOSITORY
from helpers.taped import play_graphs_on_the_cpu

pytest.importorskip("transformers")

TINY = StepOptions(
    lora=True, model="llama-tiny", hidden=16, heads=2, vocab=32, rank=4, batch=2, length=8, rounds=2, warmup=0,
    device="cpu",
)  # fmt: skip
CPU = torch.device("cpu")
MIB = 2**20


def changed(**options: object) -> StepOptions:
    return StepOptions(**{**vars(TINY), **options})


@pytest.fixture(scope="module")
def measured() -> Report:
    return measure(changed(methods=("sam:params=adapters", "per-instance-sam:params=adapters")))


def row(result: Report, name: str) -> Row:
    return next(each for each in result.rows if each.name == name)


# -- the model --------------------------------------------------------------------------------------------------------


def llama(library: str | None = None, **options: object) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return with_adapters(model, rank=4, library=library)[0]


def test_the_built_in_adapters_compute_what_pefts_do() -> None:
    pytest.importorskip("peft")
    ours, theirs = llama("built-in"), llama("peft")
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    prefix = "base_model.model."
    named_ours = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        same = named_ours.pop(name.removeprefix(prefix))
        assert (same.dtype, same.shape, same.requires_grad) == (p.dtype, p.shape, p.requires_grad)
        same.data.copy_(p.data)
    assert not named_ours
    tokens = torch.randint(32, (2, 6))
    losses = []
    for model in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, p in trained.items():
        torch.testing.assert_close(ours.get_parameter(name.removeprefix(prefix)).grad, p.grad)
    assert list(adapted_layers(ours)) == [name.removeprefix(prefix) for name in adapted_layers(theirs)]


@pytest.mark.parametrize("library", ["built-in", "peft"])
def test_adapters_of_a_half_precision_base_are_float32_and_alone_are_trained(library: str) -> None:
    if library == "peft":
        pytest.importorskip("peft")
    model = llama(library)
    for name, p in model.named_parameters():
        assert (p.dtype, p.requires_grad) == ((torch.float32, True) if "lora_" in name else (torch.bfloat16, False))
    layers = {name.rpartition(".")[2] for name in adapted_layers(model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # not the head
    assert len(base_matrices(model)) == 14


def test_dropout_is_on_the_input_of_the_adapter() -> None:
    layer = LoraLinear(torch.nn.Linear(4, 3), rank=2, alpha=4, dropout=0.5)
    x = torch.randn(5, 4)
    base = layer.base_layer(x)
    layer.eval()
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), base + x @ down.T @ up.T * 2)
    layer.train()
    torch.manual_seed(0)
    dropped = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(dropped, base + torch.nn.functional.dropout(x, 0.5) @ down.T @ up.T * 2)


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {}
    for name, shape in LLAMAS.items():
        config = LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=shape.tied,
        )  # fmt: skip
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert {name: round(size / 1e6, 1) for name, size in sizes.items() if name != "llama-tiny"} == {
        "llama-135m": 134.5, "llama-1.1b": 1100.0, "llama-7b": 6738.4,
    }  # fmt: skip


def test_given_sizes_change_the_shape_in_proportion() -> None:
    shape = chosen_shape(StepOptions(lora=True, model="llama-1.1b", hidden=64, heads=8, layers=3))
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.mlp) == (3, 64, 8, 4, 176)
    with pytest.raises(ValueError, match=r"hidden=60 must be a multiple of 2 \* heads=16"):
        chosen_shape(StepOptions(lora=True, model="llama-1.1b", hidden=60, heads=8))


def test_the_base_has_the_type_of_the_precision_and_checkpointing_gives_the_same_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        bench = set_up(changed(precision="fp32", checkpointing=checkpointing))
        assert {p.dtype for p in bench.model.parameters()} == {torch.float32}
        bench.loss().backward()
        gradients.append([p.grad for p in bench.model.parameters() if p.requires_grad])
        recomputed = [m for m in bench.model.modules() if getattr(m, "gradient_checkpointing", False)]
        assert bool(recomputed) == checkpointing
    torch.testing.assert_close(*gradients)
    half = set_up(TINY)
    assert half.autocast == torch.bfloat16
    assert {p.dtype for p in half.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_the_weights_in_memory_are_counted_once() -> None:
    bench = set_up(changed(vocab=1000))
    table = 1000 * 16 * 2  # the head is tied to it
    assert table < bench.resident_bytes < 2 * table


# -- what is measured -------------------------------------------------------------------------------------------------


def test_passes_and_names_of_the_rows(measured: Report) -> None:
    found = {each.name: (each.forwards, each.backwards) for each in measured.rows}
    assert found == {
        "plain LoRA": (1, 1),
        "plain loop": (1, 1),
        "SAM(params=adapters)": (2, 2),
        "PerInstanceSAM(params=adapters)": (2, 2),
    }
    assert not measured.failures


def test_memory_counts_the_weights_and_is_relative_to_plain_lora(measured: Report) -> None:
    plain, sam = row(measured, PLAIN_LORA), row(measured, "SAM(params=adapters)")
    assert plain.memory_times_plain == 1
    assert sam.memory_times_plain == sam.total_bytes / plain.total_bytes > 1
    weights = set_up(TINY).resident_bytes
    for each in measured.rows:
        assert each.total_bytes == each.peak_bytes + weights
        assert weights < each.steady_bytes <= each.total_bytes


def test_per_instance_sam_on_the_base_takes_two_passes_without_a_fallback() -> None:
    result = measure(changed(methods=("per-instance-sam:params=base",), rounds=1))
    base = row(result, "PerInstanceSAM(params=base)")
    assert (base.forwards, base.backwards, result.remarks) == (2, 2, {})


def test_the_plot_shows_the_time_relative_to_plain_lora(measured: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(measured, tmp_path / "lora.svg")
    drawn = (tmp_path / "lora.svg").read_text()
    assert "time / plain LoRA's" in drawn
    assert "eager SAM" not in drawn


@pytest.mark.slow
def test_a_gradient_of_the_base_shows_in_the_memory() -> None:
    """SAM on the base needs a gradient of every matrix, or a copy: more than on the adapters."""
    wide = changed(hidden=128, rank=1, length=4, rounds=1, methods=("sam:params=adapters", "sam:params=base"))
    result = measure(wide)
    adapters, base = (row(result, f"SAM(params={which})") for which in ("adapters", "base"))
    matrices = sum(p.numel() * p.element_size() for p in base_matrices(set_up(wide).model).values())
    assert base.total_bytes - adapters.total_bytes > 0.9 * matrices


def stood(clock: StoodClock, name: str, seconds: float, method: str = "") -> Candidate:
    return Candidate(name, "third_party", lambda bench, optimizer: clock.work(seconds), method=method or name)


def test_times_are_relative_to_plain_lora_of_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoodClock(monkeypatch)
    entries = [stood(clock, PLAIN_LORA, 1 / 64), stood(clock, "other", 1 / 8)]
    result = measure(changed(memory=False), entries)
    assert [each.times_plain.median for each in result.rows] == [1.0, 8.0]
    assert row(result, "other").seconds.median == 1 / 8


def test_ratios_are_computed_in_turn_with_plain_lora(measured: Report) -> None:
    sam = row(measured, "SAM(params=adapters)")
    assert len(sam.rounds) == TINY.rounds
    assert sam.seconds.median == pytest.approx(statistics.median(sam.rounds))
    assert sam.times_plain.low <= sam.times_plain.median <= sam.times_plain.high


class OutOfMemory:
    """A step that does not fit: always, or only beside plain LoRA's."""

    def __init__(self, *, only_in_company: bool) -> None:
        self.only_in_company, self.company = only_in_company, 0

    def beside(self, bench: Workbench, optimizer: Optimizer) -> object:
        self.company += 1
        work = of_method(ERM).build(bench, optimizer)

        class Step:
            def __call__(step) -> None:  # noqa: N805
                work()

            def __del__(step) -> None:  # noqa: N805
                self.company -= 1

        return Step()

    def build(self, bench: Workbench, optimizer: Optimizer) -> object:
        work = of_method(ERM).build(bench, optimizer)

        def step() -> None:
            if self.company or not self.only_in_company:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\na lot")
            work()

        return step


@pytest.mark.parametrize("only_in_company", [False, True])
def test_out_of_memory_in_one_cell_does_not_end_the_table(
    only_in_company: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    large = OutOfMemory(only_in_company=only_in_company)
    entries = [
        Candidate(PLAIN_LORA, "deltasam", large.beside, method=PLAIN_LORA),
        Candidate("large", "deltasam", large.build, method="large"),
        plain_loop(),
    ]
    result = measure(TINY, entries)
    report.show(result)
    shown = capsys.readouterr().out
    if only_in_company:
        assert [each.name for each in result.rows] == [PLAIN_LORA, "large", "plain loop"]
        alone, plain = row(result, "large"), row(result, PLAIN_LORA)
        assert alone.times_plain.median == pytest.approx(alone.seconds.median / plain.seconds.median)
    else:
        assert [each.name for each in result.rows] == [PLAIN_LORA, "plain loop"]
        assert "large could not run: OutOfMemoryError: CUDA out of memory. Tried to allocate" in shown


def test_a_fallback_is_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    def build(bench: Workbench, optimizer: Optimizer) -> object:
        import warnings

        return lambda: warnings.warn("one after the other (slow)", stacklevel=1)

    entries = [of_method(ERM, PLAIN_LORA), Candidate("slow", "third_party", build, method="slow")]
    report.show(measure(changed(memory=False), entries))
    assert "slow warned: one after the other (slow)" in capsys.readouterr().out


def test_the_first_line_is_what_a_user_decides_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = StoodClock(monkeypatch)
    base = "PerInstanceSAM(params=base)"
    plain, last = stood(clock, PLAIN_LORA, 1 / 64), stood(clock, "last", 1 / 8)
    entries = [plain, stood(clock, "SAM(params=adapters)", 3 / 64), stood(clock, base, 1 / 32), last]
    report.show(measure(changed(memory=False), entries))
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("A step of SAM(params=adapters) costs 3.00 plain LoRA steps here")
    assert re.findall(r"\d+\.\d+", first) == ["3.00", "2.00"], "SAM, then per-instance on the base"
    assert first.endswith("(eager).")
    (only,) = report.headlines(measure(TINY, [plain, last]))
    assert re.findall(r"\d+\.\d+", only) == ["8.00", "1.00"], "without both, the last method: time and memory"


def test_captured_steps_are_compared_with_captured_plain_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(_candidates, "GRAPHS", ("cpu",))
    monkeypatch.setattr("deltasam.lab.bench._trial.adamw", lambda kind: NO_OPTIMIZER)  # AdamW captures on a GPU only
    monkeypatch.setattr("deltasam.lab.bench._lora_steps.adamw", lambda kind: NO_OPTIMIZER)
    result = measure(changed(methods=("sam",), ways=("eager", "captured"), memory=False))
    assert [each.name for each in result.rows] == [
        "plain LoRA", "plain loop", "SAM", "plain LoRA captured", "SAM captured",
    ], result.failures  # fmt: skip
    assert row(result, "plain LoRA captured").times_plain.median == 1
    captured = row(result, "SAM captured")
    assert (captured.way, captured.forwards, captured.backwards) == ("captured", 2, 2)


def test_where_nothing_is_captured_the_reason_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(changed(methods=("sam",), ways=("captured",), memory=False))
    assert not result.rows
    report.show(result)
    reason = "RuntimeError: not captured: there are no CUDA graphs on a CPU"
    assert f"plain LoRA captured could not run: {reason}" in capsys.readouterr().out


def test_the_default_methods_are_those_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [each.name for each in lora_candidates(TINY)]
    assert names[:5] == [
        "plain LoRA", "plain loop", "SAM(params=adapters)", "PerInstanceSAM(params=adapters)",
        "PerInstanceSAM(params=base)",
    ]  # fmt: skip
    monkeypatch.setitem(_candidates.METHODS, "BiLoRA", MomentumSAM)  # one of those that are measured where they exist
    assert lora_candidates(TINY)[-1].name == "MomentumSAM"
    assert [each.name for each in lora_candidates(changed(methods=("erm", "sam", "sam")))][2:] == ["SAM"]


# -- options, peak memory, output -------------------------------------------------------------------------------------


def test_defaults_depend_on_lora() -> None:
    usual, lora = StepOptions(), StepOptions(lora=True)
    assert (usual.model, usual.batch, usual.length, usual.precision, usual.dropout) == (
        "bert-4x256", 16, 64, "fp32", 0.1,
    )  # fmt: skip
    assert (lora.model, lora.batch, lora.length, lora.precision, lora.dropout) == ("llama-1.1b", 8, 512, "bf16", 0.0)
    assert StepOptions(lora=True, batch=16, precision="fp32").precision == "fp32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "bert-base"}, "model=bert-base has no adapters here; .* llama-135m"),
        ({"isolate": True}, "isolate=True"),
        ({"ways": ("compiled",)}, "ways=compiled is not measured with lora"),
        ({"ways": ()}, r"ways=\(\) must not be empty"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"accumulate": 4}, "accumulate=4 is not measured with lora"),
        ({"lora": False, "checkpointing": True}, "checkpointing=True needs lora=True"),
    ],
)
def test_options_that_do_not_go_with_lora_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepOptions(**{"lora": True, **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sam:rho", "write options as name:option=value"),
        ("sam:rhoo=1", "SAM has no hyperparameter rhoo=1; did you mean rho"),
        ("sam:params=bias", "params='bias' must be one of"),
        ("r-drop:alpha=1", "RDrop takes no options here"),
        ("smm:rho=1", "'smm' is not a method"),
    ],
)
def test_bad_options_of_a_method_raise(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named(text)


def test_options_of_a_method_are_read() -> None:
    entry = named("per-instance-sam:params=base,rho=0.02,group=2")
    assert (entry.name, entry.method) == ("PerInstanceSAM(params=base, rho=0.02, group=2)",) * 2
    assert named("delta-sam:probe_every=3").period == 3


def test_the_peak_of_the_first_steps_and_of_later_ones() -> None:
    def block(size: int) -> torch.Tensor:
        return torch.ones(size * MIB // 4)

    kept: list[torch.Tensor] = []

    def first() -> object:
        block(4)
        kept.append(block(1))
        return lambda: block(2)

    peak = peak_of_steps(first, CPU)
    assert (peak.whole, peak.steady, peak.reserved) == (4 * MIB, 3 * MIB, 0)


WITHOUT_PACKAGES = """
import sys
from importlib import util
blocked = ("peft", "tyro", "pydantic", "datasets", "pandas", "matplotlib")
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
find = util.find_spec
util.find_spec = lambda name, *rest: None if name.partition(".")[0] in blocked else find(name, *rest)
from deltasam.lab.bench.step import main
"""


def test_it_runs_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    words = "--lora --model llama-tiny --hidden 16 --heads 2 --vocab 32 --rank 2 --batch 2 --length 4 --rounds 1"
    words += " --warmup 0 --device cpu --checkpointing --methods sam:params=adapters --precision fp32 --json"
    code = f"{WITHOUT_PACKAGES}\nsys.exit(main({[*words.split(), str(tmp_path / 'out.json')]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY / "src"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A step of SAM(params=adapters) costs ")
    assert "LoRA 2 (built-in), checkpointing" in done.stdout
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["headlines"][0].startswith("A step of SAM(params=adapters) costs ")
    assert stored["machine"]["adapters"] == "built-in"
    assert [each["name"] for each in stored["rows"]] == ["plain LoRA", "plain loop", "SAM(params=adapters)"]
    assert all(each["total_bytes"] and each["times_plain"] for each in stored["rows"])
    assert (stored["options"]["model"], stored["options"]["precision"]) == ("llama-tiny", "fp32")
