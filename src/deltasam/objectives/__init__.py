"""Objectives: a model and a batch go in, one loss per instance comes out, scaled so that their mean is the objective.

=========================  ============================  =======================================================
objective                  loss of instance i            mean equals
=========================  ============================  =======================================================
:class:`Classification`    cross-entropy                 Hugging Face's sequence classification loss
:class:`Regression`        squared error                 the same with ``num_labels=1``
:class:`Tokens`            token cross-entropies         Hugging Face's masked LM and token classification loss
:class:`CausalLM`          next-token cross-entropies    Hugging Face's causal LM loss
:class:`PackedCausalLM`    the same of a document        the same for rows of several documents
:class:`Seq2Seq`           target cross-entropies        Hugging Face's sequence-to-sequence loss
:class:`Contrastive`       two rows of NT-Xent           NT-Xent over the 2N views, as in Mirror-BERT
:class:`DPO`               preference loss of a pair     the loss of TRL's ``DPOTrainer``
=========================  ============================  =======================================================

All accept Hugging Face models and batches, and plain modules with batches ``(inputs, labels)``. For anything else pass
the callables ``predict(model, batch)`` and ``labels(batch)``. A method also accepts any other callable
``objective(model, batch) -> (N,)``.

:mod:`deltasam.objectives.regularisers` wraps them: :class:`RDrop`, :class:`R3F`, :class:`SMART`, :class:`VAT`,
:class:`EmbeddingNoise`, :class:`NEFTune` and :class:`LabelSmoothing` are objectives made from an objective.
"""

from deltasam.objectives._base import Objective, at_least_float32, load_objective, symmetric_kl
from deltasam.objectives._causal import CausalLM
from deltasam.objectives._classification import Classification
from deltasam.objectives._contrastive import Contrastive
from deltasam.objectives._dpo import DPO
from deltasam.objectives._packed import PackedCausalLM
from deltasam.objectives._regression import Regression
from deltasam.objectives._seq2seq import Seq2Seq
from deltasam.objectives._tokens import Tokens
from deltasam.objectives.regularisers import (
    R3F,
    SMART,
    VAT,
    EmbeddingNoise,
    LabelSmoothing,
    NEFTune,
    RDrop,
    perturbed_embeddings,
)

__all__ = [
    "DPO",
    "R3F",
    "SMART",
    "VAT",
    "CausalLM",
    "Classification",
    "Contrastive",
    "EmbeddingNoise",
    "LabelSmoothing",
    "NEFTune",
    "Objective",
    "PackedCausalLM",
    "RDrop",
    "Regression",
    "Seq2Seq",
    "Tokens",
    "at_least_float32",
    "load_objective",
    "perturbed_embeddings",
    "symmetric_kl",
]
