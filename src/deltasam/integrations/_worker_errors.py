"""What is said when a process that the training needs has died: a worker of the data loader, or another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch

# What gloo and the stores say; NCCL's watchdog ends the process by itself.
_GONE = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket Timeout",
    "Socket closed", "pair closure", "failed to recv",
)  # fmt: skip


class LostError(RuntimeError):
    """A process that the training needs has died; the checkpoints are intact."""


@contextmanager
def explain_worker_errors(hint: Callable[[], str]) -> Iterator[None]:
    """Turns what torch raises when a process has died into a :class:`LostError` that says what to do."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        what = _what(error)
        if what is None:
            raise
        raise LostError(f"{what}. {hint()}") from error


def _what(error: RuntimeError | OSError | EOFError) -> str | None:
    text = str(error) or type(error).__name__
    # Not "DataLoader worker process": so begins an error of the data set, which its worker has told and lived on.
    if "DataLoader worker (pid" in text or "Pin memory thread exited" in text or _while_a_worker_sent(error):
        return (
            f"a worker of the data loader has died ({text.splitlines()[0]}): the data set crashed it, or the system "
            "ended it for want of memory. Without workers (dataloader_num_workers=0) an error of the data set shows "
            "itself"
        )
    if not isinstance(error, RuntimeError):
        return None
    distributed = torch.distributed.is_available() and isinstance(error, torch.distributed.DistError)
    if distributed or any(sign in text for sign in _GONE):
        return f"another process of the training has died or does not answer ({text.splitlines()[0][:200]})"
    return None


def _while_a_worker_sent(error: BaseException) -> bool:
    """Whether a connection to a worker broke: torch passes that on where the worker is not yet known to be dead.

    The data set's own errors are not among them: a worker sends them whole, and they are raised elsewhere.
    """
    if isinstance(error, RuntimeError):
        return False
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(
        (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch.utils.data.dataloader", "_try_get_data")
        for frame in frames
    )
