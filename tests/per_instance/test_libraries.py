"""Adapters and models of libraries that an earlier version misread: they equal the loop in every shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import CausalLM, Classification
from deltasam.per_instance import instance_gradient_norms
from helpers.instance_reference import relative

pytest.importorskip("peft")
TARGETS = ["query", "value"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("LoraConfig", {"target_modules": TARGETS, "r": 2, "use_dora": True, "init_lora_weights": False}),
    "LoHa": ("LoHaConfig", {"target_modules": TARGETS, "r": 2, "init_weights": False}),
    "FourierFT": ("FourierFTConfig", {"target_modules": TARGETS, "n_frequency": 5}),
    "TrainableTokens": ("TrainableTokensConfig", {"target_modules": ["word_embeddings"], "token_indices": [3, 4]}),
}


def assert_as_the_loop(model: nn.Module, batch: Any, objective: Any) -> None:
    found = []
    for engine in ("auto", "loop"):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PerInstanceSAM(rho=0.5, engine=engine).backward(model, batch, objective)  # type: ignore[arg-type]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
        found.append(torch.cat([g.flatten() for g in grads]))
    assert relative(found[0], found[1]) < 1e-9


def text(n: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (n, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(3, (n,))}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter(name: str) -> None:
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=24, max_position_embeddings=32, num_labels=3,
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    kind, options = ADAPTERS[name]
    if not hasattr(peft, kind):
        pytest.skip(f"this version of peft has no {kind}")
    adapter = getattr(peft, kind)(task_type="SEQ_CLS", **options)
    model = peft.get_peft_model(transformers.BertForSequenceClassification(config), adapter).double().train()
    with torch.no_grad():
        for part, p in model.named_parameters():
            if "lora_" in part and "magnitude" not in part:
                p.normal_()  # so that the norms of DoRA depend on what is perturbed
    for shape in ((3, 5), (2, 4), (4, 8), (8, 8)):
        assert_as_the_loop(model, text(*shape), Classification())


def dora_llama() -> nn.Module:
    """DoRA multiplies with a unit matrix of 16 rows, which is the same for all instances, and detaches the result."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                      num_attention_heads=4)  # fmt: skip
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], use_dora=True,
                              init_lora_weights=False)  # fmt: skip
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def rises(model: nn.Module, batch: Any, *, half: bool, **options: Any) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        step = PerInstanceSAM(rho=0.5, **options).backward(model, batch, CausalLM())
    assert step.perturbed_losses is not None
    return step.perturbed_losses - step.losses


@pytest.mark.parametrize("size", [4, 8])
def test_dora_is_read_in_the_same_way_in_half_precision(size: int) -> None:
    """16 rows are a multiple of N, and the gradient does not show whose they are: the moved weights do."""
    ids = torch.randint(3, 31, (size, 6))
    batch = {"input_ids": ids, "labels": ids}
    exact = rises(dora_llama(), batch, half=False, engine="loop")
    model = dora_llama()
    assert relative(rises(model, batch, half=True), exact) < 0.05
    assert relative(rises(model, batch, half=False), exact) < 1e-3, "half precision has taught it nothing wrong"
    model = dora_llama()
    assert relative(rises(model, batch, half=False), exact) < 1e-3
    assert relative(rises(model, batch, half=True), exact) < 0.05


def test_a_float32_step_is_compared_whatever_half_precision_has_proved() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    batch = (torch.randn(4, 3), torch.randint(2, (4,)))
    compared: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltasam.per_instance.recording.check_perturbed_pass", lambda *_: compared.append(True))
        for half in (True, True, False, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                PerInstanceSAM().backward(model, batch, Classification())
    assert len(compared) == 2


def mixtral() -> nn.Module:
    import transformers

    config = transformers.MixtralConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2, num_local_experts=3,
                                        num_experts_per_tok=2)  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def qwen() -> nn.Module:
    import transformers

    config = transformers.Qwen2MoeConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2, num_experts=3,
                                         num_experts_per_tok=2, moe_intermediate_size=8,
                                         shared_expert_intermediate_size=8)  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


@pytest.mark.parametrize("make", [mixtral, qwen])
def test_experts(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one is for float32
    for shape in ((3, 5), (4, 8), (2, 4), (4, 4)):
        batch = text(*shape)
        assert_as_the_loop(model, {**batch, "labels": batch["input_ids"]}, CausalLM())


def test_windows_of_images() -> None:
    """Swin's bias by relative position, and batches of 4 windows per image."""
    import transformers

    torch.manual_seed(0)
    config = transformers.SwinConfig(image_size=8, patch_size=2, num_channels=1, embed_dim=8, depths=[1],
                                     num_heads=[2], window_size=2, num_labels=3, drop_path_rate=0.0)  # fmt: skip
    model = transformers.SwinForImageClassification(config).double().eval()
    for part, p in model.named_parameters():
        if "relative_position_bias_table" in part:
            nn.init.normal_(p)
    for n in (3, 4, 16, 5, 2):
        batch = {"pixel_values": torch.randn(n, 1, 8, 8).double(), "labels": torch.randint(3, (n,))}
        assert_as_the_loop(model, batch, Classification())


def test_the_table_of_windows_alone() -> None:
    """A batch of 16 images after one of 4: as many rows as the index of the table that all windows share."""
    import transformers

    torch.manual_seed(0)
    config = transformers.SwinConfig(image_size=8, patch_size=2, num_channels=1, embed_dim=8, depths=[1],
                                     num_heads=[2], window_size=2, num_labels=3, drop_path_rate=0.0)  # fmt: skip
    model = transformers.SwinForImageClassification(config).double().eval()
    for n in (4, 16):
        batch = {"pixel_values": torch.randn(n, 1, 8, 8).double(), "labels": torch.randint(3, (n,))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine, exact = (
                instance_gradient_norms(model, batch, Classification(), params=is_table, engine=engine)
                for engine in ("auto", "loop")
            )
        assert relative(mine, exact) < 1e-9


def is_table(name: str, p: Tensor) -> bool:
    return "relative_position_bias_table" in name
