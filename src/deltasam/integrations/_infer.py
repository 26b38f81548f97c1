"""From a Hugging Face model to the objective whose mean is the model's own loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltasam.objectives import CausalLM, Classification, Objective, Regression, Seq2Seq, Tokens

_WAY_OUT = (
    "pass the objective: MethodTrainer(..., objective=Classification()), Regression(), Tokens(), CausalLM(), "
    "Seq2Seq(), Contrastive(), or any callable objective(model, batch) -> losses of shape (N,)"
)
_TOLERANCE = 0.02  # relative: two ways to the same mean in half precision; a missing shift or term is more


def infer_objective(
    model: Any, *, label_smoothing: float = 0.0, label_names: Sequence[str] = ("labels",)
) -> Objective:
    """The objective of a model, by its head, its problem type and its labels.

    Args:
        model: A Hugging Face model, also inside PEFT.
        label_smoothing: ``TrainingArguments.label_smoothing_factor``.
        label_names: What the labels of a batch are called: one name, or none, which is "labels" (Trainer finds none in
            a ``forward`` that takes anything).

    Returns:
        The objective whose mean is the loss that the model computes itself, or ``Trainer``'s with label smoothing.

    Raises:
        ValueError: The head is not one of those with one loss per instance, or has several labels; or the model is a
            sequence-to-sequence model that adds a loss of its routers, or has PEFT's CPT, which has a loss of its own.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4}
        >>> infer_objective(BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=1, **sizes)))
        Regression(labels='labels', predict=None)
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = _head(inner)
    if head is None:
        raise ValueError(f"cannot tell the objective of {type(inner).__name__} from its head; {_WAY_OUT}")
    if len(label_names) > 1:
        raise ValueError(f"{type(inner).__name__} has the labels {list(label_names)}, not one; {_WAY_OUT}")
    labels = label_names[0] if label_names else "labels"
    router = 0.0 if label_smoothing else _router_coefficient(inner)  # Trainer's smoothed loss leaves it out
    if head == "seq2seq":
        if router:
            raise ValueError(
                f"{type(inner).__name__} adds {router} times a loss of its routers, which Seq2Seq does not have: set "
                f"model.config.output_router_logits = False to train without it, or {_WAY_OUT}"
            )
        return Seq2Seq(label_smoothing=label_smoothing, labels=labels)
    if head == "causal":
        return CausalLM(
            label_smoothing=label_smoothing,
            labels=labels,
            virtual_tokens=_virtual_tokens(model),
            router_aux_loss_coef=router,
        )
    if head == "tokens":
        return Tokens(label_smoothing=label_smoothing, labels=labels)
    if head == "choice":
        return Classification(label_smoothing=label_smoothing, labels=labels)
    return _sequence_objective(inner.config, label_smoothing, labels)


def no_labels(trainer: Any, batch: Mapping[str, Any], objective: Any) -> ValueError:
    """The error for batches in which an inferred objective finds no labels: how the data have to look.

    Args:
        trainer: Whose training set it is.
        batch: What its collator has made.
        objective: The inferred one.
    """
    name = objective.labels
    called = "" if name == "labels" else f", which label_names={list(trainer.label_names)} calls the labels"
    columns = getattr(trainer.train_dataset, "column_names", None)
    known = f"the columns of train_dataset are {columns}, and " if isinstance(columns, list) else ""
    words = "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of the words themselves; or "
    return ValueError(
        f"the batches have no {name!r}{called}, only {sorted(map(str, batch))}: {known}Trainer leaves out those that "
        f"the model's forward does not take. {words if isinstance(objective, CausalLM) else ''}give every row a "
        f"{name!r}, as by train_dataset.rename_column(NAME, {name!r}), or say how they are called by "
        f"TrainingArguments(label_names=[NAME]); {_WAY_OUT}"
    )


@torch.no_grad()
def check_inferred(model: Any, batch: Any, objective: Any) -> None:
    """Compares an inferred objective with the loss that the model computes itself, on one batch, without dropout.

    A head says most, not all: some decoders do not shift their labels, and some models add terms of their own. Two
    forwards, once. What cannot be compared is let through: the labels are not the model's, or the model is sharded.

    Raises:
        ValueError: They are not the same.
    """
    sharded = torch.distributed.is_available() and torch.distributed.is_initialized()
    if sharded or not isinstance(batch, Mapping):
        return
    if getattr(objective, "router_aux_loss_coef", 0):
        # Both without it: the model may have another factor than TRL's, and the difference would be too small to see.
        objective = replace(objective, router_aux_loss_coef=0.0)
        batch = {**batch, "output_router_logits": False}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        ours = objective(model, batch).mean()  # first: it has clearer words for labels that do not fit
        own = getattr(model(**_as_named_by(model, batch, objective)), "loss", None)
        if not isinstance(own, Tensor) or own.numel() != 1:
            return
    finally:
        for module, mode in modes:
            module.training = mode
    own, ours = float(own), float(ours)
    if abs(own - ours) > _TOLERANCE * max(abs(own), abs(ours), 1e-3):  # also False for what is not finite
        raise ValueError(
            f"{type(model).__name__} computes the loss {own:.4g} for the first batch, and the objective inferred from "
            f"its head, {objective}, has the mean {ours:.4g}: its labels are not shifted, or it adds terms that are "
            f"not of single instances; {_WAY_OUT}"
        )


def _as_named_by(model: Any, batch: Mapping[str, Any], objective: Any) -> dict[str, Any]:
    """The batch with the labels as the model calls them: ``label_names=`` may have told another name."""
    name = getattr(objective, "labels", "labels")
    told = name in inspect.signature(model.forward).parameters
    return {"labels" if key == name and not told else key: value for key, value in batch.items()}


def _router_coefficient(model: Any) -> float:
    """Factor of the routers' loss in the model's own loss, 0 without one."""
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    # The models go by the attribute, a copy of what the configuration had when they were made.
    return float(getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0.0)))


def _virtual_tokens(model: Any) -> int:
    """Number of tokens that PEFT puts in front of every sequence and that have logits.

    Raises:
        ValueError: The model has CPT, which weights its tokens and counts some of the virtual ones.
    """
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return 0
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind == "CPT":
        raise ValueError(f"PEFT's CPT has a loss of its own, which CausalLM does not compute; {_WAY_OUT}")
    # Prefixes of these are keys and values of the attention layers, without logits.
    return 0 if kind in ("PREFIX_TUNING", "CARTRIDGE") else int(config.num_virtual_tokens)


def _sequence_objective(config: Any, label_smoothing: float, labels: str) -> Objective:
    problem = getattr(config, "problem_type", None)
    if problem is None:
        problem = "regression" if config.num_labels == 1 else "single_label_classification"
    if problem == "regression":
        if label_smoothing:
            raise ValueError(
                f"label_smoothing_factor={label_smoothing} with a regression model: numbers cannot be smoothed; set "
                "it to 0, or give the model num_labels >= 2"
            )
        return Regression(labels=labels)
    if problem == "multi_label_classification":  # Trainer says that it switches smoothing off here
        return Classification(multi_label=True, labels=labels)
    return Classification(label_smoothing=label_smoothing, labels=labels)


def _head(model: Any) -> str | None:
    """What kind of head a model has, by its class or one that it inherits from."""
    from transformers.models.auto import modeling_auto as auto  # late: this takes seconds

    tables = {
        # In this order: BartForConditionalGeneration is listed as a masked language model too.
        "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
        "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    }
    names = [base.__name__ for base in type(model).__mro__]
    for head, table in tables.items():
        heads = set(_flat(getattr(auto, table).values()))
        if any(name in heads for name in names):
            return "tokens" if head == "masked" else head
    return None


def _flat(values: Any) -> list[str]:
    return [name for value in values for name in ((value,) if isinstance(value, str) else value)]
