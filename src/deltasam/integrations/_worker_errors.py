"""Errors for dead processes: a worker of the data loader, or another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch

from deltasam._torch import RECEIVES_FROM_WORKER

# Messages of gloo and of the stores. NCCL's watchdog ends the process itself.
_LOST_CONNECTION = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket Timeout",
    "Socket closed", "pair closure", "failed to recv",
)  # fmt: skip


class LostError(RuntimeError):
    """A process that the training needs has died. The checkpoints are intact."""


@contextmanager
def explain_worker_errors(hint: Callable[[], str]) -> Iterator[None]:
    """Converts torch's error about a dead process into a :class:`LostError` that ends with the hint."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise LostError(f"{reason}. {hint()}") from error


def _reason(error: RuntimeError | OSError | EOFError) -> str | None:
    text = str(error) or type(error).__name__
    # Not "DataLoader worker process": that is an error in the data set, reported by a worker that is still alive.
    if "DataLoader worker (pid" in text or "Pin memory thread exited" in text or _broke_connection_to_worker(error):
        return (
            f"a worker of the data loader has died ({text.splitlines()[0]}): the data set crashed it, or the system "
            "killed it because memory ran out. To see an error of the data set, set dataloader_num_workers=0"
        )
    if not isinstance(error, RuntimeError):
        return None
    distributed = torch.distributed.is_available() and isinstance(error, torch.distributed.DistError)
    if distributed or any(message in text for message in _LOST_CONNECTION):
        return f"another process of the training has died or does not respond ({text.splitlines()[0][:200]})"
    return None


def _broke_connection_to_worker(error: BaseException) -> bool:
    """Whether the connection to a worker broke before torch noticed that the worker is dead.

    Errors of the data set do not match: a worker sends them whole, and they are raised elsewhere.
    """
    if isinstance(error, RuntimeError):
        return False
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) == RECEIVES_FROM_WORKER for frame in frames)
