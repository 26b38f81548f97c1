"""Rules for the radius against their formulas in float64, with one perturbation for the batch and one per instance."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import ASAM, SAM, Layerwise, LossBudget, LossShare, MicroBatches, PerInstanceSAM, Relative
from deltasam import methods as m
from deltasam.methods import BiLoRA, DeltaSAM, Method, MomentumSAM, RandomPerturbation
from deltasam.step.norms import step_size
from deltasam.step.radius import Climb, Fixed, Groups, as_radius
from helpers.captured_models import CASES, Case
from helpers.problems import TRANSFORMER_NO_DROPOUT, cross_entropy, grads, relative_error

Named = dict[str, Tensor]


def flat(values: Named) -> Tensor:
    return torch.cat([v.flatten() for v in values.values()])


def moves_of_all(rho: Callable[[Named, Named, Tensor], Tensor]) -> Callable[..., Named]:
    """One radius for all parameters."""

    def move(g: Named, w: Named, loss: Tensor) -> Named:
        return {n: rho(g, w, loss) * v / flat(g).norm() for n, v in g.items()}

    return move


def by_tensor(share: Callable[[str, Named, int], Any]) -> Callable[..., Named]:
    """A radius for each parameter. ``share`` gets the name, the weights and the number of all entries."""

    def move(g: Named, w: Named, loss: Tensor) -> Named:
        entries = sum(v.numel() for v in w.values())
        return {n: share(n, w, entries) * v / v.norm() for n, v in g.items() if v.norm() > 0}

    return move


def by_group(g: Named, w: Named, loss: Tensor) -> Named:
    """{"embeddings": 0, "norms": LossBudget(0.02), "*bias": Relative(0.05), "rest": 0.1}; the first fit counts."""
    norms = {n: v for n, v in g.items() if n.startswith("norm")}
    biases = {n: v for n, v in g.items() if n.endswith("bias") and n not in norms}
    rest = {n: v for n, v in g.items() if n not in norms and n not in biases and not n.startswith("embeddings")}
    made = {n: 0.02 / flat(norms).norm() * v / flat(norms).norm() for n, v in norms.items()}
    own = flat({n: v for n, v in w.items() if n.endswith("bias") and not n.startswith("norm")}).norm()
    made |= {n: 0.05 * own * v / flat(biases).norm() for n, v in biases.items()}
    return made | {n: 0.1 * v / flat(rest).norm() for n, v in rest.items()}


RULES: dict[str, tuple[Any, Callable[[Named, Named, Tensor], Named]]] = {
    "number": (0.1, moves_of_all(lambda g, w, loss: torch.tensor(0.1, dtype=torch.float64))),
    "budget": (LossBudget(0.1), moves_of_all(lambda g, w, loss: 0.1 / flat(g).norm())),
    "budget, at most": (
        LossBudget(0.1, at_most=0.05),
        moves_of_all(lambda g, w, loss: (0.1 / flat(g).norm()).clamp_max(0.05)),
    ),
    "budget, at most relative": (
        LossBudget(0.1, at_most=Relative(0.001)),
        moves_of_all(lambda g, w, loss: (0.1 / flat(g).norm()).clamp_max(0.001 * flat(w).norm())),
    ),
    "share": (LossShare(0.1), moves_of_all(lambda g, w, loss: 0.1 * loss / flat(g).norm())),
    "relative": (Relative(0.01), moves_of_all(lambda g, w, loss: 0.01 * flat(w).norm())),
    "relative, per tensor": (Relative(0.01, per="tensor"), by_tensor(lambda n, w, entries: 0.01 * w[n].norm())),
    "layerwise": (Layerwise(0.1), by_tensor(lambda n, w, entries: 0.1 * (w[n].numel() / entries) ** 0.5)),
    "layerwise, by tensors": (Layerwise(0.1, by="tensors"), by_tensor(lambda n, w, entries: 0.1 * len(w) ** -0.5)),
    "groups": (
        {"embeddings": 0, "norms": LossBudget(0.02), "*bias": Relative(0.05), "rest": 0.1},
        by_group,
    ),
}


def reference(move: Callable[..., Named], instances: list[slice]) -> tuple[Named, Tensor]:
    """The mean of the gradients at each group's own perturbed weights, and the mean norm of the perturbations."""
    total: Named = {}
    radii = []
    size = instances[-1].stop
    for part in instances:
        model, (x, y), objective = TRANSFORMER_NO_DROPOUT.make()
        w = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        loss = objective(model, (x[part], y[part])).mean()
        loss.backward()
        eps = move(grads(model), w, loss.detach())
        radii.append(flat(eps).norm())
        model.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += eps.get(name, 0)
        objective(model, (x[part], y[part])).mean().backward()
        for name, g in grads(model).items():
            total[name] = total.get(name, 0) + g * (part.stop - part.start) / size
    return total, torch.stack(radii).mean()


WAYS: dict[str, tuple[Callable[..., Method], list[slice]]] = {
    "batch": (SAM, [slice(0, 5)]),
    "instances": (PerInstanceSAM, [slice(k, k + 1) for k in range(5)]),
    "instances, loop": (lambda **o: PerInstanceSAM(engine="loop", **o), [slice(k, k + 1) for k in range(5)]),
    "pairs": (lambda **o: PerInstanceSAM(group=2, **o), [slice(0, 2), slice(2, 4), slice(4, 5)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_formula(rule: str, way: str) -> None:
    rho, move = RULES[rule]
    make, instances = WAYS[way]
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    step = make(rho=rho).backward(model, batch, objective, scale=4.0)  # the loss scale changes nothing
    wanted, radius = reference(move, instances)
    found = {name: g / 4 for name, g in grads(model).items()}
    assert relative_error(found, wanted) < 1e-10
    assert step.radius is not None
    torch.testing.assert_close(step.radius, radius, rtol=1e-9, atol=0)


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
@pytest.mark.parametrize("rho", [LossBudget(0.1), LossShare(0.1), Layerwise(0.1)], ids=str)
def test_micro_batches_of_unequal_size_do_not_change_the_radii(rho: Any, engine: str) -> None:
    """Also with a token mean, where the loss of an instance depends on the number of tokens of its batch."""
    found = []
    for split in (False, True):
        model, (x, y), _ = TRANSFORMER_NO_DROPOUT.make()
        batch: Any = (x, y)
        if split:
            batch = MicroBatches([(x[:3], y[:3]), (x[3:], y[3:])])
        step = PerInstanceSAM(rho=rho, engine=engine).backward(model, batch, _TokenMean())
        found.append((grads(model), step.radius))
    (whole, radius), (parts, radius_of_parts) = found
    assert relative_error(parts, whole) < 1e-10
    torch.testing.assert_close(radius_of_parts, radius)


class _TokenMean:
    """Losses that are weighted by how many ids of an instance are even, so that their mean is over such ids."""

    def items(self, batch: Any) -> Tensor:
        return ((batch[0] % 2 == 0).sum(1) + 1).double().sum()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        counts = ((batch[0] % 2 == 0).sum(1) + 1).double()
        return cross_entropy(model, batch) * counts * (len(counts) / counts.sum())


def test_a_direction_that_is_not_finite_moves_nothing() -> None:
    for rho in (LossBudget(0.1), Layerwise(0.1), {"*weight": 0.1, "rest": 0.2}):
        model, batch, _ = TRANSFORMER_NO_DROPOUT.make()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}

        def objective(model: nn.Module, batch: Any) -> Tensor:
            return cross_entropy(model, batch) * torch.tensor([1.0, 1.0, float("inf"), 1.0, 1.0])

        step = SAM(rho=rho).backward(model, batch, objective)
        assert step.skipped
        assert step.radius == 0
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_first_order_of_a_budget_in_asam_is_the_budget() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    step = ASAM(rho=LossBudget(1e-6)).backward(model, batch, objective)
    torch.testing.assert_close(step.sharpness, torch.tensor(1e-6, dtype=torch.float64), rtol=1e-3, atol=0)


def test_probes_have_a_radius_where_rho_is_not_known_before_the_gradient() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    first = DeltaSAM(rho=LossBudget(0.1)).backward(model, batch, objective).weights
    second = DeltaSAM(rho=0.05).backward(model, batch, objective).weights
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first, second)  # 0.05, the paper's


def test_zero_is_plain_training() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    for rho in (0, LossBudget(0), LossBudget(0.1, at_most=0), LossShare(0), Relative(0), {"norms": 0, "rest": 0}):
        assert SAM(rho=rho).backward(model, batch, objective).forwards == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SAM(rho=LossBudget), "LossBudget\\(\\.\\.\\.\\)"),
        (lambda: SAM(rho="0.1"), "rho='0.1'"),
        (lambda: SAM(rho=LossBudget(-1)), "sigma=-1"),
        (lambda: SAM(rho={}), "rho={}"),
        (lambda: SAM(rho={"embedings": 0.1}), "'embedings'"),
        (lambda: SAM(rho={"norms": -0.1}), "'norms'"),
        (lambda: SAM(rho={3: 0.1}), "group 3"),
        (lambda: Relative(0.1, per="row"), "per='row'"),
        (lambda: Layerwise(0.1, by="size"), "by='size'"),
        (lambda: MomentumSAM(rho=LossBudget(0.1)), "MomentumSAM"),
        (lambda: BiLoRA(rho={"rest": LossShare(0.1)}), "BiLoRA"),
        (lambda: RandomPerturbation(rho=Relative(0.1)), "per='row'"),
    ],
)
def test_mistakes(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_a_parameter_without_a_group() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="'rest'"):
        SAM(rho={"norms": 0.1}).backward(model, batch, objective)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_methods_without_a_gradient_at_w_take_rules_that_need_none() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    step = RandomPerturbation(rho=Relative(0.01), per="all").backward(model, batch, objective)
    weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    assert step.radius is not None
    torch.testing.assert_close(step.radius.double(), 0.01 * weights.norm(), rtol=1e-6, atol=0)
    method = BiLoRA(rho=Relative(0.01), params=lambda name, p: name == "feed.weight", lr=1.0)
    for _ in range(3):
        method.backward(model, batch, objective)
    a, b = method.factors(model)["feed"]
    torch.testing.assert_close((b @ a).norm(), 0.01 * model.feed.weight.detach().norm())


def test_equal_rules_are_equal_and_can_be_keys() -> None:
    assert SAM(rho=LossBudget(0.1)) == SAM(rho=LossBudget(0.1))
    assert hash(SAM(rho={"rest": 0.1})) == hash(SAM(rho={"rest": 0.1}))
    assert SAM(rho={"rest": 0.1}).rho == Groups((("rest", Fixed(0.1)),))
    assert "rho=0.1" in repr(SAM(rho=as_radius(0.1)))


def test_a_rule_can_be_scaled() -> None:
    model = nn.Linear(2, 1)
    climb = Climb(torch.tensor(2.0), model, ["weight"], [model.weight], loss=lambda: torch.tensor(3.0))
    for rule in (Fixed(0.1), LossBudget(0.1, at_most=0.01), LossShare(0.1), Relative(0.1)):
        whole, half, other = (each.sizes(climb).steps for each in (rule, rule / 2, -rule))
        torch.testing.assert_close(2 * half, whole)
        torch.testing.assert_close(other, -whole)
    assert float(step_size(0.1, torch.tensor(0.0))) == 0


METHODS: list[Callable[..., Method]] = [
    SAM,
    m.GSAM,
    m.LookSAM,
    m.FriendlySAM,
    partial(m.SubsetSAM, fraction=0.5),
    partial(m.ESAM, beta=1.0, gamma=1.0),
    m.WSAM,
    m.GradientNormPenalty,
]
MOVES = [partial(make, rho=rho) for make in METHODS for rho in (0.1, LossShare(0.1), Layerwise(0.1))]
MOVES += [partial(m.RandomPerturbation, per="all", rho=0.1), partial(m.AWP, adv_lr=0.01)]


@pytest.mark.parametrize("make", MOVES)
def test_the_radius_of_a_step_is_how_far_the_weights_moved(make: Callable[..., Method]) -> None:
    model, batch, _ = TRANSFORMER_NO_DROPOUT.make()
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    moved = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        moved.append((torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm())
        return cross_entropy(model, batch)

    step = make().backward(model, batch, objective)
    assert step.radius is not None
    torch.testing.assert_close(step.radius.double(), max(moved), rtol=1e-5, atol=0)


def test_a_radius_that_is_no_number_is_left_to_the_method() -> None:
    """A user's field called rho may be something else; only zero is plain training."""

    @dataclass(frozen=True, kw_only=True)
    class Own(Method):
        rho: float | None = None

        def _step(self, passes: Any) -> Any:
            losses, grads = passes.gradient()
            with passes.ascend(grads, 0.1) as ascent:
                return m.make_step(passes, losses, perturbed=passes.accumulate(), ascent=ascent)

    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    assert Own().backward(model, batch, objective).forwards == 2
    assert Own(rho=0).backward(model, batch, objective).forwards == 1


LLAMAS = [case for case in CASES if case.name in ("Llama", "Llama + LoRA (adapters)", "Llama + LoRA (base matrices)")]


@pytest.mark.parametrize("rho", [LossShare(0.1), Layerwise(0.1), {"norms": 0.05, "rest": LossBudget(0.1)}], ids=str)
@pytest.mark.parametrize("case", LLAMAS, ids=str)
def test_on_llamas_the_engine_and_the_loop_agree(case: Case, rho: Any) -> None:
    found = []
    for engine in ("low-rank", "loop"):
        model = copy.deepcopy(case.model()).double()
        options = {} if case.params is None else {"params": case.params}
        step = PerInstanceSAM(rho=rho, engine=engine, **options).backward(model, case.batch(), case.objective)
        found.append((grads(model), step.radius))
    (first, radius), (second, other) = found
    assert relative_error(first, second) < 1e-6  # the models compute their norms and angles in float32
    torch.testing.assert_close(radius, other, rtol=1e-6, atol=0)
