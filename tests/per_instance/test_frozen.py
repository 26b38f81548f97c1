"""Per-instance SAM over weights that are not trained equals a loop that moves them, on every architecture and adapter.

The engine must run in low rank: its warning that it loops is an error here, as every warning is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import CausalLM
from deltasam.methods import SAM, PerInstanceSAM
from deltasam.per_instance import instance_adversarial_losses, instance_gradient_norms, perturbed_instances
from helpers.frozen import (
    FAMILIES,
    OTHER_KINDS,
    adapted,
    base_names,
    reference,
    run_of,
    small,
    trained_gradients,
)
from helpers.instance_reference import gradient_errors, relative
from helpers.promises import assert_intact, snapshot

peft = pytest.importorskip("peft")
RHO = 0.2
families = pytest.mark.parametrize("family", FAMILIES)


def every_name(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def is_some(name: str, p: nn.Parameter) -> bool:
    """Frozen and trained, of all kinds: norms, embeddings, biases, one adapter, and half of the matrices."""
    kinds = ("norm", "ln_", "embed", "wte", "shared", "bias", "lora_A")
    return any(kind in name.lower() for kind in kinds) or ("base_layer" in name and ".0." in name)


def check(
    family: str, kind: str, n: int, group: int = 1, params: Any = "base", chosen: Callable[..., Any] = base_names
) -> None:
    model = adapted(family, kind)
    run, batch, objective = run_of(family, n)
    exact = reference(model, run, chosen(model), RHO, group)
    torch.manual_seed(3)
    step = PerInstanceSAM(rho=RHO, group=group, params=params).backward(model, batch, objective)
    tolerance = FAMILIES[family].tolerance
    assert (step.forwards, step.backwards) == (2, 2)
    assert relative(step.losses, exact.losses) <= tolerance
    assert relative(step.perturbed_losses, exact.perturbed) <= tolerance
    assert gradient_errors(trained_gradients(model), exact.gradient) <= tolerance
    members = torch.full_like(exact.norms, group)
    members[-1] -= len(members) * group - n
    assert relative(step.grad_norm, (exact.norms / members).mean()) <= tolerance
    assert relative(exact.perturbed, exact.losses) > 1e-3  # the perturbation does something


@families
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "rsLoRA", "modules_to_save"])
def test_the_matrices_under_adapters(family: str, kind: str) -> None:
    check(family, kind, 3)


@families
@pytest.mark.parametrize("group", [2, 5])
def test_groups_share_a_perturbation(family: str, group: int) -> None:
    check(family, "LoRA", 5, group)


@families
def test_all_parameters(family: str) -> None:
    check(family, "modules_to_save", 3, params="all", chosen=every_name)


@families
def test_a_predicate_over_frozen_and_trained_parameters(family: str) -> None:
    check(family, "LoRA", 3, params=is_some, chosen=lambda m: [n for n, p in m.named_parameters() if is_some(n, p)])


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT"])
@pytest.mark.parametrize("kind", ["DoRA with dropout", "LoRA without dropout"])
def test_other_ways_to_call_the_base(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Around a Conv1D, PEFT makes a new parameter of the transposed weight, which hides this use from autograd, and so
    # from the reference. The engine, whose weights are no parameters, sees it.
    monkeypatch.setattr("peft.tuners.lora.dora.transpose", lambda weight, flip: weight.T if flip else weight)
    check(family, kind, 3)


@pytest.mark.parametrize("family", ["GPT-2", "BERT"])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_other_batch_sizes(family: str, n: int) -> None:
    """The batch of 6 is as large as the texts are long."""
    check(family, "LoRA", n)


def check_small(model: nn.Module, *more: str) -> None:
    model = model.double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # some adapters start as if they were not there
    ids, labels = torch.randint(9, (4, 5)), torch.randint(3, (4,))

    def objective(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids), labels, reduction="none")

    chosen = base_names(model) + [name for name, _ in model.named_parameters() if name.endswith(more)]
    exact = reference(model, lambda model: objective(model, None), chosen, RHO)
    step = PerInstanceSAM(rho=RHO, params="base").backward(model, (ids, labels), objective)
    assert (step.forwards, step.backwards) == (2, 2)
    assert gradient_errors(trained_gradients(model), exact.gradient) < 1e-9
    assert relative(step.perturbed_losses, exact.perturbed) < 1e-9


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_adapters(kind: str) -> None:
    if not hasattr(peft, kind):
        pytest.skip(f"this version of peft has no {kind}")
    torch.manual_seed(0)
    if kind == "OFTConfig":
        pytest.importorskip("peft", "0.15")  # earlier versions detach the frozen weight
    check_small(small(kind=kind, **OTHER_KINDS[kind]))


def test_embeddings_and_convolutions() -> None:
    pytest.importorskip("peft", "0.15")  # Conv1d
    check_small(small(("words", "mix", "down")))


def test_two_active_adapters() -> None:
    model = small()
    model.add_adapter("other", peft.LoraConfig(target_modules=["up"]))
    model.base_model.set_adapter(["default", "other"])
    check_small(model)


class Experts(nn.Module):
    """The experts of a mixture, stacked in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.table = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(torch.einsum("ntd,edo->neto", self.words(ids), self.table).mean((1, 2)))


def test_lora_of_a_parameter() -> None:
    """PEFT takes the parameter out of its module in every forward, and puts back what it found there."""
    if not hasattr(peft.LoraConfig, "target_parameters"):
        pytest.skip("this version of peft adapts modules only")
    torch.manual_seed(0)
    model = nn.Sequential(Experts())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["score"], target_parameters=["0.table"]))
    check_small(model, "table")
    assert not dict(model.named_buffers())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.att, self.score = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.att(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.skipif(not hasattr(peft.tuners.lora.layer, "MultiheadAttention"), reason="this peft does not adapt it")
@pytest.mark.parametrize("method", [PerInstanceSAM(), PerInstanceSAM(params="base"), SAM(params="base")])
def test_attention_whose_matrices_peft_replaces_is_refused(method: Any) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(Attending(), peft.LoraConfig(r=2, target_modules=["att"]))
    x, labels = torch.randn(3, 5, 4), torch.tensor([0, 1, 2])

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'base_model.model.att', a MultiheadAttention.*target_modules.*SAM or ERM"):
        method.backward(model, (x, labels), losses)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    step = SAM().backward(model, (x, labels), losses)
    assert step.backwards == 2


def test_dora_in_groups() -> None:
    check("BERT", "DoRA", 5, group=2)


def test_a_second_step_with_another_length_and_size() -> None:
    """What the first step has learned about the model holds for later ones."""
    model = adapted("BERT")
    method = PerInstanceSAM(rho=RHO, params="base")
    run, batch, objective = run_of("BERT", 5)
    method.backward(model, batch, objective)
    model.zero_grad()
    run, batch, objective = run_of("BERT", 4, seed=11)
    batch["input_ids"], batch["attention_mask"] = batch["input_ids"][:, :4], batch["attention_mask"][:, :4]
    exact = reference(model, run, base_names(model), RHO)
    torch.manual_seed(11)
    method.backward(model, batch, objective)
    assert gradient_errors(trained_gradients(model), exact.gradient) < 1e-9


@pytest.mark.parametrize("engine", ["loop", "low-rank"])
def test_both_engines(engine: Any) -> None:
    model = adapted("GPT-2")
    run, batch, objective = run_of("GPT-2", 3)
    exact = reference(model, run, base_names(model), RHO)
    torch.manual_seed(3)
    PerInstanceSAM(rho=RHO, params="base", engine=engine).backward(model, batch, objective)
    assert gradient_errors(trained_gradients(model), exact.gradient) < 1e-9


def test_parts_of_the_batch_one_after_the_other() -> None:
    model = adapted("GPT-2").eval()  # parts draw other dropout masks than the whole
    _, batch, _ = run_of("GPT-2", 5)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    exact = reference(model, lambda model: CausalLM()(model, batch), base_names(model), RHO)
    PerInstanceSAM(rho=RHO, params="base", at_once=2).backward(model, batch, CausalLM())
    assert gradient_errors(trained_gradients(model), exact.gradient) < 1e-9


@pytest.mark.parametrize("engine", ["loop", "low-rank"])
def test_the_functions_for_one_batch(engine: Any) -> None:
    model = adapted("GPT-2").eval()
    before = snapshot(model)
    run, batch, objective = run_of("GPT-2", 3)
    exact = reference(model, run, base_names(model), RHO)
    given = {"params": "base", "engine": engine}
    norms = instance_gradient_norms(model, batch, objective, **given)
    losses = instance_adversarial_losses(model, batch, objective, rho=RHO, **given)
    assert relative(norms, exact.norms) < 1e-9
    assert relative(losses, exact.perturbed) < 1e-9
    stronger = instance_adversarial_losses(model, batch, objective, rho=RHO, steps=3, **given)
    assert bool((stronger > exact.losses).all())
    assert_intact(model, before)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_in_the_context_of_perturbed_instances() -> None:
    model = adapted("GPT-2").eval()
    before = snapshot(model)
    run, batch, objective = run_of("GPT-2", 3)
    exact = reference(model, run, base_names(model), RHO)
    with perturbed_instances(model, batch, objective, rho=RHO, params="base"):
        objective(model, batch).mean().backward()
    assert gradient_errors(trained_gradients(model), exact.gradient) < 1e-9
    assert_intact(model, before)


def test_a_group_of_all_instances_is_sam_without_writing_the_weights() -> None:
    from deltasam import SAM

    found = []
    for method in (PerInstanceSAM(rho=RHO, group=4, params="base"), SAM(rho=RHO, params="base")):
        model = adapted("BERT")
        _, batch, objective = run_of("BERT", 4)
        torch.manual_seed(3)
        method.backward(model, batch, objective)
        found.append({name: g for name, g in trained_gradients(model).items() if g is not None})
    assert gradient_errors(found[0], found[1]) < 1e-9  # type: ignore[arg-type]
