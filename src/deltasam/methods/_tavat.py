"""TAVAT: FreeLB with a perturbation per token that is kept across batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltasam.methods._embedding_ascent import EmbeddingAscent, Parts
from deltasam.methods._freelb import FreeLB
from deltasam.objectives.regularisers import Site, project, row_norm, uphill
from deltasam.step.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class TAVAT(FreeLB):
    r"""TAVAT: besides the perturbation :math:`\delta_i` of an instance, every token has one, :math:`\eta_{ij}`.

    :math:`\eta_{ij}^0 = V[x_{ij}]`, from a vocabulary of perturbations that accumulates over training, and

    .. math:: \delta_i \leftarrow \delta_i + \alpha \frac{\nabla_\delta l_i}{\lVert \nabla_\delta l_i \rVert}, \qquad
              \eta_{ij} \leftarrow n_{ij} \Bigl(\eta_{ij} +
              \alpha \frac{\nabla_{\eta_{ij}} l_i}{\lVert \nabla_{\eta_{ij}} l_i \rVert}\Bigr), \qquad
              n_{ij} = \frac{\lVert \eta_{ij} \rVert}{\max_k \lVert \eta_{ik} \rVert}

    (n of the moved :math:`\eta`): gradients are normalised token by token, and tokens that moved further keep more.
    After the last pass :math:`V[v]` becomes the mean of :math:`\eta_{ij}` over the occurrences of v in the batch.

    The projection applies to the sum :math:`\delta_i + \eta_i` and scales both, as in the released code. That code
    adds :math:`\eta` to V for every occurrence, so that V grows with the frequency of a token; here V is assigned, as
    in the paper. A layer that does not embed token ids has no vocabulary: there it is :class:`FreeLB`. Every embedding
    table has its own vocabulary.

    Cost: K forwards, K backwards; the vocabulary is as large as the embedding table (in :meth:`state_dict`).

    Attributes:
        init_magnitude: :math:`\sigma`, the size of the initial noise; V starts as :math:`U(-\sigma, \sigma)/\sqrt H`.

    The other hyperparameters are those of :class:`FreeLB`.

    References:
        Li and Qiu, Token-Aware Virtual Adversarial Training in Natural Language Understanding, AAAI 2021.

    Example:
        >>> from deltasam import Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> method = TAVAT(embeddings="0")
        >>> step = method.backward(model, batch, Classification())
        >>> step.forwards, step.backwards, method.state_dict()["vocabulary"].shape
        (3, 3, torch.Size([9, 4]))
    """

    buffers = ("vocabulary",)

    def is_erm(self) -> bool:
        """As for FreeLB, unless earlier steps stored perturbations of tokens."""
        has_vocabulary = any(name.startswith("vocabulary") for name in self.state)
        return super().is_erm() and not (self.adv_steps == 1 and has_vocabulary)

    def _start(self, site: Site, micro_batch: int) -> Parts:
        delta = super()._start(site, micro_batch)
        if site.vocabulary is None or site.ids is None or site.ids.shape != site.shape[:2]:
            return delta  # not an embedding of token ids
        table = self._vocabulary(site)
        return [*delta, site.unpadded(table[_tokens(site)].to(site.dtype).view(site.shape))]

    def _vocabulary(self, site: Site) -> Tensor:
        def start(table: Tensor) -> None:
            size = self.init_magnitude / site.shape[-1] ** 0.5
            seed = Seed(self.seed, 0, (site.table,) if site.table else ())
            table.uniform_(-size, size, generator=torch.Generator(site.device).manual_seed(seed.value))

        shape = (site.vocabulary or 0, site.shape[-1])
        return self.table(_name(site), shape, device=site.device, dtype=site.dtype, start=start)

    def _move(self, site: Site, parts: Parts, gradients: Parts) -> Parts:
        if len(parts) == 1:
            return super()._move(site, parts, gradients)
        delta = parts[0] + self.adv_lr * uphill(site.unpadded(gradients[0]), self.norm)
        by_token = uphill(site.unpadded(gradients[1]).flatten(0, 1), self.norm).view_as(parts[1])
        tokens = parts[1] + self.adv_lr * by_token
        lengths = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
        longest = lengths.amax(1, keepdim=True)
        tokens = tokens * (lengths / torch.where(longest > 0, longest, torch.ones_like(longest)))
        if self.max_norm is None:
            return [delta, tokens]
        total = delta + tokens
        if self.norm == "linf":
            kept = self.max_norm / row_norm(total, "linf").clamp(min=self.max_norm)
        else:
            kept = row_norm(project(total, self.max_norm, "l2"), "l2") / row_norm(total, "l2").clamp(min=1e-30)
        return [delta * kept, tokens * kept]

    def _finish(self, ascent: EmbeddingAscent) -> None:
        met: dict[str, list[tuple[Site, Tensor]]] = {}
        for site, parts in ascent.parts():
            if len(parts) > 1:
                met.setdefault(_name(site), []).append((site, parts[1]))
        for name, moved in met.items():
            _renew(self.state[name], moved)


def _renew(table: Tensor, met: list[tuple[Site, Tensor]]) -> None:
    """Sets the rows of the tokens in the batch to the means over their occurrences, in place."""
    ids = torch.cat([_tokens(site) for site, _ in met])
    masks = [torch.ones_like(_tokens(site)) if site.mask is None else site.mask.flatten() for site, _ in met]
    real = torch.cat(masks).to(table.dtype)
    moved = torch.cat([tokens.flatten(0, 1) for _, tokens in met]).to(table.dtype)
    count = torch.zeros_like(table[:, 0]).index_add_(0, ids, real)
    # Every occurrence contributes its share of the difference to the mean: no other rows are touched.
    share = real / count[ids].clamp(min=1)
    table.index_add_(0, ids, (moved - table[ids]) * share.unsqueeze(-1))


def _name(site: Site) -> str:
    return f"vocabulary.{site.table}" if site.table else "vocabulary"


def _tokens(site: Site) -> Tensor:
    assert site.ids is not None
    return site.ids.flatten()
