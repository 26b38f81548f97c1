"""Data parallelism, checkpointing and compilation change nothing; with adapters only these are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasam import R3F, SAM, SMART, TAT, TAVAT, VAT, Classification, FreeLB, RDrop
from helpers.heads import head, texts
from helpers.problems import grads, relative_error

STEPS: dict[str, Callable[[nn.Module], object]] = {
    "rdrop": lambda model: SAM().backward(model, texts(), RDrop(Classification())),
    "rdrop-two": lambda model: SAM().backward(model, texts(), RDrop(Classification(), passes="two")),
    "r3f": lambda model: SAM().backward(model, texts(), R3F(Classification(), eps=0.1)),
    "vat": lambda model: SAM().backward(model, texts(), VAT(Classification())),
    "smart": lambda model: SAM().backward(model, texts(), SMART(Classification(), total_steps=9)),
    "freelb": lambda model: FreeLB().backward(model, texts(), Classification()),
    "tat": lambda model: TAT().backward(model, texts(), Classification()),
    "tavat": lambda model: TAVAT().backward(model, texts(), Classification()),
}
steps = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def gradients(step: Callable[[nn.Module], object], wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
    model = head("bert").double()
    outer = wrap(model)
    torch.manual_seed(1)
    step(outer)
    return grads(model)


@steps
@pytest.mark.usefixtures("one_process")
def test_data_parallel(step: Callable[[nn.Module], object]) -> None:
    # Until version 2.12 torch copies the buffers over themselves before each pass of an objective; autograd refuses.
    copied = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    found = gradients(step, lambda model: nn.parallel.DistributedDataParallel(model, broadcast_buffers=copied))
    assert relative_error(found, gradients(step, lambda model: model)) < 1e-12


@steps
def test_activation_checkpointing(step: Callable[[nn.Module], object]) -> None:
    def checkpointed(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    assert relative_error(gradients(step, checkpointed), gradients(step, lambda model: model)) < 1e-12


@pytest.mark.parametrize("name", ["r3f", "freelb"])
def test_compiled(name: str) -> None:
    found = gradients(STEPS[name], lambda model: torch.compile(model, backend="eager"))
    assert relative_error(found, gradients(STEPS[name], lambda model: model)) < 1e-12


@steps
def test_adapters(step: Callable[[nn.Module], object]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(head("bert"), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(grads(model)) == trained
    assert any("lora_A" in name and float(g.abs().max()) > 0 for name, g in grads(model).items())
