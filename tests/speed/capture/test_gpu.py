"""Captured steps against ordinary ones on a real GPU: the same gradients and masks, no synchronisation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import (
    ASAM,
    ERM,
    GSAM,
    SAM,
    TAT,
    TAVAT,
    WSAM,
    DeltaSAM,
    FreeLB,
    FunctionalSAM,
    Method,
    PerInstanceSAM,
    RandomPerturbation,
)  # fmt: skip
from deltasam.objectives import R3F, SMART, Classification, EmbeddingNoise, NEFTune, RDrop
from deltasam.speed.capture import Captured
from deltasam.speed.capture._graph import RecordedStep
from deltasam.step import fused
from deltasam.weighting import Directional, FiniteDifference, RandomWeights
from helpers.problems import TRANSFORMER

pytestmark = pytest.mark.gpu

METHODS: dict[str, Callable[..., Method]] = {
    "erm": ERM,
    "sam": SAM,
    "asam": ASAM,
    "gsam": GSAM,
    "wsam": WSAM,
    "functional-sam": FunctionalSAM,
    # a radius at which the second difference is above rounding, so that eager and captured weights can be compared
    "delta-sam": lambda: DeltaSAM(weighting=FiniteDifference(radius=2.0)),
    "delta-sam-directional": lambda: DeltaSAM(weighting=Directional()),
    "delta-sam-random": lambda: DeltaSAM(weighting=RandomWeights(of=FiniteDifference(radius=2.0))),
    "delta-sam-every-2": lambda: DeltaSAM(weighting=FiniteDifference(radius=2.0), probe_every=2),
    "per-instance": PerInstanceSAM,
    "free-lb": FreeLB,
    "tat": TAT,
    "tavat": TAVAT,
}
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "plain": Classification,
    "r-drop": lambda: RDrop(Classification()),
    "r3f": lambda: R3F(Classification()),
    "noise": lambda: EmbeddingNoise(Classification(), scale=0.1),
    "neftune": lambda: NEFTune(Classification(), alpha=5.0),
    "smart": lambda: SMART(Classification(), total_steps=100),
}
CASES = (
    [(method, "plain") for method in METHODS]
    + [("erm", o) for o in OBJECTIVES]
    + [("sam", "r-drop"), ("sam", "noise"), ("functional-sam", "r-drop")]
)


def bert(dropout: float = 0.1) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).cuda().train()


def batches(count: int, lengths: tuple[int, ...] = (12,)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        length = lengths[i % len(lengths)]
        ids = torch.randint(5, 97, (6, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        labels = torch.randint(3, (6,), generator=generator)
        made.append({"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": labels.cuda()})
    return made


def train(wrap: Callable[[Method], Any], method: Method, objective: Any, data: list[Any], **surroundings: Any) -> Any:
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    taken = wrap(method)
    torch.manual_seed(7)
    history = []
    for batch in data:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=surroundings.get("bf16", False)):
            step = taken.backward(model, batch, objective)
        history.append((step.losses, step.perturbed_losses, step.weights))
        optimizer.step()
        optimizer.zero_grad()
    return model, history, taken


@pytest.mark.parametrize(("method", "objective"), CASES, ids=map("-".join, CASES))
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_captured_equals_ordinary(method: str, objective: str, bf16: bool) -> None:
    data = batches(8, (12, 9))
    results = [train(w, METHODS[method](), OBJECTIVES[objective](), data, bf16=bf16) for w in (lambda m: m, Captured)]
    (ordinary, history, _), (captured, replayed, taken) = results
    assert taken.report.obstacles == {}
    assert taken.report.replayed >= 4
    tolerance = 3e-2 if bf16 else 2e-4
    for wanted, found in zip(history, replayed, strict=True):
        for a, b in zip(wanted[:2], found[:2], strict=True):
            if a is not None:
                assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    for (name, p), q in zip(ordinary.named_parameters(), captured.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("masked", [True, False], ids=["attention-mask", "no-attention-mask"])
def test_masks_are_new_in_every_step_and_the_same_in_all_passes(masked: bool) -> None:
    """With lr = 0 and one batch, only the masks change the losses; and at rho near 0 both passes must agree.

    Without an attention mask transformers makes one while a graph is recorded, and so uses another kernel than in the
    ordinary step: the dropout masks differ from the ordinary ones, but must still agree in all passes.
    """
    model, (batch,) = bert(), batches(1)
    if not masked:
        del batch["attention_mask"]
    captured = Captured(SAM(rho=1e-12))
    seen = []
    for _ in range(6):
        step = captured.backward(model, batch, Classification())
        assert torch.allclose(step.losses, step.perturbed_losses, atol=1e-6)
        seen.append(step.losses)
        model.zero_grad()
    assert captured.report.replayed == 5
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("precision", ["ambient", "float32"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_probes_concurrent_with_the_pass_at_w(precision: Any, bf16: bool) -> None:
    """The branches of the graph wait for their inputs, and the weights for all branches, in every replay."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    )
    model = transformers.BertForSequenceClassification(config).cuda().train()
    ids = torch.randint(5, 97, (16, 64), device="cuda")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    method = DeltaSAM(weighting=FiniteDifference(radius=4.0, samples=2, precision=precision))
    captured = Captured(DeltaSAM(weighting=method.weighting))
    for number in range(12):
        found = []
        for taken in (method, captured):
            torch.manual_seed(number)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                found.append((taken.backward(model, batch, Classification()), model.classifier.weight.grad.clone()))
            model.zero_grad()
        (a, p), (b, q) = found
        rounding = 1e-4 if precision == "float32" or not bf16 else 0.1
        assert torch.allclose(a.weights, b.weights, rtol=rounding, atol=rounding), number
        assert torch.allclose(p, q, rtol=0.05, atol=0.05 * float(p.abs().max())), number
    assert captured.report.replayed == 11


def test_a_reseeded_stream_repeats_the_step() -> None:
    model, (batch,) = bert(), batches(1)
    captured = Captured(SAM())
    losses = []
    for _ in range(4):
        torch.manual_seed(11)
        losses.append(captured.backward(model, batch, Classification()).losses)
    assert all(torch.allclose(one, losses[0], atol=1e-5) for one in losses)


def test_gradients_accumulate() -> None:
    data = batches(6)
    results = []
    for wrap in (lambda m: m, Captured):
        model, method = bert(dropout=0.0), wrap(SAM())
        method.backward(model, data[0], Classification())
        method.backward(model, data[1], Classification())
        model.zero_grad()
        for batch in data[2:]:
            method.backward(model, batch, Classification(), scale=0.25)
        results.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.allclose(g, results[1][n], rtol=1e-3, atol=1e-6) for n, g in results[0].items())


def test_loss_scaling() -> None:
    data = batches(4)
    results = []
    for wrap in (lambda m: m, Captured):
        model, method = bert(dropout=0.0), wrap(SAM())
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in data:
            with torch.autocast("cuda", dtype=torch.float16):
                method.backward(model, batch, Classification(), scale=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(p, q, rtol=1e-2, atol=1e-3) for p, q in zip(*results, strict=True))


def test_the_whole_step_with_a_schedule() -> None:
    data = batches(8)
    results = []
    for whole in (False, True):
        model = bert(dropout=0.0)
        # a large eps: otherwise Adam turns gradients that are rounding noise (biases of keys) into full steps
        options = {"lr": torch.tensor(1e-2).cuda(), "eps": 1e-2, "capturable": True, "fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        captured = Captured(SAM(), optimizer=optimizer, max_grad_norm=1.0)
        for batch in data:
            if whole:
                captured.step(model, batch, Classification())
            else:
                SAM().backward(model, batch, Classification())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert captured.report.replayed == 7
    assert all(torch.allclose(p, q, rtol=1e-2, atol=2e-4) for p, q in zip(*results, strict=True))


def test_weights_are_restored_bit_for_bit() -> None:
    model, (batch,) = bert(), batches(1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    for method in (SAM(), DeltaSAM(), PerInstanceSAM()):
        captured = Captured(method)
        for _ in range(4):
            captured.backward(model, batch, Classification())
        assert all(torch.equal(p, before[n]) and p.data_ptr() == pointers[n] for n, p in model.named_parameters())


def test_a_recorded_move_is_one_kernel() -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda", torch.cuda.current_device())
    assert fused.is_ready(device)
    model, (batch,) = bert(), batches(1)
    captured = Captured(SAM(rho=0.1))
    for _ in range(2):
        captured.backward(model, batch, Classification())
    (entry,) = captured._seen.values()
    assert isinstance(entry, RecordedStep)
    assert entry._tables is not None
    assert entry._tables._used == 7 * sum(p.numel() % 4 == 0 for p in model.parameters())


def test_a_gradient_that_is_not_finite_falls_back_inside_the_graph() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).cuda()
    captured = Captured(SAM())
    good, bad = torch.randn(4, 3).cuda(), torch.randn(4, 3).cuda()
    bad[1, 1] = float("inf")
    before = model.weight.detach().clone()
    skipped = []
    for x in (good, good, bad, good):
        model.zero_grad()
        step = captured.backward(model, x, lambda m, x: m(x).squeeze(-1).square())
        skipped.append(bool(step.skipped))
        assert torch.equal(model.weight, before)
    assert skipped == [False, False, True, False]
    assert captured.skipped == 1
    assert torch.isfinite(model.weight.grad).all()


@pytest.mark.parametrize("method", [SAM, DeltaSAM], ids=["sam", "delta-sam, which has branches"])
def test_a_model_that_synchronises_is_not_recorded_and_the_warning_names_the_line(
    method: Callable[[], Method],
) -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (1.0 if x.sum().item() > 1e9 else 2.0)

    model = Waits().cuda()
    captured = Captured(method())
    x = torch.randn(4, 3).cuda()

    def objective(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).squeeze(-1).square()

    captured.backward(model, x, objective)
    with pytest.warns(UserWarning, match=r"not captured.*item\(\)"):
        captured.backward(model, x, objective)
    torch.nn.functional.dropout(x, 0.5)  # the generator still works outside
    captured.backward(model, x, objective)
    assert captured.report.ordinary == 3
    other = Captured(method())  # the streams are usable after a failed recording
    for _ in range(3):
        other.backward(model.linear, x, objective)
    assert (other.report.obstacles, other.report.replayed) == ({}, 2)


def test_graphs_of_other_shapes_survive_a_failed_recording() -> None:
    class WaitsIfLong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * (1.0 if len(x) < 5 or x.sum().item() > 1e9 else 2.0)

    def objective(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).squeeze(-1).square()

    model, captured = WaitsIfLong().cuda(), Captured(SAM(rho=1e-12))
    short, long = torch.randn(4, 3).cuda(), torch.randn(6, 3).cuda()
    for _ in range(3):
        captured.backward(model, short, objective)
    captured.backward(model, long, objective)
    with pytest.warns(UserWarning, match="not captured"):
        captured.backward(model, long, objective)
    seen = [captured.backward(model, short, objective) for _ in range(3)]
    for step in seen:
        torch.testing.assert_close(step.perturbed_losses, step.losses, rtol=1e-3, atol=1e-5)  # the same masks
    assert not torch.equal(seen[0].losses, seen[1].losses)
    assert captured.report.replayed == 5


@pytest.mark.parametrize("method", [name for name in METHODS if name != "free-lb"], ids=str)
def test_no_step_synchronises(method: str) -> None:
    """With a model that does not synchronise itself (those of Hugging Face read the attention mask on the host)."""
    model, (ids, labels), objective = TRANSFORMER.make(torch.float32)
    where = {"embeddings": "embeddings"} if method in ("tat", "tavat") else {}
    model, batch, taken = model.cuda(), (ids.cuda(), labels.cuda()), METHODS[method](**where)
    objective = Classification() if method == "functional-sam" else objective  # it needs the outputs
    taken.backward(model, batch, objective)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            taken.backward(model, batch, objective)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_first_replay_waits_for_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets the generators on the stream of the recording before it records, which a busy GPU does late."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        torch.cuda._sleep(10**9)  # about half a second
        begin(graph, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    model = nn.Linear(64, 8).cuda()
    x = torch.randn(16, 64, device="cuda")
    losses = []
    for method in (Captured(RandomPerturbation(rho=0.3)), RandomPerturbation(rho=0.3)):
        steps = [method.backward(model, x, lambda model, x: model(x).square().mean(1)) for _ in range(4)]
        losses.append(torch.stack([step.loss for step in steps]))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
