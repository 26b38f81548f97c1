"""Objectives that wrap an objective: random noise, consistency between passes, virtual adversaries.

=======================  ==============================================  ================  =========================
objective                what it adds to the wrapped one                 forwards          backwards
=======================  ==============================================  ================  =========================
:class:`EmbeddingNoise`  nothing: its input embeddings are noisy         1                 1
:class:`NEFTune`         the same in training only, scaled by length     1                 1
:class:`LabelSmoothing`  nothing: its labels are smoothed                1                 1
:class:`RDrop`           divergence of two dropout masks                 1, doubled batch  1, doubled batch
:class:`R3F`             divergence under random noise                   2                 1 through 2 passes
:class:`VAT`             KL under the worst small noise                  2 + steps         steps, 1 through 2 passes
:class:`SMART`           the same, symmetric, and nearness to a teacher  3 + steps         steps, 1 through 2 passes
=======================  ==============================================  ================  =========================

They work with unmodified Hugging Face models (see :func:`perturbed_embeddings`), can be nested, and combine with every
method: ``DeltaSAM(...).backward(model, batch, RDrop(Classification()))``.
"""

from deltasam.objectives.regularisers._embedding_noise import EmbeddingNoise
from deltasam.objectives.regularisers._embeddings import Site, perturbed_embeddings
from deltasam.objectives.regularisers._find import Embeddings, Side, find_embeddings
from deltasam.objectives.regularisers._label_smoothing import LabelSmoothing
from deltasam.objectives.regularisers._neftune import NEFTune
from deltasam.objectives.regularisers._noise import Distribution, Norm, draw, project, row_norm, uphill
from deltasam.objectives.regularisers._r3f import R3F
from deltasam.objectives.regularisers._rdrop import RDrop
from deltasam.objectives.regularisers._smart import SMART
from deltasam.objectives.regularisers._teacher import Teacher
from deltasam.objectives.regularisers._vat import VAT
from deltasam.objectives.regularisers._wrapper import Consistency, Losses, Wrapper

__all__ = [
    "R3F",
    "SMART",
    "VAT",
    "Consistency",
    "Distribution",
    "EmbeddingNoise",
    "Embeddings",
    "LabelSmoothing",
    "Losses",
    "NEFTune",
    "Norm",
    "RDrop",
    "Side",
    "Site",
    "Teacher",
    "Wrapper",
    "draw",
    "find_embeddings",
    "perturbed_embeddings",
    "project",
    "row_norm",
    "uphill",
]
