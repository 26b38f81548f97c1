"""DPO: the formulas by hand, TRL's loss, the reference, and pairs as instances."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from deltasam import DPO, ERM, SAM, PerInstanceSAM, RDrop, SubsetSAM
from deltasam.objectives.preference import PreferenceLoss
from deltasam.speed.splitting import Splitting
from deltasam.step.batches import take
from deltasam.step.passes import Passes

pytest.importorskip("peft")
pytest.importorskip("datasets")

from helpers.preferences import llama, lora, pairs, preferences, tokenizer

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def log_probs(model: nn.Module, batch: dict[str, Tensor], row: int) -> Tensor:
    """Of one answer, token by token."""
    ids, mask = batch["input_ids"][row : row + 1], batch["attention_mask"][row : row + 1]
    logits = model(input_ids=ids, attention_mask=mask).logits[0].log_softmax(-1)
    terms = [logits[t - 1, ids[0, t]] for t in range(1, ids.shape[1]) if batch["completion_mask"][row, t]]
    return torch.stack(terms).sum()


def ratios(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """(N, 2), one sequence after the other."""
    n = len(batch["input_ids"]) // 2
    own = torch.stack([log_probs(model, batch, row) for row in range(2 * n)])
    with torch.no_grad(), model.disable_adapter():
        base = torch.stack([log_probs(model, batch, row) for row in range(2 * n)])
    return (own - base).view(2, n).T


def test_the_formulas() -> None:
    model, batch, beta = lora().double().eval(), pairs(), 0.3
    chosen, rejected = ratios(model, batch).unbind(1)
    margin = beta * (chosen - rejected)
    tokens = batch["completion_mask"].sum(1).view(2, -1)
    means = chosen / tokens[0] - rejected / tokens[1]
    expected = {
        "sigmoid": -logsigmoid(margin),
        "hinge": (1 - margin).clamp(min=0),
        "ipo": (means - 1 / (2 * beta)) ** 2,
    }
    for name, losses in expected.items():
        found = DPO(beta=beta, loss_type=name)(model, batch)  # type: ignore[arg-type]
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-12)
    smoothed = 0.8 * -logsigmoid(margin) + 0.2 * -logsigmoid(-margin)
    torch.testing.assert_close(DPO(beta=beta, label_smoothing=0.2)(model, batch), smoothed, rtol=1e-9, atol=1e-12)


def trl_trainer(folder: Path, **options: Any) -> Any:
    trl = pytest.importorskip("trl")
    given = {name: options.pop(name) for name in ("model", "ref_model") if name in options}
    args = trl.DPOConfig(str(folder), bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, **options)
    return trl.DPOTrainer(**given, args=args, train_dataset=preferences(), processing_class=tokenizer())


@pytest.mark.parametrize("reference", ["adapters", "model", "columns"])
def test_the_mean_is_trls_loss(reference: str, tmp_path: Path) -> None:
    other: Any = None
    if reference == "model":
        other = llama()
        nn.init.normal_(other.lm_head.weight, std=0.3)
        trainer = trl_trainer(tmp_path, model=llama(), ref_model=other, beta=0.3)
    else:
        other = "ref"  # TRL has copied the adapter of a PEFT model: move away from the copy
        trainer = trl_trainer(tmp_path, model=lora(), beta=0.3)
        for name, p in trainer.model.named_parameters():
            if "lora_B.default" in name:
                nn.init.normal_(p, std=0.3)
    batch = next(iter(trainer.get_train_dataloader()))
    if reference == "columns":
        trainer.precompute_ref_logps = True
        batch |= dict(zip(COLUMNS, torch.randn(2, len(batch["input_ids"]) // 2), strict=True))
    params = [p for p in trainer.model.parameters() if p.requires_grad]
    for loss in get_args(PreferenceLoss):
        smoothing = {"robust": 0.1, "exo_pair": 1e-3}.get(loss, 0.0)
        trainer.loss_types, trainer.label_smoothing = [loss], smoothing
        expected = trainer.compute_loss(trainer.model, batch)
        found = DPO(beta=0.3, loss_type=loss, label_smoothing=smoothing, reference=other)(trainer.model, batch)
        torch.testing.assert_close(found.mean(), expected, rtol=1e-6, atol=1e-6, msg=loss)
        ours, theirs = (torch.autograd.grad(each.mean(), params) for each in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=loss)


def test_the_reference_is_computed_once_per_step_at_the_unperturbed_base() -> None:
    """SAM on the base itself, by hand: the base moves, the reference does not."""
    model, batch, rho = lora().double(), pairs(), 0.3
    model.requires_grad_(True)
    objective, calls = DPO(beta=0.5), []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    step = SAM(rho=rho).backward(model, batch, objective)
    handle.remove()
    assert calls == [False, True, True], "the reference, then the two passes"
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    fixed = {**batch, **{name: value for name, value in objective.prepare_batch(model, batch).items()
                         if name in COLUMNS}}  # fmt: skip
    first = torch.autograd.grad(objective(model, fixed).mean(), list(model.parameters()))
    length = torch.stack([g.norm() for g in first]).norm()
    with torch.no_grad():
        for p, g in zip(model.parameters(), first, strict=True):
            p += rho * g / length
    losses = objective(model, fixed)
    torch.testing.assert_close(step.perturbed_losses, losses.detach(), rtol=1e-9, atol=1e-12)
    losses.mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-7, atol=1e-10)


def test_the_reference_leaves_the_model_as_it_was() -> None:
    model = lora().train()
    frozen = next(p for name, p in model.named_parameters() if "lora_A" in name)
    frozen.requires_grad_(False)  # PEFT would unfreeze it
    model.base_model.model.model.layers[0].eval()
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    DPO().prepare_batch(model, pairs())
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert torch.equal(state, torch.get_rng_state())


def test_adapters_added_by_transformers_are_disabled_too() -> None:
    import peft

    model = llama().double()
    before = DPO()(_Frozen(model), {**pairs(), COLUMNS[0]: torch.zeros(4), COLUMNS[1]: torch.zeros(4)})
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    reference = DPO().prepare_batch(model, pairs())
    margin = 0.1 * (reference[COLUMNS[0]] - reference[COLUMNS[1]])
    torch.testing.assert_close(before, -logsigmoid(margin))


@pytest.mark.parametrize("active", [["mine"], ["mine", "more"]])
@pytest.mark.parametrize("is_peft", [True, False])
def test_a_named_adapter_is_the_reference_and_then_the_others_are_active_again(is_peft: bool, active: Any) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = llama().double()
    if is_peft:
        model = peft.get_peft_model(model, config, "mine")
    for name in ("reference", "more") if is_peft else ("reference", "more", "mine"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # several adapters
            model.add_adapter(*((name, config) if is_peft else (config, name)))
    activate = model.base_model.set_adapter if is_peft else model.set_adapter
    activate("reference")
    expected = DPO(reference=model).prepare_batch(model, pairs())
    activate(active)
    found = DPO(reference="reference").prepare_batch(model, pairs())
    for name in COLUMNS:
        torch.testing.assert_close(found[name], expected[name])
    assert (model.active_adapters if is_peft else model.active_adapters()) == active


class _Frozen(nn.Module):
    """A model without the attributes of PEFT."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.other = model, nn.Linear(1, 1)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_pairs_can_be_taken_out_of_a_batch() -> None:
    model, batch, objective = lora().double().eval(), pairs(5), DPO()
    passes = Passes(model, batch, objective)
    index = torch.tensor([3, 0])
    whole = passes.losses()
    torch.testing.assert_close(passes.instances(index, alone=True).losses(), whole[index], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(passes.instances(index, alone=False).losses(), whole[index], rtol=1e-9, atol=1e-12)
    rows = objective.pairs(batch)
    torch.testing.assert_close(objective(model, take(rows, index, 5)), whole[index], rtol=1e-9, atol=1e-12)
    step = SubsetSAM(rho=0.05, fraction=0.4).backward(model, batch, objective)
    assert step.losses.shape == (2,)


def test_the_batch_is_split_into_pairs_when_memory_runs_out() -> None:
    model, batch = lora().double().eval(), pairs(4)

    class Hungry(DPO):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            if torch.is_grad_enabled() and len(batch["input_ids"]) > 2:
                raise torch.OutOfMemoryError("two pairs at most")
            return super().forward(model, batch)

    split = Splitting(SAM(rho=0.1))
    found = split.backward(model, batch, Hungry())
    assert split.largest == 2
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected = SAM(rho=0.1).backward(model, batch, DPO())
    torch.testing.assert_close(found.perturbed_losses, expected.perturbed_losses)
    torch.testing.assert_close(grads, [p.grad for p in model.parameters() if p.grad is not None])


def test_regularisers_wrap_it() -> None:
    model = lora().double()
    losses = RDrop(DPO(), alpha=1.0)(model, DPO().prepare_batch(model, pairs()))
    torch.testing.assert_close(losses, DPO()(model, pairs()), rtol=1e-9, atol=1e-12, msg="no dropout: no divergence")
    assert ERM().backward(model, pairs(), RDrop(DPO(), alpha=1.0)).losses.shape == (4,)


@pytest.mark.parametrize("params", ["adapters", "base"])
def test_low_rank_equals_the_loop(params: Any) -> None:
    """The pair is the instance: one perturbation for its two rows. No warning, no loop."""
    model, batch = lora().double(), pairs(5)
    results = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        step = PerInstanceSAM(rho=0.2, engine=engine, params=params).backward(model, batch, DPO(beta=0.5))
        results.append((step.perturbed_losses, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
        if engine == "low-rank":
            assert (step.forwards, step.backwards) == (2, 2)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)  # Llama's norms compute in float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(beta=0.0), r"DPO\(beta=0.0\): must be a number greater than 0"),
        (lambda: DPO(loss_type="aot"), r"DPO\(loss_type='aot'\): must be one of"),  # type: ignore[arg-type]
        (lambda: DPO(label_smoothing=0.5), r"label_smoothing=0.5\): must be at least 0 and less than 0.5"),
        (lambda: DPO(label_smoothing=0.1, loss_type="ipo"), r"no effect with loss_type='ipo'.*set it to 0"),
        (lambda: DPO(loss_type="exo_pair"), r"needs label_smoothing above 0"),
        (lambda: DPO()(llama(), pairs()), r"LlamaForCausalLM has no adapters to disable.*DPO\(reference="),
        (lambda: DPO(reference="ref")(lora(), pairs()), r"reference='ref'.*\['default'\]"),
        (lambda: DPO()(lora(), torch.zeros(2, 3)), r"must be a mapping with 'input_ids' and 'completion_mask'"),
        (lambda: DPO().pairs({name: value[:3] for name, value in pairs().items()}), r"shape \(3, 9\).*\(2N, T\)"),
        (lambda: DPO().losses(torch.zeros(4, 2, 9, 11), pairs()), r"no column 'ref_chosen_logps'"),
        (lambda: DPO()(lora(), {**pairs(), **dict.fromkeys(COLUMNS, torch.zeros(8))}), r"one number per pair"),
    ],
)  # fmt: skip
def test_errors_name_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
