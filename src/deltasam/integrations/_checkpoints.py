"""The state of the method and the objective in a Trainer's checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from deltasam.integrations._logging import StepMetrics
from deltasam.integrations._state import load_state, save_state
from deltasam.objectives import load_objective
from deltasam.speed.capture import Captured

_Base: Any = object  # a Trainer, once a class mixes this in
_log = logging.getLogger(__name__)


class CheckpointMixin(_Base):
    """Saves, loads and resets the state of the method and the objective, with the number of passes."""

    captured: Captured | None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Not in train(): with auto_find_batch_size a training starts over when memory runs out.
        self._load_states({"method": {}, "objective": {}, "forwards": 0, "backwards": 0})
        return super()._inner_training_loop(*args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._loss_filter.original_arguments(self.args):  # they are saved with the model
            super()._save(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        objective = getattr(self._objective, "state_dict", dict)
        state = {
            "type": type(self.method).__name__,
            "processes": self.args.world_size,
            "method": self.method.state_dict(),
            "objective": objective(),
            "forwards": self.forwards,
            "backwards": self.backwards,
            "last_finite": self._loss_filter.last,
            "largest_part": None if self.splitting is None else self.splitting.largest,
        }
        save_state(Path(output_dir), self._state_name(), state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        name, world = type(self.method).__name__, self.args.world_size
        state = load_state(Path(checkpoint), self._state_name(), self.args.device)
        if state is None:
            # The file names depend on the number of processes: look for a checkpoint of another number.
            names = ("method_state", "method_state_0")
            others = (load_state(Path(checkpoint), each, self.args.device) or {} for each in names)
            state = next((each for each in others if each.get("processes", world) != world), {"type": "no method"})
        if state["type"] != name:
            _log.warning("%s holds the state of %s; %s starts without state", checkpoint, state["type"], name)
        elif (saved := state.get("processes", world)) != world:  # the state depends on the data or shards of a process
            _log.warning("%s is from %d processes, not %d; %s starts without state", checkpoint, saved, world, name)
        else:
            self._load_states(state)

    def _load_states(self, state: dict[str, Any]) -> None:
        self.method.load_state_dict(state["method"])
        if hasattr(self._objective, "load_state_dict"):
            load_objective(self._objective, state["objective"])
        self.forwards, self.backwards = state["forwards"], state["backwards"]
        if self.captured is not None:  # the recorded steps use the old state
            self.captured = Captured(self.method)
        if self.splitting is not None:
            self.splitting.largest = state.get("largest_part")  # missing in older checkpoints
        self._loss_filter.last = state.get("last_finite")  # missing in older checkpoints
        self._step_metrics = StepMetrics()

    def _state_name(self) -> str:
        # The processes see different data, so their methods may store different gradients.
        return "method_state" if self.args.world_size == 1 else f"method_state_{self.args.process_index}"
