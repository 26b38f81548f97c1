"""Hugging Face's trainers with a method."""

from __future__ import annotations

from transformers import Seq2SeqTrainer, Trainer

from deltasam.integrations._mixin import MethodMixin


class MethodTrainer(MethodMixin, Trainer):
    """``transformers.Trainer`` with the gradients of a method; :class:`MethodMixin` describes what it adds.

    With ``SAM(rho=0)`` or ``ERM()`` and an inferred objective, the weights after training equal those of the plain
    Trainer, bit for bit, also with dropout and clipping. The exceptions:

    * *Equal up to rounding*: label smoothing; losses over tokens (language models, token classification) if the batch
      size is not a power of two; half precision on a GPU, where models compute their loss in half precision and the
      objectives do not.
    * *Gradient accumulation*: the gradient is that of the large batch, for every head. Trainer's own agrees up to
      rounding only for models that take the number of targets, such as Llama. For others it is k times too large with
      k micro-batches (transformers#47688).
    * *Number of targets*: the objective divides by the number of tokens that the model predicts. Trainer of
      transformers 5.22 counts the first token of every row for GPT-2, which is not predicted, and omits it for Llama
      with prompt tuning, where it is.
    * *Router loss*: with accumulation the router loss of a micro-batch is weighted by its targets; Trainer adds them.

    Args:
        *args: Arguments of ``Trainer``: the model, the training arguments, ...
        method: The method that computes the gradients.
        objective: Losses of the instances; by default the model's own loss, inferred from its head.
        capture: Record steps as CUDA graphs, one per batch shape.
        **kwargs: Keyword arguments of ``Trainer``: data sets, collator, metrics, callbacks, ...

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
    """``transformers.Seq2SeqTrainer`` (evaluation by generation) with the gradients of a method.

    Args:
        *args: Arguments of ``Seq2SeqTrainer``.
        method: The method that computes the gradients.
        objective: Losses of the instances; by default :class:`~deltasam.objectives.Seq2Seq`, the mean over tokens.
        capture: Record steps as CUDA graphs, one per batch shape.
        **kwargs: Keyword arguments of ``Seq2SeqTrainer``.
    """
