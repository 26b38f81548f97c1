"""Where float32 is TF32: asked, switched off for a while, and set again, in both of the ways that torch has for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deltasam._torch import HAS_FP32_PRECISION, fp32_precision, set_fp32_precision

# Since 2.9 torch has a second way to allow TF32, for one kind of operation or for several at once. Once it was used,
# asking in the first way often raises.
_KINDS = ("matmul", "conv", "rnn")
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}
_SEVERAL = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_SINGLE = tuple((backend, kind) for backend in _BACKENDS.values() for kind in _KINDS)
_FEWER_BITS = ("tf32", "bf16")


def rounds_products(device: torch.device) -> bool:
    """Whether float32 matrices are multiplied as TF32 there: a CUDA device that can, asked to, outside of autocast."""
    if device.type != "cuda" or torch.is_autocast_enabled("cuda") or torch.cuda.get_device_capability(device)[0] < 8:
        return False
    return "matmul" in rounded(device)


def rounded(device: torch.device) -> frozenset[str]:
    """Which float32 operations may be made with fewer bits there: ``matmul``, ``conv`` (convolutions), ``rnn``.

    Only asks, and in the way that answers whichever way it was set. Hashable, so that what was recorded under one
    setting is told from what was recorded under another.
    """
    if device.type not in _BACKENDS:
        return frozenset()
    if HAS_FP32_PRECISION:
        return frozenset(kind for kind in _KINDS if fp32_precision(_BACKENDS[device.type], kind) in _FEWER_BITS)
    products = torch.get_float32_matmul_precision()
    if device.type == "cpu":
        return frozenset({"matmul"} if products == "medium" else ())
    kinds = {"conv", "rnn"} if torch.backends.cudnn.allow_tf32 else set()
    return frozenset(kinds | ({"matmul"} if products != "highest" else set()))


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Without TF32, whatever the process has chosen: what is called float32 has float32's rounding, not TF32's.

    Of matrix products, convolutions and recurrent layers; afterwards everything is set as it was, see
    :func:`float32_kept`. Inside torch can be asked in both of its ways. One answer is missing where nobody has chosen
    anything for cuDNN: ``torch.backends.cudnn.allow_tf32`` raises, as torch's own choice could not be set again.
    """
    if not rounded(device):
        yield
        return
    with float32_kept() as before:
        before.lift()
        yield


@contextmanager
def float32_kept() -> Iterator[_Float32]:
    """Afterwards float32 products and convolutions are made as before, whatever the block has set, in both ways.

    Yields:
        What was set before.
    """
    before = _Float32.now()
    try:
        yield before
    finally:
        before.restore()


@dataclass(frozen=True)
class _Float32:
    """All that is set for float32, and not what follows from it: TF32 for everything is not TF32 for products.

    Attributes:
        chosen: By backend and kind of operation, in the newer way. Without cuDNN's while they are torch's own choice
            (TF32, unless something is set for everything): that has no name by which it could be set again.
        products: In the older way: highest, high or medium.
        convolutions: In the older way: whether cuDNN may use TF32.
    """

    chosen: dict[tuple[str, str], str]
    products: str
    convolutions: bool

    @classmethod
    def now(cls) -> _Float32:
        """Asks; for that, much is set for a moment, to full precision."""
        if not HAS_FP32_PRECISION:
            return cls({}, *_older_way())
        chosen: dict[tuple[str, str], str] = {}
        try:
            for key in _SEVERAL:  # from the top: with "none" there, what is below tells its own setting
                chosen[key] = fp32_precision(*key)
                set_fp32_precision(*key, "none")
            single = {key: fp32_precision(*key) for key in _SINGLE}
            set_fp32_precision("generic", "all", "ieee")
            chosen |= {key: value for key, value in single.items() if value == "none" or fp32_precision(*key) == value}
            for key in chosen:
                set_fp32_precision(*key, "ieee")
            return cls(chosen, *_older_way())
        finally:
            for key, value in chosen.items():
                set_fp32_precision(*key, value)

    def lift(self) -> None:
        """Takes back what allows fewer bits, in the ways in which it was allowed, so that neither contradicts."""
        for key, value in self.chosen.items():
            if value in _FEWER_BITS or key == ("generic", "all"):  # which is above torch's own choice
                set_fp32_precision(*key, "ieee")
        self._set_older_way((self.products, self.convolutions), ("highest", False))

    def restore(self) -> None:
        """Sets all of it again."""
        for key in self.chosen:
            set_fp32_precision(*key, "ieee")
        self._set_older_way(_older_way(), (self.products, self.convolutions))
        for key, value in self.chosen.items():
            set_fp32_precision(*key, value)

    def _set_older_way(self, now: tuple[str, bool], wanted: tuple[str, bool]) -> None:
        """Only what differs: who never used it hears no warning of torch, and it writes over the newer way."""
        if now[0] != wanted[0]:
            torch.set_float32_matmul_precision(wanted[0])
        if now[1] != wanted[1] and (
            not HAS_FP32_PRECISION or {("cuda", "conv"), ("cuda", "rnn")} <= self.chosen.keys()
        ):
            torch.backends.cudnn.allow_tf32 = wanted[1]


def _older_way() -> tuple[str, bool]:
    """What is set in the older way; of the newer, nothing may allow TF32 meanwhile."""
    try:
        convolutions = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it disagrees with the newer way, which has none
        convolutions = True
    return torch.get_float32_matmul_precision(), convolutions
