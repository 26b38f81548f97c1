"""Infers the objective of a Hugging Face model: its mean is the loss that the model computes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltasam.objectives import CausalLM, Classification, Objective, Regression, Seq2Seq, Tokens
from deltasam.step.randomness import Replay, accelerators

_REMEDY = (
    "pass the objective: MethodTrainer(..., objective=Classification()), Regression(), Tokens(), CausalLM(), "
    "Seq2Seq(), Contrastive(), or any callable objective(model, batch) -> losses of shape (N,)"
)
_TOLERANCE = 0.02  # relative; covers half precision, while a missing shift or term differs more


def infer_objective(
    model: Any, *, label_smoothing: float = 0.0, label_names: Sequence[str] = ("labels",)
) -> Objective:
    """Infers the objective of a model from its head, its problem type and its labels.

    Its mean is the loss of the model, or that of ``Trainer`` with label smoothing. ``label_names`` may be empty:
    Trainer finds no names if ``forward`` takes arbitrary keywords. Raises a ValueError if there is no such objective.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = _head(inner)
    if head is None:
        raise ValueError(f"cannot infer the objective of {type(inner).__name__} from its head; {_REMEDY}")
    if len(label_names) > 1:
        raise ValueError(f"{type(inner).__name__} has several labels, {list(label_names)}; {_REMEDY}")
    if not label_smoothing:  # Trainer's smoothed loss omits it
        _refuse_orthogonal_term(model)
    labels = label_names[0] if label_names else "labels"
    router = 0.0 if label_smoothing else _router_coefficient(inner)  # Trainer's smoothed loss omits it
    common: dict[str, Any] = {"label_smoothing": label_smoothing, "labels": labels}
    if head == "seq2seq":
        if router:
            raise ValueError(
                f"{type(inner).__name__} adds {router} times its router loss, which Seq2Seq does not support: set "
                f"model.config.output_router_logits = False to train without it, or {_REMEDY}"
            )
        return Seq2Seq(**common)
    if head == "causal":
        return CausalLM(**common, virtual_tokens=_virtual_tokens(model), router_aux_loss_coef=router)
    if head == "tokens":
        return Tokens(**common)
    if head == "choice":
        return Classification(**common)
    return _sequence_objective(inner.config, label_smoothing, labels)


def no_labels(trainer: Any, batch: Mapping[str, Any], objective: Any) -> ValueError:
    """Returns the error for a batch without the labels that an inferred objective needs."""
    name = objective.labels
    columns = getattr(trainer.train_dataset, "column_names", None)
    dataset = f" (columns of train_dataset: {columns})" if isinstance(columns, list) else ""
    collator = "use DataCollatorForLanguageModeling(tokenizer, mlm=False), " if isinstance(objective, CausalLM) else ""
    return ValueError(
        f"the batches have no labels {name!r}, only {sorted(map(str, batch))}{dataset}: {collator}rename the column, "
        f"train_dataset.rename_column(NAME, {name!r}), or set TrainingArguments(label_names=[NAME]); {_REMEDY}"
    )


@torch.no_grad()
def check_inferred(model: Any, batch: Any, objective: Any) -> None:
    """Compares an inferred objective with the loss that the model computes, on one batch, without dropout.

    The head alone is not enough: some decoders do not shift their labels, and some models add terms. Costs two
    forwards, without side effects and with the same draws, if the model draws in eval mode, too. Does nothing if a
    comparison is not possible: the model returns no loss, or there are several processes.
    """
    sharded = torch.distributed.is_available() and torch.distributed.is_initialized()
    if sharded or not isinstance(batch, Mapping):
        return
    if getattr(objective, "router_aux_loss_coef", 0):
        # Compare without it: the model's factor may not be TRL's, and the difference would be too small to see.
        objective = replace(objective, router_aux_loss_coef=0.0)
        batch = {**batch, "output_router_logits": False}
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:  # not eval(), which may do more: loralib merges its weights
            module.training = False
        replay = Replay(model, accelerators(model.parameters()))
        with replay.extra():  # first: its errors about unsuitable labels are clearer
            ours = objective(model, batch).mean()
        with replay.extra():
            own = getattr(model(**_with_model_names(model, batch, objective)), "loss", None)
        if not isinstance(own, Tensor) or own.numel() != 1:
            return
    finally:
        for module, mode in modes:
            module.training = mode
    own, ours = float(own), float(ours)
    if abs(own - ours) > _TOLERANCE * max(abs(own), abs(ours), 1e-3):  # False if one is not finite
        raise ValueError(
            f"{type(model).__name__} computes the loss {own:.4g} for the first batch, but the objective inferred from "
            f"its head, {objective}, has the mean {ours:.4g}: the model does not shift its labels, or it adds terms "
            f"that do not belong to single instances; {_REMEDY}"
        )


def _with_model_names(model: Any, batch: Mapping[str, Any], objective: Any) -> dict[str, Any]:
    """Renames the labels of the batch to "labels" if the model does not know the name from ``label_names=``."""
    name = getattr(objective, "labels", "labels")
    known = name in inspect.signature(model.forward).parameters
    return {"labels" if key == name and not known else key: value for key, value in batch.items()}


def _router_coefficient(model: Any) -> float:
    """Returns the factor of the router loss in the model's own loss; 0 without one."""
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    # The models use the attribute, a copy of the configuration at construction.
    return float(getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0.0)))


def _refuse_orthogonal_term(model: Any) -> None:
    """Raises a ValueError if PEFT's AdaLoRA adds its regulariser, which may be too small for the comparison to see."""
    factor = getattr(getattr(model, "active_peft_config", None), "orth_reg_weight", 0)
    if factor:
        raise ValueError(
            f"PEFT's AdaLoRA adds {factor} times a regulariser of its factors to the model's loss, which the losses "
            f"of instances do not have: set AdaLoraConfig(orth_reg_weight=0) to train without it, or {_REMEDY}"
        )


def _virtual_tokens(model: Any) -> int:
    """Returns the number of virtual tokens that PEFT puts in front of every sequence and that have logits."""
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return 0
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind == "CPT":
        raise ValueError(f"PEFT's CPT has its own loss, which CausalLM does not compute; {_REMEDY}")
    # Their prefixes are keys and values of the attention layers, without logits.
    return 0 if kind in ("PREFIX_TUNING", "CARTRIDGE") else int(config.num_virtual_tokens)


def _sequence_objective(config: Any, label_smoothing: float, labels: str) -> Objective:
    problem = getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else "classification")
    if problem == "regression":
        if label_smoothing:
            raise ValueError(
                f"label_smoothing_factor={label_smoothing} with a regression model, whose labels cannot be "
                "smoothed: set it to 0, or give the model num_labels >= 2"
            )
        return Regression(labels=labels)
    if problem == "multi_label_classification":  # Trainer warns that it disables smoothing here
        return Classification(multi_label=True, labels=labels)
    return Classification(label_smoothing=label_smoothing, labels=labels)


def _head(model: Any) -> str | None:
    """Returns the kind of head, from the class of the model or a base class; None if unknown."""
    from transformers.models.auto import modeling_auto as auto  # takes seconds

    tables = {
        # The order matters: BartForConditionalGeneration is also listed as a masked language model.
        "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
        "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    }
    names = [base.__name__ for base in type(model).__mro__]
    for head, table in tables.items():
        for known in getattr(auto, table).values():  # a name, or several
            if any(name == known or (not isinstance(known, str) and name in known) for name in names):
                return "tokens" if head == "masked" else head
    return None
