"""The hook adds noise to the word embeddings of the right side, never to padding, and is removed afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.objectives import Seq2Seq, perturbed_embeddings
from deltasam.objectives.regularisers import Norm, find_embeddings, uphill
from helpers.heads import FAMILIES, head, texts
from helpers.tiny import sentences, seq2seq, target_tokens


def seen(model: nn.Module, batch: dict[str, Tensor], noise: float, **options) -> tuple[Tensor, list]:
    """The outputs of the embedding layer with the noise, and the sites."""
    outputs = []
    layers = find_embeddings(model, options.get("embeddings"), options.get("side", "encoder")).layers
    with perturbed_embeddings(model, lambda site: site.empty().fill_(noise), batch=batch, **options) as sites:
        handles = [layer.register_forward_hook(lambda m, a, out: outputs.append(out)) for layer in layers]
        model(**{k: v for k, v in batch.items() if k != "labels"})
        for handle in handles:
            handle.remove()
    return outputs[0], sites


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_unchanged_bit_for_bit(family: str) -> None:
    model, batch = head(family).eval(), texts()
    clean, sites = seen(model, batch, 0.0)
    noisy, _ = seen(model, batch, 0.5)
    real = batch["attention_mask"].bool()
    assert len(sites) == 1
    assert sites[0].mask.squeeze(-1).equal(real)
    assert noisy[~real].equal(clean[~real])
    torch.testing.assert_close(noisy[real], clean[real] + 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_noise_is_drawn_and_added_in_float32_at_least(dtype: torch.dtype) -> None:
    model, batch = head("bert").to(dtype).eval(), texts()
    clean, _ = seen(model, batch, 0.0)
    noise = 1 / 3  # bfloat16 keeps only three digits
    noisy, (site,) = seen(model, batch, noise)
    wide = torch.promote_types(dtype, torch.float32)
    assert site.dtype == site.empty().dtype == wide
    assert site.lengths().dtype == wide
    real = batch["attention_mask"].bool()
    assert noisy.dtype == dtype
    assert noisy[real].equal((clean[real].to(wide) + torch.tensor(noise, dtype=wide)).to(dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_changes_the_logits_inside_the_context_only(family: str) -> None:
    model, batch = head(family).eval(), texts()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    before = model(**inputs).logits
    with perturbed_embeddings(model, lambda site: 0.5 * torch.randn(site.shape)):
        inside = model(**inputs).logits
    assert not torch.allclose(before, inside)
    assert model(**inputs).logits.equal(before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_same_as_inputs_embeds() -> None:
    model, batch = head("bert").double().eval(), texts()
    noise = torch.randn(4, 6, 16, dtype=torch.float64) * batch["attention_mask"].unsqueeze(-1)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    wanted = model(inputs_embeds=embedded + noise, attention_mask=batch["attention_mask"]).logits
    with perturbed_embeddings(model, lambda site: noise):
        found = model(batch["input_ids"], batch["attention_mask"]).logits  # the mask by position
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("one_module", [False, True])
def test_one_side_of_an_encoder_decoder(kind: str, side: str, one_module: bool) -> None:
    model = seq2seq(kind)
    if one_module:  # as before transformers 5: both sides call the same module
        shared = model.get_encoder().embed_tokens
        model.get_decoder().embed_tokens = shared
        assert shared in find_embeddings(model, None, side).layers
    batch = {**sentences(4, 7), "labels": target_tokens(4, 7)}  # the same length on both sides
    with perturbed_embeddings(model, lambda site: site.empty().fill_(0.1), batch=batch, side=side) as sites:
        Seq2Seq()(model, batch)
    (site,) = sites
    if side == "encoder":
        assert site.ids.equal(batch["input_ids"])
        assert site.mask.squeeze(-1).equal(batch["attention_mask"].bool())
    else:  # the decoder gets no mask, and the encoder's does not apply
        assert site.ids[:, 1:].equal(
            batch["labels"][:, :-1].masked_fill(batch["labels"][:, :-1] < 0, site.ids[-1, -1])
        )
        assert site.mask is None or not site.mask.squeeze(-1).equal(batch["attention_mask"].bool())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1))


@pytest.mark.parametrize("how", ["name", "module", "predicate"])
def test_plain_modules_name_their_layer(how: str) -> None:
    model, ids = Plain(), torch.tensor([[3, 4, 0], [5, 0, 0]])
    which = {"name": "words", "module": model.words, "predicate": lambda name, m: isinstance(m, nn.Embedding)}[how]
    with perturbed_embeddings(model, lambda site: torch.ones(site.shape), embeddings=which) as sites:
        model(ids)
    assert sites[0].mask.squeeze(-1).equal(ids != 0)  # from padding_idx
    assert sites[0].lengths().flatten().tolist() == [2.0, 1.0]


def test_the_mask_of_the_batch_if_the_call_has_none() -> None:
    model, ids = Plain(), torch.tensor([[3, 4, 5], [5, 4, 3]])
    batch = {"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    with perturbed_embeddings(model, None, batch=batch, embeddings="words") as sites:
        model(ids)
    assert sites[0].mask.squeeze(-1).equal(batch["attention_mask"].bool())


class Pair(nn.Embedding):
    """Like I-BERT's: returns the embeddings and a scale."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), 1.0


def test_errors_name_the_remedy() -> None:
    model = head("bert")
    with pytest.raises(RuntimeError, match="inputs_embeds"), perturbed_embeddings(model):
        model(inputs_embeds=torch.randn(2, 3, 16))
    with pytest.raises(ValueError, match="embeddings="), perturbed_embeddings(Plain()):
        pass
    with pytest.raises(ValueError, match="named_modules"), perturbed_embeddings(Plain(), embeddings="nothing"):
        pass
    pair = nn.Sequential(Pair(9, 4))
    with (
        pytest.raises(TypeError, match=r"Pair returns a tuple.*embeddings="),
        perturbed_embeddings(pair, embeddings="0"),
    ):
        pair(torch.tensor([[3, 4]]))
    with pytest.raises(KeyError, match="mine"), perturbed_embeddings(model):
        raise KeyError("mine")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Wrapped(nn.Module):
    """A hand-written head around an encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.encoder(**inputs)


@pytest.mark.parametrize("wrap", ["head", "compiled", "compiled in place", "peft", "peft on the embeddings", "ddp"])
def test_wrapped_models(wrap: str, tmp_path) -> None:
    model, batch = head("bert").eval(), texts()
    if wrap == "head":
        model = Wrapped(model)
    elif wrap == "compiled":
        model = torch.compile(model, backend="eager")
    elif wrap == "compiled in place":
        model.compile(backend="eager")
    elif wrap.startswith("peft"):
        peft = pytest.importorskip("peft")
        targets = ["query"] if wrap == "peft" else ["query", "word_embeddings"]
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=targets)).eval()
    elif wrap == "ddp":
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model)
    try:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        before = model(**inputs).logits
        with perturbed_embeddings(model, lambda site: torch.randn(site.shape)) as sites:
            inside = model(**inputs).logits
        assert [site.index for site in sites] == [0]
        assert sites[0].mask.squeeze(-1).equal(batch["attention_mask"].bool())
        assert not torch.allclose(inside, before, atol=1e-4)
        torch.testing.assert_close(model(**inputs).logits, before)
    finally:
        if wrap == "ddp":
            del model  # else it frees the group later, and waits for the group's threads while it holds the GIL
            torch.distributed.destroy_process_group()


def test_padding_may_have_any_token_id() -> None:
    model, ids = nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.Flatten()), torch.tensor([[0, 3, 5], [3, 3, 1]])
    clean = model(ids).view(2, 3, 4)
    with perturbed_embeddings(model, lambda site: site.empty().fill_(0.5), embeddings="0"):
        noisy = model(ids).view(2, 3, 4)
    torch.testing.assert_close(noisy, torch.where((ids != 3).unsqueeze(-1), clean + 0.5, clean))


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("size", [1e-35, 1.0, 1e35])
def test_uphill_has_length_one_for_tiny_and_huge_gradients(norm: Norm, size: float) -> None:
    """The squares of such float32 numbers are zero or infinite."""
    gradient = torch.randn(4, 3, 5)
    exact = gradient.double()
    lengths = exact.flatten(1).norm(dim=1) if norm == "l2" else exact.flatten(1).abs().amax(1)
    wanted = exact / lengths.view(-1, 1, 1)
    torch.testing.assert_close(uphill(gradient * size, norm).double(), wanted, rtol=1e-5, atol=1e-6)
