"""Token objectives against Hugging Face's own losses, its label smoother, and loops over the tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from deltasam.objectives import CausalLM, Seq2Seq, Tokens
from helpers.tiny import VOCABULARY, causal, encoder_config, sentences, seq2seq, target_tokens

CLOSE = {"rtol": 0, "atol": 1e-6}


def seq2seq_batch(ignore_index=-100, **options):
    return hf.BatchEncoding({**sentences(**options), "labels": target_tokens(ignore_index=ignore_index, **options)})


def causal_batch(**options):
    made = sentences(**options)
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    labels[0, :3] = -100  # a prompt
    return hf.BatchEncoding({**made, "labels": labels})


MODELS = {
    "t5": (lambda: seq2seq("t5"), Seq2Seq, seq2seq_batch),
    "bart": (lambda: seq2seq("bart"), Seq2Seq, seq2seq_batch),
    "mbart": (lambda: seq2seq("mbart"), Seq2Seq, seq2seq_batch),
    "blenderbot": (lambda: seq2seq("blenderbot"), Seq2Seq, seq2seq_batch),  # cannot make decoder inputs itself
    "gpt2": (lambda: causal("gpt2"), CausalLM, causal_batch),
    "llama": (lambda: causal("llama"), CausalLM, causal_batch),
    "bert masked": (lambda: hf.BertForMaskedLM(encoder_config("bert")).eval(), Tokens, causal_batch),
}


@pytest.fixture(params=list(MODELS))
def case(request):
    make, objective, batch = MODELS[request.param]
    return make(), objective, batch()


def test_the_mean_is_hugging_faces_loss(case):
    model, objective, batch = case
    losses = objective()(model, batch)
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_label_smoothing_is_hugging_faces(case, epsilon):
    model, objective, batch = case
    expected = LabelSmoother(epsilon=epsilon)(model(**batch), batch["labels"], shift_labels=objective is CausalLM)
    assert objective(label_smoothing=epsilon)(model, batch).mean().item() == pytest.approx(expected.item(), abs=1e-6)


def test_bf16_autocast_gives_hugging_faces_loss(case):
    model, objective, batch = case
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, own = objective()(model, batch), model(**batch)
    assert losses.dtype == torch.float32
    assert losses.mean().item() == pytest.approx(own.loss.item(), abs=1e-6)


def test_gradient_in_float64_is_hugging_faces(case):
    model, objective, batch = case
    model.double()
    params = list(model.parameters())
    losses = objective()(model, batch)
    assert losses.dtype == torch.float64
    ours = torch.autograd.grad(losses.mean(), params, allow_unused=True)
    own = torch.autograd.grad(model(**batch).loss, params, allow_unused=True)
    for a, b in zip(ours, own, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            # Hugging Face computes the causal loss in float32 for every dtype.
            torch.testing.assert_close(a, b, **CLOSE)


def loop_over_tokens(logits, labels, smoothing, ignore_index, reduction):
    """The definition, token by token."""
    n, length = labels.shape
    sums, counts = [0.0] * n, [0] * n
    for i in range(n):
        for t in range(length):
            label = int(labels[i, t])
            if label == ignore_index:
                continue
            row = logits[i, t].double().log_softmax(-1)
            sums[i] += -(1 - smoothing) * row[label].item() - smoothing * row.mean().item()
            counts[i] += 1
    if reduction == "sequence":
        return [s / max(c, 1) for s, c in zip(sums, counts, strict=True)]
    return [n * s / sum(counts) for s in sums]


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 4),
    length=st.integers(1, 5),
    smoothing=st.sampled_from([0.0, 0.1, 0.6]),
    ignore_index=st.sampled_from([-100, -1, 0]),
    reduction=st.sampled_from(["token", "sequence"]),
    seed=st.integers(0, 10**6),
)
def test_losses_and_items_against_a_loop(n, length, smoothing, ignore_index, reduction, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, length, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, 6, (n, length), generator=generator)
    ignored = torch.rand(n, length, generator=generator) < 0.4
    ignored[0, 0] = False
    labels[ignored] = ignore_index
    objective = Tokens(label_smoothing=smoothing, ignore_index=ignore_index, reduction=reduction)
    expected = loop_over_tokens(logits, labels, smoothing, ignore_index, reduction)
    assert objective.losses(logits, (None, labels)).tolist() == pytest.approx(expected, abs=1e-12)
    items = objective.items((None, labels))
    assert items is None if reduction == "sequence" else int(items) == int((~ignored).sum())


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("objective_class", [Tokens, CausalLM, Seq2Seq])
def test_divergence_against_a_loop(objective_class, reduction):
    a, b = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    labels = target_tokens().clamp(max=4)
    objective = objective_class(reduction=reduction)
    counted = (labels[:, 1:] != -100).tolist() if objective_class is CausalLM else (labels != -100).tolist()
    sums = []
    for i, row in enumerate(counted):
        p, q = a[i].softmax(-1), b[i].softmax(-1)
        both = 0.5 * ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1))
        sums.append(sum(both[t].item() for t, counts in enumerate(row) if counts))
    tokens = sum(map(sum, counted))
    scale = [4 / tokens] * 4 if reduction == "token" else [1 / sum(row) for row in counted]
    expected = [s * f for s, f in zip(sums, scale, strict=True)]
    assert objective.divergence(a, b, (None, labels)).tolist() == pytest.approx(expected, abs=1e-12)
    assert objective.divergence(a, a, (None, labels)).tolist() == [0.0] * 4


def test_ignored_tokens_get_no_gradient():
    logits = torch.randn(4, 6, 50, requires_grad=True)
    labels = target_tokens()
    for smoothing in (0.0, 0.1):
        (grad,) = torch.autograd.grad(Tokens(label_smoothing=smoothing).losses(logits, (None, labels)).sum(), logits)
        assert bool((grad[labels == -100] == 0).all())
        assert bool((grad[labels != -100] != 0).any(-1).all())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_micro_batches_weighted_by_items_are_the_large_batch(case, reduction, smoothing):
    model, objective_class, batch = case
    model.double()
    objective = objective_class(reduction=reduction, label_smoothing=smoothing)
    params = [p for p in model.parameters() if p.requires_grad]
    whole = objective(model, batch).mean()
    expected = torch.autograd.grad(whole, params, allow_unused=True)
    total = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 4)):
        part = {key: value[rows] for key, value in batch.items()}
        if reduction == "token":
            share = objective.items(part).double() / objective.items(batch)
        else:
            share = len(part["labels"]) / len(batch["labels"])
        total = total + share * objective(model, part).mean()
    gradient = torch.autograd.grad(total, params, allow_unused=True)
    assert total.item() == pytest.approx(whole.item(), abs=1e-10)
    for a, b in zip(gradient, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_decoder_inputs_given_are_used():
    model, batch = seq2seq("t5"), seq2seq_batch()
    given = {**batch, "decoder_input_ids": torch.ones(4, 6, dtype=torch.long)}
    assert not torch.equal(Seq2Seq()(model, given), Seq2Seq()(model, batch))
    assert Seq2Seq()(model, given).mean().item() == pytest.approx(model(**given).loss.item(), abs=1e-6)


@pytest.mark.parametrize("kind", ["t5", "bart", "mbart", "blenderbot"])
def test_another_ignore_index_makes_the_same_decoder_inputs(kind):
    model = seq2seq(kind)
    expected = Seq2Seq()(model, seq2seq_batch())
    assert torch.equal(Seq2Seq(ignore_index=-7)(model, seq2seq_batch(ignore_index=-7)), expected)


def test_the_labels_and_the_batch_are_unchanged():
    for make, objective, build in MODELS.values():
        batch = build()
        before = copy.deepcopy(dict(batch))
        objective()(make(), batch)
        assert batch.keys() == before.keys()
        assert all(torch.equal(batch[key], before[key]) for key in before)


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "llama"])
def test_no_cache_is_filled_and_no_labels_are_passed(name):
    make, objective, build = MODELS[name]
    model, seen = make(), {}
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True)
    outputs = []
    model.register_forward_hook(lambda _, __, out: outputs.append(out))
    objective()(model, build())
    assert "labels" not in seen
    assert outputs[0].past_key_values is None


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_no_cache_is_filled_under_an_adapter(name):
    peft = pytest.importorskip("peft")
    make, objective, build = MODELS[name]
    model, outputs = make(), []
    expected = objective()(model, build())
    model.get_decoder().register_forward_hook(lambda _, __, out: outputs.append(out))  # PEFT may call forward itself
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM"))
    torch.testing.assert_close(objective()(adapted.eval(), build()), expected)
    assert outputs[0].past_key_values is None


def test_wrapped_models():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **inputs):
            return self.module(**inputs)

    model, batch = seq2seq("bart"), seq2seq_batch()
    assert torch.equal(Seq2Seq()(Wrapper(model), batch), Seq2Seq()(model, batch))


def test_plain_modules():
    tokens = torch.randint(1, 7, (3, 5))
    model = nn.Embedding(7, 7)
    shifted = CausalLM()(model, (tokens, tokens))
    by_hand = Tokens()(model, (tokens[:, :-1], tokens[:, 1:]))
    torch.testing.assert_close(shifted, by_hand)
    bilinear = Seq2Seq(predict=lambda m, b: m(b["x"]))
    torch.testing.assert_close(bilinear(model, {"x": tokens, "labels": tokens}), Tokens()(model, (tokens, tokens)))


IDS = torch.randint(1, 7, (3, 5))
BAD = {
    "float": (Tokens(), (IDS, IDS.float()), "torch.float32.*token ids"),
    "one per instance": (Tokens(), (IDS, IDS[:, 0]), r"shape \(3,\).*Classification\(\)"),
    "another length": (Tokens(), (IDS, IDS[:, 1:]), r"\(3, 5, 7\), labels \(3, 4\)"),
    "too large": (Tokens(), (IDS, IDS + 3), "but the model has 7 classes"),
    "negative": (CausalLM(), (IDS, IDS.clone().fill_diagonal_(-1)), "contain -1"),
    "all ignored": (Seq2Seq(), (IDS, torch.full((3, 5), -100)), "every target token .* is ignored"),
    "only the first": (CausalLM(), (IDS, IDS.clone().index_fill_(1, torch.arange(1, 5), -100)), "is ignored"),
    "no labels": (CausalLM(), {"input": IDS}, "no key 'labels'"),
    "no decoder inputs": (Seq2Seq(), {"input": IDS, "labels": IDS}, "decoder_input_ids.*Embedding cannot"),
}


@pytest.mark.parametrize(("objective", "batch", "message"), BAD.values(), ids=BAD.keys())
def test_bad_batches(objective, batch, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        objective(nn.Embedding(7, 7), batch)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"reduction='sum'.*'token', 'sequence'"):
        Seq2Seq(reduction="sum")
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.5"):
        CausalLM(label_smoothing=1.5)


def test_a_sequence_without_targets_has_loss_zero():
    labels = torch.tensor([[1, 2], [-100, -100]])
    logits = torch.randn(2, 2, VOCABULARY, requires_grad=True)
    for reduction in ("token", "sequence"):
        losses = Tokens(reduction=reduction).losses(logits, (None, labels))
        assert losses[1].item() == 0
        assert bool(torch.autograd.grad(losses.sum(), logits)[0].isfinite().all())


@pytest.mark.parametrize("kind", [Tokens, CausalLM])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_another_ignore_index_ignores_the_same_tokens(kind: type[Tokens], reduction: str) -> None:
    model, tokens = nn.Embedding(7, 7).double(), torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 1, 2]])
    usual, other = kind(reduction=reduction), kind(reduction=reduction, ignore_index=0)
    batch = (tokens, tokens.masked_fill(tokens == 0, -100))
    wanted = usual(model, batch)
    torch.testing.assert_close(other(model, (tokens, tokens)), wanted, rtol=1e-12, atol=0)
    if reduction == "token":
        assert int(other.items((tokens, tokens))) == int(usual.items(batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_have_losses_in_float32(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(3, 4, 7).to(dtype), torch.randint(7, (3, 4))
    for reduction in ("token", "sequence"):
        losses = Tokens(reduction=reduction).losses(logits, (None, labels))
        assert torch.equal(losses, Tokens(reduction=reduction).losses(logits.float(), (None, labels)))
