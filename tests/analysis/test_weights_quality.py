"""Signal and noise of the weights, against a loop without caches; bfloat16 on a CPU without it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from deltasam.analysis import weights_quality
from deltasam.analysis._bfloat16 import WideProducts, bfloat16
from deltasam.analysis._weights_quality import CONDITIONS
from deltasam.step.passes import Passes
from deltasam.step.randomness import Seed
from deltasam.weighting import Directional, FiniteDifference, OwnGradient, Weighting
from helpers.problems import TRANSFORMER

ALL: dict[str, Weighting] = {"fd": FiniteDifference(), "dir": Directional(), "own": OwnGradient()}


def slow_weights(model: nn.Module, batch: object, objective: object, weighting: Weighting, condition: str) -> Tensor:
    """One weighting under one condition, with separate passes for everything."""
    model = deepcopy(model).train("dropout" in condition)
    masks = "independent" if "independent" in condition else "shared"
    passes = Passes(model, batch, objective, randomness=masks)  # type: ignore[arg-type]
    seed = Seed(0, int(condition == "another direction"))
    return weighting.probe(passes, rho=0.05, eta=1e-4, seed=seed)(passes.losses())


def test_without_caches_the_result_is_the_same() -> None:
    """In float64: differences of rounded losses depend on the machine."""
    model, batch, objective = TRANSFORMER.make(torch.float64, size=6)
    found = weights_quality(model, [batch], objective, weightings=ALL)
    assert [(row.weighting, row.condition) for row in found] == [(name, c) for name in ALL for c in CONDITIONS]
    found = [row for row in found if row.condition not in ("float32", "bf16")]
    slow = {
        (row.weighting, row.condition): slow_weights(model, batch, objective, ALL[row.weighting], row.condition)
        for row in found
    }
    for row in found:
        g, reference = slow[row.weighting, row.condition], slow[row.weighting, "float64"]
        assert row.median == pytest.approx(float(g.median()))
        assert row.spearman == pytest.approx(spearmanr(g, reference).statistic)
        assert row.ideal == pytest.approx(spearmanr(g, slow["own", "float64"]).statistic)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_every_condition_runs_in_its_precision(
    has_bfloat16: bool, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    model, batch, _ = TRANSFORMER.make(stored, size=6)
    seen: set[torch.dtype] = set()

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        seen.add(logits.dtype)
        return nn.functional.cross_entropy(logits, batch[1], reduction="none")

    dtypes = {"float32": torch.float32, "bf16": torch.bfloat16, "another direction": torch.float64}
    for condition, dtype in dtypes.items():
        seen.clear()
        weights_quality(model, [batch], objective, weightings=ALL, conditions=[condition])  # type: ignore[list-item]
        assert seen == {torch.float64, dtype}  # the reference is in float64


def test_onednn_stays_enabled() -> None:
    """torch disables it permanently if oneDNN refuses a product, as under ``ONEDNN_MAX_CPU_ISA=AVX2``."""
    before = torch.backends.mkldnn.enabled
    with bfloat16(torch.device("cpu")):
        torch.backends.mkldnn.enabled = False
    assert torch.backends.mkldnn.enabled == before


def test_quality_of_the_weights() -> None:
    model, batch, objective = TRANSFORMER.make(torch.float32, size=8)
    weights, modes, random = [p.detach().clone() for p in model.parameters()], model.training, torch.get_rng_state()
    rows = {(row.weighting, row.condition): row for row in weights_quality(model, [batch], objective)}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert model.training == modes
    assert torch.equal(torch.get_rng_state(), random)
    for name in ("FiniteDifference", "Directional", "OwnGradient"):
        assert rows[name, "float64"].spearman == 1.0
        assert rows[name, "float64"].snr == float("inf")
    assert rows["OwnGradient", "float64"].ideal == 1.0
    assert rows["OwnGradient", "another direction"].spearman == 1.0  # there is no direction
    assert rows["OwnGradient", "float32"].snr > rows["FiniteDifference", "float32"].snr
    assert rows["FiniteDifference", "dropout, independent masks"].snr < 1
    assert rows["Directional", "float32"].spearman > 0.9


def test_values_of_the_batches_and_a_choice_of_conditions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich treats it as a terminal
    model, (inputs, labels), objective = TRANSFORMER.make(torch.float32, size=8)
    data = [(inputs[:4], labels[:4]), (inputs[4:], labels[4:]), (inputs[:4], labels[:4])]
    options = {"weightings": {"fd": FiniteDifference()}, "conditions": ["another direction"], "progress": True}
    (row,) = weights_quality(model, data, objective, **options)  # type: ignore[arg-type]
    assert row.condition == "another direction"
    assert row.by_batch.keys() == {"spearman", "snr", "ideal", "median"}
    assert row.snr == pytest.approx(sum(row.by_batch["snr"]) / 3)
    assert row.by_batch["median"][0] != row.by_batch["median"][2]  # every batch has its own direction
    output = capsys.readouterr()
    assert "quality of the weights" in output.err
    assert output.out == ""


def test_weights_that_are_all_zero_are_uniform_ones() -> None:
    model = nn.Linear(2, 1)
    (row,) = weights_quality(
        model, [torch.rand(4, 2)], lambda model, x: model(x).squeeze(1), weightings={"own": OwnGradient()},
        conditions=["float32"],
    )  # fmt: skip
    assert row.snr >= 0  # and not NaN: a linear loss has no curvature, g is zero or rounding


def test_products_are_rounded_once() -> None:
    a, b, c = (torch.randint(-9, 10, shape).bfloat16() for shape in ((5, 64), (64, 7), (7,)))  # exact sums
    with WideProducts():
        product, batched, sum_ = a @ b, torch.bmm(a[None], b[None])[0], torch.addmm(c, a, b)
    exact = a.double() @ b.double()
    assert not torch.equal(exact.bfloat16().double(), exact)
    assert torch.equal(product, exact.bfloat16())
    assert torch.equal(batched, exact.bfloat16())
    assert torch.equal(sum_, (c.double() + exact).bfloat16())
    with WideProducts():
        assert (a.float() @ b.float()).dtype == torch.float32  # other products are unchanged


def test_gradients_through_rounded_products_are_rounded_ones() -> None:
    layer, x = nn.Linear(16, 4), torch.randint(-9, 10, (3, 16)).float()
    for p in layer.parameters():
        p.data = torch.randint(-9, 10, p.shape).float()  # exact sums
    with torch.autocast("cpu", dtype=torch.bfloat16), WideProducts():
        y = layer(x)
        (found,) = torch.autograd.grad(y.float().square().sum(), [layer.weight])
    assert y.dtype == torch.bfloat16
    outputs = (layer.bias + x @ layer.weight.T).bfloat16().float()
    assert torch.equal(y.float(), outputs)
    assert torch.equal(found, (2 * outputs.T @ x).bfloat16().float())
