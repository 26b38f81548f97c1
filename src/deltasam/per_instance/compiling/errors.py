"""Why a pass does not run compiled."""

from __future__ import annotations


class NotCompilableError(RuntimeError):
    """The passes of this model run uncompiled; the message says why."""


class NewGraphError(Exception):
    """The graph of the model was not compared with the proxies yet, or the compiler fails on its perturbed pass."""
