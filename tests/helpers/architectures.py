"""Small random models of every architecture the per-instance engine is tested on, with a batch of ragged inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Run = Callable[[nn.Module], Tensor]
VOCABULARY, LENGTH = 31, 6


@dataclass(frozen=True)
class Architecture:
    """``build()`` gives the model; ``losses(model, batch)`` the losses; ``batch(n)`` a batch of n instances."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    losses: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    tolerance: float = 1e-9
    engine: str = "low-rank"


def text(n: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (n, LENGTH))
    mask = torch.ones(n, LENGTH, dtype=torch.long)
    for i in range(n):
        length = LENGTH - (i % 3)
        mask[i, length:] = 0
        ids[i, length:] = 1
        ids[i, 1] = ids[i, 0]  # a token that occurs twice
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(n) % 2}


def pixels(n: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.arange(n) % 2}


def classification(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def per_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Token-averaged loss of every sequence: next tokens, or the tokens themselves for models with a masked head."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    mask = batch["attention_mask"][:, 1:].to(nll.dtype)
    return (nll * mask).sum(1) / mask.sum(1)


def seq2seq(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch["input_ids"].flip(1)[:, :4]
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=targets[:, :-1].contiguous(),
    ).logits
    return F.cross_entropy(logits.transpose(1, 2), targets[:, 1:], reduction="none").mean(1)


def _hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16, "pad_token_id": 1, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 16, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2, "attention_dropout": 0.1,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.1,
    "attention_dropout": 0.1, "scale_embedding": True,
}  # fmt: skip


def _lora() -> nn.Module:
    import peft

    model = _hf("BertForSequenceClassification", "BertConfig", **_SMALL)()
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["query", "value", "dense"], lora_dropout=0.1, task_type="SEQ_CLS"
    )
    model = peft.get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(2, width), nn.GroupNorm(2, width)])
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.layer_scale = nn.Parameter(torch.rand(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return x + self.layer_scale * self.depthwise(self.norms[1](self.second(y)))


class ResNet(nn.Module):
    """A small residual network with GroupNorm, a depthwise convolution and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(_Residual(4), _Residual(4))
        self.head = nn.Linear(4, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))


class MLP(nn.Module):
    """Two linear layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 8), nn.RMSNorm(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layers(pixel_values)


class TorchTransformer(nn.Module):
    """``nn.TransformerEncoder`` (``nn.MultiheadAttention``) over a 1-d convolution, with a bare position table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=1)
        self.positions = nn.Parameter(torch.randn(LENGTH, 8))
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(8, 2, dropout=0.1, kdim=8, vdim=8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        memory = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.head(self.cross(x[:, :2], memory, memory)[0].mean(1))


class Tagger(nn.Module):
    """No rule can see the weights of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0].mean(1))


def _text(name: str, model: str, config: str, **options: Any) -> Architecture:
    return Architecture(name, _hf(model, config, **options), text, classification)


ARCHITECTURES = [
    _text("BERT", "BertForSequenceClassification", "BertConfig", **_SMALL),
    Architecture("BERT, masked-LM head (tied)", _hf("BertForMaskedLM", "BertConfig", **_SMALL), text, per_token),
    Architecture("BERT with LoRA (peft)", _lora, text, classification),
    _text("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", **_SMALL),
    _text("XLM-R", "XLMRobertaForSequenceClassification", "XLMRobertaConfig", **_SMALL),
    _text("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=12,
          n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=16, pad_token_id=1),
    _text("ALBERT", "AlbertForSequenceClassification", "AlbertConfig",
          **{**_SMALL, "embedding_size": 8, "num_hidden_layers": 3}),
    _text("ELECTRA", "ElectraForSequenceClassification", "ElectraConfig", **{**_SMALL, "embedding_size": 8}),
    _text("MPNet", "MPNetForSequenceClassification", "MPNetConfig", **_SMALL),
    _text("DeBERTa-v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", **_SMALL, relative_attention=True,
          position_buckets=4, pos_att_type=["c2p", "p2c"], norm_rel_ebd="layer_norm", share_att_key=True,
          max_relative_positions=8, type_vocab_size=0),
    _text("ModernBERT", "ModernBertForSequenceClassification", "ModernBertConfig", **{
        **_SMALL, "global_attn_every_n_layers": 2, "local_attention": 4, "reference_compile": False,
        "bos_token_id": 2, "eos_token_id": 2, "cls_token_id": 2, "sep_token_id": 2}),
    Architecture("GPT-2", _hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=12, n_layer=2, n_head=2,
                              n_positions=16, bos_token_id=2, eos_token_id=2, pad_token_id=1), text, per_token),
    Architecture("OPT", _hf("OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=12, num_hidden_layers=2,
                            num_attention_heads=2, ffn_dim=16, max_position_embeddings=16, word_embed_proj_dim=8,
                            pad_token_id=1, bos_token_id=2, eos_token_id=2), text, per_token),
    Architecture("Llama", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), text, per_token, 1e-6),
    Architecture("Qwen2", _hf("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), text, per_token, 1e-6),
    Architecture("T5", _hf("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=12, d_kv=6,
                           d_ff=16,
                           num_layers=2, num_heads=2, relative_attention_num_buckets=4, pad_token_id=1,
                           decoder_start_token_id=1), text, seq2seq, 1e-6),
    Architecture("BART", _hf("BartForConditionalGeneration", "BartConfig", **_BART), text, seq2seq),
    Architecture("PEGASUS", _hf("PegasusForConditionalGeneration", "PegasusConfig", **_BART), text, seq2seq),
    Architecture("ViT", _hf("ViTForImageClassification", "ViTConfig", hidden_size=12, num_hidden_layers=2,
                            num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
                            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), pixels, classification),
    Architecture("ResNet with GroupNorm", ResNet, pixels, classification),
    Architecture("nn.TransformerEncoder", TorchTransformer, text, classification),
    Architecture("MLP", MLP, pixels, classification),
    Architecture("LSTM tagger", Tagger, text, classification, engine="loop"),
]  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def make(
    architecture: Architecture, n: int, seed: int = 0
) -> tuple[nn.Module, Callable[[], Tensor], dict[str, Tensor]]:
    """The model in float64 and train mode, a pass that replays its draws, and the batch."""
    torch.manual_seed(seed)
    model = architecture.build().double().train()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))  # biases of zero and scales of one would hide mistakes
    batch = {k: v.double() if v.is_floating_point() else v for k, v in architecture.batch(n).items()}

    def run() -> Tensor:
        torch.manual_seed(seed + 1)
        return architecture.losses(model, batch)

    return model, run, batch
