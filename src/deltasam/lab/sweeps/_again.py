"""Whether a run that failed may end otherwise when it is tried again."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_PASSING = {
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.ESTALE,
}  # fmt: skip
_HTTP_AGAIN = {408, 425, 429}  # too slow, too early, too many requests
_NETWORK = ("aiohttp", "http", "requests", "urllib3")  # beginnings: the hub's client was requests, httpx, httpx2


def may_end_otherwise(error: BaseException) -> bool:
    """Whether another try may help: not against a mistake in what was given, unless the system or the hub is behind.

    In doubt it may: a try too many costs the start of a run, one too few the run.
    """
    from deltasam.lab.experiments._errors import ConfigError, DivergedError, HeldError
    from deltasam.lab.plugins import PluginError
    from deltasam.lab.tasks import DataError

    if isinstance(error, HeldError) or not isinstance(error, (ConfigError, DataError, DivergedError, PluginError)):
        return True
    return any(map(_passes, _behind(error)))


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to this one."""
    seen = [error]
    while True:
        last = seen[-1]
        earlier = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if earlier is None or earlier in seen:
            return
        seen.append(earlier)
        yield earlier


def _passes(error: BaseException) -> bool:
    """Whether this is of the network, the disk or the memory, and may be over."""
    from huggingface_hub.errors import LocalEntryNotFoundError  # neither in the cache nor to be reached

    from deltasam.step.checks import is_out_of_memory

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status in _HTTP_AGAIN
    return (
        isinstance(error, (ConnectionError, TimeoutError, MemoryError, LocalEntryNotFoundError))
        or type(error).__module__.startswith(_NETWORK)
        or (isinstance(error, OSError) and error.errno in _PASSING)
        or (isinstance(error, RuntimeError) and is_out_of_memory(error))
    )
