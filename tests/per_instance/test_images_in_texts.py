"""Vision-language models: how many images a text has differs, so the rows of the vision tower are not instances."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import CausalLM
from deltasam.per_instance.interception.row_moves import moves_between
from deltasam.per_instance.verification import own_rows
from helpers.instance_reference import relative

Batch = dict[str, Tensor]
IMAGE, PATCHES = 39, 4
# In the first batch every text has its own image; later ones have as many images, twice as many, and fewer.
COUNTS = ([1, 1, 1, 1], [2, 0, 1, 1], [0, 2, 2, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 1, 2, 2], [2, 1, 0, 0])


def llava() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, **shape),
        text_config=transformers.LlamaConfig(
            vocab_size=40, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **shape
        ),
        image_token_index=IMAGE, image_seq_length=PATCHES, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config).double().eval()


def texts(counts: Sequence[int]) -> Batch:
    """Texts of 14 tokens, each of which starts with the places of its images."""
    ids = torch.randint(3, IMAGE, (len(counts), 14))
    for text, count in zip(ids, counts, strict=True):
        text[: PATCHES * count] = IMAGE
    images = torch.randn(sum(counts), 3, 8, 8, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (nll * (labels != IMAGE)).mean(1)


def uncut(model: nn.Module, batch: Batch) -> Tensor:
    """A function need not be separable, so its batches are never cut."""
    return CausalLM()(model, batch)


def step(model: nn.Module, batch: Batch, **options: Any) -> tuple[Tensor, Tensor, int]:
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fall back to the loop
        found = PerInstanceSAM(rho=0.1, **options).backward(model, batch, losses)
    assert found.perturbed_losses is not None
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return found.perturbed_losses, gradient, found.forwards


@pytest.mark.parametrize("group", [1, 2])
def test_images_are_those_of_the_texts_that_mention_them(group: int) -> None:
    model = llava()
    for counts in COUNTS:
        batch = texts(counts)
        mine, exact = (step(model, batch, group=group, **options) for options in ({}, {"engine": "loop"}))
        assert relative(mine[0], exact[0]) < 1e-9
        assert relative(mine[1], exact[1]) < 1e-9
        if len(set(counts)) == 1:  # the rows of an instance are next to each other
            assert mine[2] == 2


def test_texts_are_not_cut_off_from_their_images() -> None:
    """The loop cuts the instances of a separable objective out of the batch where it can."""
    model = llava()
    for counts in COUNTS:
        batch = texts(counts)
        batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
        found = []
        for objective in (CausalLM(), uncut):
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                PerInstanceSAM(rho=0.1).backward(model, batch, objective)
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert relative(found[0], found[1]) < 1e-9


def test_images_after_the_last_trained_layer() -> None:
    """Between the losses and the projector there are frozen layers only."""
    model = llava()
    for name, p in model.named_parameters():
        p.requires_grad_("projector" in name)
    for counts in COUNTS[1:]:
        batch = texts(counts)
        mine, exact = (step(model, batch, **options) for options in ({}, {"engine": "loop"}))
        assert relative(mine[0], exact[0]) < 1e-9
        assert relative(mine[1], exact[1]) < 1e-9


def test_one_input_behind_an_operation_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every norm sees the images through the residual stream; to test them all would take longer than the step."""
    seen: list[int] = []
    test = own_rows.crossed_rows
    monkeypatch.setattr(
        "deltasam.per_instance.recording.crossed_rows",
        lambda state: seen.append(len(state.crossings)) or test(state),
    )
    model = llava()
    for _ in range(3):
        step(model, texts([1, 1, 1, 1]))
    assert seen == [1, 1, 1]


def test_a_frozen_vision_tower_needs_no_loop() -> None:
    """As with LoRA on the language model: the images are constants."""
    model = llava()
    for name, p in model.named_parameters():
        p.requires_grad_("language_model" in name or "lm_head" in name)
    for counts in COUNTS:
        batch = texts(counts)
        mine, exact = (step(model, batch, **options) for options in ({}, {"engine": "loop"}))
        assert relative(mine[1], exact[1]) < 1e-9
        assert mine[2] == 2


def test_only_operations_on_the_first_dimension_move_rows() -> None:
    h = torch.randn(4, 3, 5, requires_grad=True).exp()
    rows, columns = torch.tensor([2, 0, 1, 3]), torch.tensor([0, 2])
    mask, zeros = torch.rand(4, 3) > 0.5, torch.zeros(4, 3, 5)
    moving = {
        "index": h[rows], "two indices": h[rows, torch.tensor([0, 1, 2, 0])], "mask": h[mask],
        "select": h.index_select(0, rows), "select from the end": h.index_select(-3, rows),
        "gather": h.gather(0, torch.zeros(4, 3, 5, dtype=torch.long)), "copy": zeros.index_copy(0, rows, h),
        "add": zeros.index_add(0, rows, h), "scatter": zeros.masked_scatter(mask.unsqueeze(-1), h),
        "put": zeros.index_put((rows,), h), "sort": h.sort(0).values, "split": h.split([1, 3])[1],
    }  # fmt: skip
    others = {
        "index": h[:, columns], "select": h.index_select(1, columns), "last": h.index_select(-1, columns),
        "gather": h.gather(-1, torch.zeros(4, 3, 1, dtype=torch.long)), "topk": h.topk(2, -1).values,
        "slice": h[1:], "chunk": h.chunk(2)[0], "split": h.split([2, 3], -1)[0],
        "product": h @ h.mT, "add": zeros.index_add(-1, columns, h[..., :2]),
    }  # fmt: skip
    assert [name for name, tensor in moving.items() if not moves_between(tensor.relu(), ())] == []
    assert [name for name, tensor in others.items() if moves_between(tensor.relu(), ())] == []
    assert not moves_between(moving["index"].relu(), {moving["index"].grad_fn}), "the graph is searched up to a layer"
