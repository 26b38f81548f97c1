"""Whether float32 is computed as TF32: read, switched off and restored, in both of torch's ways of setting it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deltasam._torch import HAS_FP32_PRECISION, fp32_precision, set_fp32_precision

# Since 2.9 torch has a newer way to allow TF32, for one kind of operation or for several at once. Once it was used,
# reading the older settings often raises.
_KINDS = ("matmul", "conv", "rnn")
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}
_SEVERAL = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_SINGLE = tuple((backend, kind) for backend in _BACKENDS.values() for kind in _KINDS)
_FEWER_BITS = ("tf32", "bf16")


def rounds_products(device: torch.device) -> bool:
    """Whether float32 matrices are multiplied as TF32: on a CUDA device that supports it, if set, outside autocast."""
    if device.type != "cuda" or torch.is_autocast_enabled("cuda") or torch.cuda.get_device_capability(device)[0] < 8:
        return False
    return "matmul" in rounded(device)


def rounded(device: torch.device) -> frozenset[str]:
    """Which float32 operations may use fewer bits on the device: ``matmul``, ``conv`` (convolutions), ``rnn``.

    It only reads, and the result does not depend on the way in which it was set. It is hashable, as a part of the keys
    of recorded steps.
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
    """Switches TF32 off for matrix products, convolutions and recurrent layers, whatever the process has chosen.

    The settings are restored afterwards, see :func:`float32_kept`. Inside, both ways of reading the settings work,
    with one exception: if nothing was ever set for cuDNN, ``torch.backends.cudnn.allow_tf32`` raises, because torch's
    default could not be restored.
    """
    if not rounded(device):
        yield
        return
    with float32_kept() as before:
        before.lift()
        yield


@contextmanager
def float32_kept() -> Iterator[_Float32]:
    """Restores the precision of float32 operations afterwards, whatever was set inside, in both ways.

    Yields:
        The settings before.
    """
    before = _Float32.now()
    try:
        yield before
    finally:
        before.restore()


@dataclass(frozen=True)
class _Float32:
    """All settings of float32, and not their consequences: TF32 for everything is not TF32 for products.

    Attributes:
        chosen: The newer settings, by backend and kind of operation. Without cuDNN's while they are torch's default
            (TF32, unless something is set for everything), which has no name and so could not be restored.
        products: The older setting of products: highest, high or medium.
        convolutions: The older setting of convolutions: whether cuDNN may use TF32.
    """

    chosen: dict[tuple[str, str], str]
    products: str
    convolutions: bool

    @classmethod
    def now(cls) -> _Float32:
        """Reads the settings, which sets most of them to full precision for a moment."""
        if not HAS_FP32_PRECISION:
            return cls({}, *_older_way())
        chosen: dict[tuple[str, str], str] = {}
        try:
            for key in _SEVERAL:  # from the top: with "none" there, the ones below show their own settings
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
        """Withdraws what allows fewer bits, each in the way in which it was allowed, so that both ways agree."""
        for key, value in self.chosen.items():
            if value in _FEWER_BITS or key == ("generic", "all"):  # which overrides torch's default
                set_fp32_precision(*key, "ieee")
        self._set_older_way((self.products, self.convolutions), ("highest", False))

    def restore(self) -> None:
        """Restores all settings."""
        for key in self.chosen:
            set_fp32_precision(*key, "ieee")
        self._set_older_way(_older_way(), (self.products, self.convolutions))
        for key, value in self.chosen.items():
            set_fp32_precision(*key, value)

    def _set_older_way(self, now: tuple[str, bool], wanted: tuple[str, bool]) -> None:
        """Sets only what differs: it overwrites the newer settings, and torch warns when it is used."""
        if now[0] != wanted[0]:
            torch.set_float32_matmul_precision(wanted[0])
        if now[1] != wanted[1] and (
            not HAS_FP32_PRECISION or {("cuda", "conv"), ("cuda", "rnn")} <= self.chosen.keys()
        ):
            torch.backends.cudnn.allow_tf32 = wanted[1]


def _older_way() -> tuple[str, bool]:
    """The older settings; call it while no newer setting allows TF32."""
    try:
        convolutions = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it contradicts the newer settings
        convolutions = True
    return torch.get_float32_matmul_precision(), convolutions
