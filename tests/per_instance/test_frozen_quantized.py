"""Per-instance SAM over quantized weights equals a loop over their dequantized values, and leaves them as they are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import ASAM, SAM, DeltaSAM, MicroBatches, PerInstanceSAM, select
from helpers.frozen import Adapter, base_names, randomised, reference, trained_gradients
from helpers.instance_reference import gradient_errors, relative
from helpers.problems import cross_entropy, grads, relative_error
from helpers.quantized import Net, PackedLinear, WithOffset, replaced

RHO = 0.3
LAYERS = ("first", "second", "third")


def packed() -> nn.Module:
    model = Net(PackedLinear)
    return randomised(_by_hand(model))


def packed_by_peft() -> nn.Module:
    """PEFT's own LoRA layer around a layer that it does not know."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=list(LAYERS), modules_to_save=["head"])
    config._register_custom_module({PackedLinear: peft.tuners.lora.Linear})
    model = Net(PackedLinear)
    for layer in (model.first, model.second, model.third):
        layer.in_features, layer.out_features = layer.infeatures, layer.outfeatures  # type: ignore[assignment]
        layer.weight = layer.qweight  # PEFT looks at its device  # type: ignore[assignment]
    return randomised(peft.get_peft_model(model, config))


def four_bits(**options: Any) -> nn.Module:
    peft, bnb = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")

    def build(linear: nn.Linear) -> nn.Module:
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        layer = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    model = Net(build)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # as transformers sets it
    return _by_peft(peft, model, **options)


def eight_bits() -> nn.Module:
    peft, bnb = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")

    def build(linear: nn.Linear) -> nn.Module:
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    model = Net(build)
    model.is_loaded_in_8bit = True  # type: ignore[assignment]
    return _by_peft(peft, model)


def torchao() -> nn.Module:
    peft, ao = pytest.importorskip("peft"), pytest.importorskip("torchao.quantization")
    model = Net()
    ao.quantize_(model, ao.Int8WeightOnlyConfig(), lambda module, name: name in LAYERS)
    return _by_peft(peft, model)


def _by_peft(peft: Any, model: nn.Module, **options: Any) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=list(LAYERS), modules_to_save=["head"], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return randomised(peft.get_peft_model(model, config))


def _by_hand(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for name in LAYERS:
        layer = getattr(model, name)
        layer.in_features, layer.out_features = layer.infeatures, layer.outfeatures
        setattr(model, name, Adapter(layer))
        del layer.in_features, layer.out_features
    model.head.requires_grad_(True)
    return model


def dequantized(layer: nn.Module) -> Tensor:
    if isinstance(layer, PackedLinear):
        return layer.dequantized()
    weight: Any = layer.weight
    if type(layer).__name__ == "Linear4bit":
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    return weight.dequantize()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    weight_only: bool = True  # and does not round its inputs


CASES = {
    "packed": Case(packed),
    "packed, peft": Case(packed_by_peft),
    "bitsandbytes 4 bits": Case(four_bits),
    "bitsandbytes 8 bits": Case(eight_bits, weight_only=False),
    "torchao 8 bits": Case(torchao),
}
cases = pytest.mark.parametrize("name", CASES)
REFUSED = {"bitsandbytes 4 bits, DoRA": Case(lambda: four_bits(use_dora=True))}


def made(name: str, n: int = 4) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries while they are imported
        model = {**CASES, **REFUSED}[name].make().train()
        model(torch.zeros(1, 1, dtype=torch.long))  # the first call of a layer of bitsandbytes moves its weight
    return model, (torch.randint(23, (n, 5)), torch.randint(3, (n,)))


def ordinary(layer: nn.Module) -> nn.Module:
    """A linear layer with the dequantized weights."""
    w = dequantized(layer).detach()
    made = nn.Linear(w.shape[1], w.shape[0], bias=layer.bias is not None)
    made.weight = nn.Parameter(w.clone(), requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)  # type: ignore[union-attr]
    return made


def frozen_state(model: nn.Module) -> dict[str, Any]:
    """All that is not trained, and what bitsandbytes keeps beside its weights."""
    found: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        if getattr(p, "quant_state", None) is not None:
            found |= {f"{name} {k}": v for k, v in p.quant_state.as_dict(packed=False).items()}
    for name, module in model.named_modules():
        state = getattr(module, "state", None)
        found |= {f"{name} {k}": getattr(state, k).clone() for k in ("CB", "SCB") if hasattr(state, k)}
    return found


def assert_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, Tensor):
            same = value.dequantize() if hasattr(value, "qdata") else value
            now = after[name].dequantize() if hasattr(value, "qdata") else after[name]
            assert torch.equal(now, same), name
        else:
            assert after[name] == value, name


@cases
@pytest.mark.parametrize("group", [1, 3, 4])
def test_equals_the_loop_over_the_dequantized_weights(name: str, group: int) -> None:
    model, batch = made(name)
    before, weight_only = frozen_state(model), CASES[name].weight_only
    step = PerInstanceSAM(rho=RHO, group=group, params="base").backward(model, batch, cross_entropy)
    assert (step.forwards, step.backwards) == (2, 2)
    assert_same(frozen_state(model), before)
    found = trained_gradients(model)
    if weight_only:
        other = replaced(copy.deepcopy(model), ordinary).double()
    else:  # its rounding of the inputs is in float32, and so is the reference
        shapes = {"first": (96, 64), "second": (64, 96), "third": (32, 64)}
        other = model
        for part, module in other.named_modules():
            if hasattr(module, "base_layer"):
                module.base_layer = WithOffset(module.base_layer, shapes[part.rpartition(".")[2]])

    def run(model: nn.Module) -> Tensor:
        return cross_entropy(model, batch)

    exact = reference(other, run, base_names(other), RHO, group) if weight_only else _in_place(other, run, group)
    assert relative(step.losses.double(), exact.losses) < 1e-6  # the model computes in float32
    assert relative(step.perturbed_losses.double(), exact.perturbed) < 1e-6
    found = {k: None if g is None else g.double() for k, g in found.items()}
    assert gradient_errors(found, exact.gradient) < 2e-5  # of single parameters, in float32
    assert relative(exact.perturbed, exact.losses) > 1e-2


def _in_place(model: nn.Module, run: Any, group: int) -> Any:
    """The reference without copies, which some quantized parameters do not survive."""
    from helpers.instance_reference import Exact, groups_of

    params = dict(model.named_parameters())
    trained = {name: p for name, p in params.items() if p.requires_grad}
    moving = [params[name].requires_grad_(True) for name in base_names(model)]
    start = run(model).detach().double()
    perturbed, norms, total = start.clone(), [], {name: torch.zeros_like(p).double() for name, p in trained.items()}
    for members in groups_of(len(start), group):
        grads = torch.autograd.grad(run(model)[members].sum(), moving)
        norms.append(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
        with torch.no_grad():
            for p, g in zip(moving, grads, strict=True):
                p.copy_(RHO * g / norms[-1])
        there = run(model)[members]
        for name, g in zip(trained, torch.autograd.grad(there.sum() / len(start), trained.values()), strict=True):
            total[name] += g
        perturbed[members] = there.detach().double()
        with torch.no_grad():
            for p in moving:
                p.zero_()
    return Exact(start, torch.stack(norms).double(), perturbed, total)


@pytest.mark.parametrize("params", ["base", "all"])
def test_in_float64(params: Any) -> None:
    """The layer that is written out here computes in any precision."""
    model, batch = made("packed")
    model = model.double()
    other = replaced(copy.deepcopy(model), ordinary)
    chosen = base_names(other) if params == "base" else [name for name, _ in other.named_parameters()]
    exact = reference(other, lambda model: cross_entropy(model, batch), chosen, RHO)
    PerInstanceSAM(rho=RHO, params=params).backward(model, batch, cross_entropy)
    assert gradient_errors(trained_gradients(model), exact.gradient) < 1e-9


def test_a_small_perturbation_arrives_in_bfloat16() -> None:
    """The outputs of the layer are bfloat16 values: a small move would be rounded away, half of it at this radius."""
    rho = 1e-3
    model, batch = made("packed", 64)
    model = model.bfloat16()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        return nn.functional.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), batch[1], reduction="none"
        )

    other = replaced(copy.deepcopy(model), ordinary).double()
    exact = reference(other, lambda model: objective(model, batch), base_names(other), rho)
    step = PerInstanceSAM(rho=rho, params="base").backward(model, batch, objective)
    rise = float((step.perturbed_losses.double() - step.losses.double()).mean())
    assert rise == pytest.approx(float((exact.perturbed - exact.losses).mean()), rel=0.2)


@cases
def test_micro_batches_and_a_loss_scale(name: str) -> None:
    found = []
    for split in (False, True):
        model, (ids, labels) = made(name, 6)
        parts = MicroBatches([(ids[:4], labels[:4]), (ids[4:], labels[4:])])
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**10) if split else 1.0
        method = PerInstanceSAM(rho=RHO, params="base")
        method.backward(model, parts if split else (ids, labels), cross_entropy, scale=scale)
        found.append({n: g / (2.0**10 if split else 1) for n, g in grads(model).items()})
    # A layer that rounds its inputs does so by the largest of a batch.
    assert relative_error(found[1], found[0]) < (1e-5 if CASES[name].weight_only else 1e-2)


class BoomError(Exception):
    """Raised on purpose."""


@cases
def test_an_exception_leaves_the_weights_and_the_layers_intact(name: str) -> None:
    model, batch = made(name)
    before, kinds = frozen_state(model), [type(module) for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]
    for failing in (1, 2):
        calls = 0

        def explosive(model: nn.Module, batch: Any, failing: int = failing) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise BoomError
            return cross_entropy(model, batch)

        with pytest.raises(BoomError):
            PerInstanceSAM(rho=RHO, params="base").backward(model, batch, explosive)
        assert_same(frozen_state(model), before)
        assert [type(module) for module in model.modules()] == kinds
        now = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]
        assert now == hooks


@cases
def test_all_parameters_include_the_quantized_weights(name: str) -> None:
    model, batch = made(name)
    chosen = select(model, "all")
    assert sum(part in key and "base_layer.weight" in key for part in LAYERS for key in chosen) == 3
    assert all(p.is_floating_point() for p in chosen.values())
    before = frozen_state(model)
    step = PerInstanceSAM(rho=RHO, params="all").backward(model, batch, cross_entropy)
    assert (step.forwards, step.backwards) == (2, 2)
    assert_same(frozen_state(model), before)
    if CASES[name].weight_only:
        found = {k: None if g is None else g.double() for k, g in trained_gradients(model).items()}
        other = replaced(copy.deepcopy(model), ordinary).double()
        every = [key for key, _ in other.named_parameters()]
        exact = reference(other, lambda model: cross_entropy(model, batch), every, RHO)
        assert relative(step.perturbed_losses.double(), exact.perturbed) < 1e-6
        assert gradient_errors(found, exact.gradient) < 2e-5


@cases
@pytest.mark.parametrize("method", [SAM, ASAM, DeltaSAM], ids=lambda m: m.__name__)
def test_methods_that_need_a_gradient_of_it_say_so(name: str, method: Any) -> None:
    model, batch = made(name)
    before = frozen_state(model)
    with pytest.raises(ValueError, match=r"params.*quantized.*PerInstanceSAM"):
        method(params="base").backward(model, batch, cross_entropy)
    assert_same(frozen_state(model), before)
    method(params="adapters").backward(model, batch, cross_entropy)  # the remedy
    assert grads(model)


@pytest.mark.parametrize("params", ["base", "all", lambda name, p: True], ids=["base", "all", "predicate"])
def test_dora_over_quantized_weights_is_refused(params: Any) -> None:
    """DoRA reads the weight for its norm, too: a perturbed output would not be that of perturbed weights."""
    model, batch = made("packed")
    for layer in (model.first, model.second, model.third):
        layer.lora_magnitude_vector = nn.ModuleDict({"default": nn.Identity()})  # as PEFT marks it
    with pytest.raises(ValueError, match=r"params selects.*'first'.*DoRA.*use_dora=False"):
        PerInstanceSAM(params=params).backward(model, batch, cross_entropy)
    PerInstanceSAM(params="adapters").backward(model, batch, cross_entropy)  # a remedy


def test_dora_of_peft_over_four_bits_is_refused() -> None:
    model, batch = made("bitsandbytes 4 bits, DoRA")
    with pytest.raises(ValueError, match=r"params selects.*Linear4bit.*DoRA"):
        PerInstanceSAM(params="base").backward(model, batch, cross_entropy)


def test_the_loop_says_so_too() -> None:
    model, batch = made("packed")
    with pytest.raises(ValueError, match=r"params.*quantized.*(engine|PerInstanceSAM)"):
        PerInstanceSAM(params="base", engine="loop").backward(model, batch, cross_entropy)
