"""Where the instances are: two views in one pass, two passes, several rows per instance, losses that mix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.per_instance import InstancesMixedError, record
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import gradient_errors, loop, relative


def assert_exact(model: nn.Module, run: Callable[[], Tensor], rho: float = 0.1, size: int | None = None) -> None:
    exact = loop(model, run, rho)
    model.zero_grad()
    recording = record(model, run, size=size)
    with recording.perturbed(rho / recording.norms):
        perturbed = run()
        perturbed.mean().backward()
    assert relative(recording.norms, exact.norms) <= 1e-9
    assert relative(perturbed.detach(), exact.perturbed) <= 1e-9
    assert gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient) <= 1e-9


@pytest.mark.parametrize("name", ["BERT", "ViT", "ResNet with GroupNorm"])
def test_batch_twice_in_one_pass(name: str) -> None:
    """R-Drop: x_1..x_N, x_1..x_N in one batch with other dropout masks; instance i is rows i and N + i."""
    architecture = BY_NAME[name]
    model, _, batch = make(architecture, 3)
    twice = {key: torch.cat([value, value]) for key, value in batch.items()}

    def run() -> Tensor:
        torch.manual_seed(3)
        first, second = architecture.losses(model, twice).chunk(2)
        return 0.5 * (first + second) + (first - second) ** 2

    assert_exact(model, run)


def test_model_called_twice() -> None:
    architecture = BY_NAME["BERT"]
    model, _, batch = make(architecture, 3)

    def run() -> Tensor:
        torch.manual_seed(3)
        return architecture.losses(model, batch) + architecture.losses(model, batch) ** 2

    assert_exact(model, run)


def test_choices_of_an_instance_in_one_batch() -> None:
    """Multiple choice: the options of instance i are rows 2i and 2i + 1."""
    architecture = BY_NAME["BERT"]
    model, _, batch = make(architecture, 6)
    model.eval()

    def run() -> Tensor:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        scores = model(**inputs).logits[:, 0].view(3, 2)
        return F.cross_entropy(scores, torch.tensor([0, 1, 1]), reduction="none")

    assert_exact(model, run, size=3)
    assert_exact(model, run)


@pytest.mark.parametrize("twice", [False, True])
def test_losses_that_mix_instances_are_refused(twice: bool) -> None:
    model, _, batch = make(BY_NAME["BERT"], 4)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}

    def run() -> Tensor:
        torch.manual_seed(1)
        if twice:
            doubled = {key: torch.cat([value, value]) for key, value in inputs.items()}
            first, second = model(**doubled).logits.chunk(2)
        else:
            first, second = model(**inputs).logits, model(**inputs).logits
        return F.cross_entropy(first @ second.T, torch.arange(4), reduction="none")

    with pytest.raises(InstancesMixedError, match="depends on the other instances"):
        record(model, run)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_batch_norm_in_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def run() -> Tensor:
        return model(x).squeeze(1) ** 2

    with pytest.raises(InstancesMixedError, match=r"1 \(BatchNorm1d\).*eval mode"):
        record(model, run)
    assert_exact(model.eval(), run)


def test_bare_parameters_and_unbatched_layers() -> None:
    class Odd(nn.Module):
        """Parameters that are not part of a layer, in many roles."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 6))
            self.project = nn.Linear(6, 6)
            self.matrix = nn.Parameter(torch.randn(6, 5))
            self.scale = nn.Parameter(torch.randn(()))
            self.token = nn.Parameter(torch.randn(1, 1, 6))
            self.mix = nn.Bilinear(5, 5, 2)
            self.lists = nn.ParameterList([nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2))])

        def forward(self, x: Tensor) -> Tensor:
            positions = self.project(self.table).tanh()  # a layer called with a shared input
            h = torch.cat([self.token.expand(x.shape[0], -1, -1), x + positions], 1) * self.scale.exp()
            h = (h @ self.matrix + self.lists[0]).tanh()
            return self.mix(h[:, 0], h[:, 1]) * self.lists[1].sigmoid()

    torch.manual_seed(0)
    model = Odd().double()
    for n in (1, 3, 4):
        x = torch.randn(n, 4, 6, dtype=torch.float64)
        assert_exact(model, lambda x=x: model(x).square().sum(1))  # type: ignore[misc]


def test_a_part_of_the_model_is_called() -> None:
    """The objective does not call the forward of the whole model; then N has to be given."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), torch.randn(4, 3).double()

    def run() -> Tensor:
        return model[0](x).square().sum(1)

    with pytest.raises(ValueError, match="size=N"):
        record(model, run)
    assert_exact(model, run, size=4)
