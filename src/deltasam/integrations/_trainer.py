"""Hugging Face's trainers with a method."""

from __future__ import annotations

from transformers import Seq2SeqTrainer, Trainer

from deltasam.integrations._mixin import MethodMixin


class MethodTrainer(MethodMixin, Trainer):
    """``transformers.Trainer`` whose gradients are a method's; see :class:`MethodMixin` for what is added.

    With ``SAM(rho=0)`` (or ``ERM()``) it is the plain Trainer, bit for bit, also with dropout; in half precision on a
    GPU up to rounding, because there the models compute their own loss in half precision, the objectives never.
    Where the Trainer divides by another number of tokens than the model predicts, the objective does not: for GPT-2
    transformers 5.22 counts the first token of every row too, for other decoders not.

    Args:
        *args: ``Trainer``'s: the model, the training arguments, ...
        method: What takes the gradients.
        objective: Losses of the instances; by default the model's own loss, inferred from its head.
        capture: Record steps as CUDA graphs, one per batch shape.
        **kwargs: ``Trainer``'s: data sets, collator, metrics, callbacks, ...

    Example:
        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> from deltasam import DeltaSAM
        >>> sizes = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4}
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes))
        >>> data = [{"input_ids": torch.tensor([1, i]), "labels": i % 2} for i in range(8)]
        >>> args = TrainingArguments(tempfile.mkdtemp(), max_steps=2, report_to="none", disable_tqdm=True)
        >>> trainer = MethodTrainer(model=model, args=args, method=DeltaSAM(rho=0.05), train_dataset=data)
        >>> output = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> output.metrics["train_forwards"], output.metrics["train_backwards"]
        (8, 4)
    """


class Seq2SeqMethodTrainer(MethodMixin, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` (evaluation by generation) whose gradients are a method's.

    Args:
        *args: ``Seq2SeqTrainer``'s.
        method: What takes the gradients.
        objective: Losses of the instances; by default :class:`~deltasam.objectives.Seq2Seq`, the mean over tokens.
        capture: Record steps as CUDA graphs, one per batch shape.
        **kwargs: ``Seq2SeqTrainer``'s.
    """
