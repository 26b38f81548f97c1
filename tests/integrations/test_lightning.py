"""The Lightning example, and the closure adapter under Lightning's automatic optimization."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from deltasam import ASAM, ERM, GSAM, SAM, DeltaSAM, FisherSAM, LookSAM, MultiStepSAM
from deltasam.integrations import MethodOptimizer
from deltasam.methods import Method
from helpers.data import REPOSITORY
from helpers.trainers import assert_same_bits, largest_difference, weights

lightning = pytest.importorskip("lightning", reason="lightning is not installed (extra lightning)")
pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # on a CPU without bf16 instructions
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*|.*LitLogger.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists.*"),
]


def loader() -> DataLoader[Any]:
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(48, 64, generator=random), torch.randint(10, (48,), generator=random))
    return DataLoader(data, batch_size=8)


def fit(module: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    settings = {"max_epochs": 1, "logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    settings |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder}
    resume = options.pop("ckpt_path", None)
    trainer = lightning.Trainer(**(settings | options))
    trainer.fit(module, loader(), ckpt_path=resume)
    module.finished = trainer
    return weights(module)


def module(method: Any) -> Any:
    torch.manual_seed(0)
    return runpy.run_path(str(REPOSITORY / "examples" / "lightning_module.py"))["Digits"](method)


class Automatic(lightning.LightningModule):
    """The same network with automatic optimization, with or without a method."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.method = method
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adam = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return adam if self.method is None else MethodOptimizer(adam, self.method, self)


def test_the_example_without_a_perturbation_is_automatic_optimization(tmp_path: Path) -> None:
    plain = fit(Automatic(None), tmp_path, gradient_clip_val=1.0)
    assert_same_bits(fit(module(ERM()), tmp_path), plain)
    assert_same_bits(fit(module(SAM(rho=0.0)), tmp_path), plain)
    assert largest_difference(fit(module(SAM(rho=0.1)), tmp_path), plain) > 1e-4


def test_the_example_in_bf16(tmp_path: Path) -> None:
    full, half = (fit(module(SAM(rho=0.1)), tmp_path, precision=p) for p in ("32-true", "bf16-mixed"))
    assert 1e-6 < largest_difference(full, half) < 0.1
    assert all(value.dtype == torch.float32 for value in half.values())


def test_the_example_resumes_with_the_methods_state(tmp_path: Path) -> None:
    whole = fit(module(LookSAM(rho=0.5, k=4)), tmp_path, max_epochs=2)
    first = module(LookSAM(rho=0.5, k=4))
    fit(first, tmp_path)
    first.finished.save_checkpoint(tmp_path / "half.ckpt")
    state = torch.get_rng_state()
    second = module(LookSAM(rho=0.5, k=4))
    torch.set_rng_state(state)  # Lightning does not save the random streams
    assert_same_bits(fit(second, tmp_path, max_epochs=2, ckpt_path=tmp_path / "half.ckpt"), whole)
    assert second.method.steps == 12


@pytest.mark.parametrize("whole", [True, False], ids=["module", "network"])
def test_accumulation_by_lightning_is_refused(whole: bool, tmp_path: Path) -> None:
    class Inner(Automatic):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            adam = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return MethodOptimizer(adam, self.method, self if whole else self.network)

    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2\) .*scale=1 / 2"):
        fit(Inner(SAM()), tmp_path, accumulate_grad_batches=2)


@pytest.mark.parametrize("whole", [True, False], ids=["module", "network"])
@pytest.mark.parametrize("kind", ["backward", "losses"])
def test_a_method_that_needs_losses_is_for_manual_optimization(kind: Any, whole: bool, tmp_path: Path) -> None:
    """Lightning's closures call ``backward()`` and return one loss for both kinds of closure."""

    class Inner(Automatic):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            adam = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return MethodOptimizer(adam, self.method, self if whole else self.network, closure=kind)

    with pytest.raises(ValueError, match=r"manual.* method\.backward\(self, batch, objective\)") as caught:
        fit(Inner(DeltaSAM()), tmp_path)
    assert 'closure="losses"' not in str(caught.value)


def test_losses_from_the_users_closure(tmp_path: Path) -> None:
    """An overridden ``optimizer_step`` may pass another closure than Lightning's."""

    class Own(Automatic):
        def training_step(self, batch: Any, index: int) -> Tensor:
            self.batch = batch
            return super().training_step(batch, index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            adam = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return MethodOptimizer(adam, self.method, self, closure="losses")

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer.step(
                lambda: nn.functional.cross_entropy(self.network(self.batch[0]), self.batch[1], reduction="none")
            )

    method = DeltaSAM(rho=0.1)
    fit(Own(method), tmp_path)
    assert method.steps == 6


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [(GSAM(), "norm"), (LookSAM(), "norm"), (SAM(), "value")],
    ids=["gsam", "look-sam", "value"],
)
def test_clipping_by_lightning_that_would_change_the_method_is_refused(
    method: Method, algorithm: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"gradient_clip_val=0.1\) .*register_step_pre_hook"):
        fit(Automatic(method), tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)


def test_clipping_by_lightning_leaves_the_direction_of_the_ascent(tmp_path: Path) -> None:
    class Clipped(Automatic):
        hook = False

        def configure_optimizers(self) -> torch.optim.Optimizer:
            sgd = torch.optim.SGD(self.parameters(), lr=0.5)  # Adam amplifies rounding
            optimizer = MethodOptimizer(sgd, self.method, self)
            if self.hook:
                optimizer.register_step_pre_hook(self.clip)
            return optimizer

        def clip(self, *_: Any) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    class Hooked(Clipped):
        hook = True

    for method in (SAM(rho=0.1), ASAM(rho=0.5), FisherSAM(rho=0.1), MultiStepSAM(rho=0.1)):
        by_lightning = fit(Clipped(replace(method, state={})), tmp_path, gradient_clip_val=0.1)
        assert largest_difference(by_lightning, fit(Hooked(replace(method, state={})), tmp_path)) < 1e-6, method


def test_clipping_by_lightning_of_plain_training(tmp_path: Path) -> None:
    plain = fit(Automatic(None), tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    for method in (ERM(), GSAM(rho=0.0)):
        found = fit(Automatic(method), tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        assert_same_bits(found, plain)


def test_the_closure_adapter_works_in_automatic_optimization(tmp_path: Path) -> None:
    assert_same_bits(fit(Automatic(SAM(rho=0.0)), tmp_path), fit(Automatic(None), tmp_path))
    by_closure = fit(Automatic(SAM(rho=0.1)), tmp_path)
    torch.manual_seed(0)
    by_hand = Automatic(None)
    optimizer, method = torch.optim.AdamW(by_hand.parameters(), lr=3e-3), SAM(rho=0.1)
    for batch in loader():
        optimizer.zero_grad()
        method.backward(
            by_hand, batch, lambda m, b: nn.functional.cross_entropy(m.network(b[0]), b[1], reduction="none")
        )
        optimizer.step()
    assert_same_bits(by_closure, weights(by_hand))
