"""Decides whether a failed run is worth another attempt."""

from __future__ import annotations

import errno

from deltasam.lab.experiments import ConfigError, DivergedError, LockedError, PluginError
from deltasam.lab.tasks import DataError

_TRANSIENT = {
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.ESTALE,
}  # fmt: skip
_TRANSIENT_HTTP = {408, 425, 429}  # timeout, too early, too many requests
_NETWORK = ("aiohttp", "http", "requests", "urllib3")  # prefixes: the hub's client was requests, httpx, httpx2


def is_worth_retrying(error: BaseException) -> bool:
    """Whether another attempt may succeed: not after a mistake in the input, unless the system or the hub caused it.

    In doubt it returns True: an unnecessary attempt costs the start of a run, a missing one costs the run.
    """
    if isinstance(error, LockedError) or not isinstance(error, (ConfigError, DataError, DivergedError, PluginError)):
        return True
    chain: list[BaseException] = [error]
    while (earlier := _earlier(chain[-1])) is not None and earlier not in chain:
        chain.append(earlier)
    return any(map(_is_transient, chain[1:]))


def _earlier(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_transient(error: BaseException) -> bool:
    """Whether this is a problem of the network, the disk or the memory that may be over by now."""
    from huggingface_hub.errors import LocalEntryNotFoundError  # not in the cache, and the hub was not reachable

    from deltasam.step.checks import is_out_of_memory

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status in _TRANSIENT_HTTP
    return (
        isinstance(error, (ConnectionError, TimeoutError, MemoryError, LocalEntryNotFoundError))
        or type(error).__module__.startswith(_NETWORK)
        or (isinstance(error, OSError) and error.errno in _TRANSIENT)
        or (isinstance(error, RuntimeError) and is_out_of_memory(error))
    )
