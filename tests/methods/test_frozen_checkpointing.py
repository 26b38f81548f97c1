"""Frozen weights are perturbed in what activation checkpointing computes again, as without it; and a resumed run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deltasam import ASAM, SAM, CausalLM, DeltaSAM, FriendlySAM, PerInstanceSAM
from helpers.frozen import adapted
from helpers.problems import grads, relative_error
from helpers.promises import assert_intact, snapshot

pytest.importorskip("peft")
METHODS = [
    PerInstanceSAM(rho=0.2, params="base"),
    PerInstanceSAM(rho=0.2, params="base", group=2),
    PerInstanceSAM(rho=0.2, params="all"),
    SAM(rho=0.2, params="base"),
    ASAM(rho=0.2, params="base"),
    DeltaSAM(rho=0.2, params="base"),
]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{type(m).__name__}-{m.params}")


def batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 31, (4, 6), generator=random)
    lengths = torch.tensor([6, 4, 5, 3]).unsqueeze(1)
    mask = (torch.arange(6) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@methods
@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_activations_that_are_computed_again(method: Any, family: str) -> None:
    found = []
    for checkpointed in (False, True):
        model = adapted(family)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        before = snapshot(model)
        torch.manual_seed(3)
        for _ in range(2):  # in the second one nothing is compared any more
            copy.deepcopy(method).backward(model, batch(), CausalLM())
        assert_intact(model, before)
        found.append(grads(model))
    assert relative_error(found[1], found[0]) < (1e-6 if family == "Llama" else 1e-9)


@pytest.mark.parametrize("method", [PerInstanceSAM, FriendlySAM], ids=lambda m: m.__name__)
def test_a_resumed_run_with_only_the_adapters_saved(method: Any, tmp_path: Any) -> None:
    """As users save: the adapters by PEFT's state dict, the optimizer, and the method."""
    import peft

    def start() -> tuple[Any, Any, Any]:
        model = adapted("GPT-2")
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-2), method(rho=0.1, params="base")

    def train(model: Any, optimizer: Any, own: Any, steps: int) -> None:
        for _ in range(steps):
            own.backward(model, batch(), CausalLM())
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, own = start()
    train(model, optimizer, own, 2)
    torch.save(
        {
            "adapters": peft.get_peft_model_state_dict(model),
            "optimizer": optimizer.state_dict(),
            "method": own.state_dict(),
            "stream": torch.get_rng_state(),
        },
        tmp_path / "state.pt",
    )
    train(model, optimizer, own, 2)
    saved = torch.load(tmp_path / "state.pt")
    other, optimizer, own = start()
    peft.set_peft_model_state_dict(other, saved["adapters"])
    optimizer.load_state_dict(saved["optimizer"])
    own.load_state_dict(saved["method"])
    torch.set_rng_state(saved["stream"])
    train(other, optimizer, own, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
