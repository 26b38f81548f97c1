"""Tables that a method remembers and changes in place, so that a recorded step goes on with them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from deltasam.methods._base import Method
from deltasam.step.branches import is_recorded


class RemembersTables(Method):
    """A method whose state has tensors that every step changes in place.

    A CUDA graph reads and writes the memory it was recorded with. So the tables stay where they are from step to step,
    checkpoints are copies of them, and a step with tables elsewhere (before the first, after a checkpoint was loaded)
    is a step of another kind, which is recorded for itself.
    """

    def capture_key(self) -> Hashable:
        """Where the tables are."""
        return tuple((name, table.data_ptr(), table.shape) for name, table in self._tables().items())

    def _tables(self) -> dict[str, Tensor]:
        counts = ("steps", "skipped")  # which every method has, and which the host notes
        return {name: t for name, t in self.state.items() if isinstance(t, Tensor) and name not in counts}

    def state_dict(self) -> dict[str, Any]:
        """What to put into a checkpoint; the tables as copies, because they change in place."""
        return {**super().state_dict(), **{name: table.clone() for name, table in self._tables().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        super().load_state_dict(state)
        self.state.update({name: table.clone() for name, table in self._tables().items()})

    def _table(self, name: str, device: torch.device) -> Tensor | None:
        """The table, brought to the device if it comes from a checkpoint; None if it is still to be made.

        Raises:
            RuntimeError: It would have to be made in a recording, whose memory other recordings use again.
        """
        table: Tensor | None = self.state.get(name)
        if table is None or table.device != device:
            if is_recorded(device):
                raise RuntimeError(f"the table {name!r} does not exist yet: an ordinary step has to make it")
            if table is not None:
                self.state[name] = table = table.to(device)
        return table
