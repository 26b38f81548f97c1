"""``deltasam sweep``: all runs of a sweep file that are missing."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError, StoppedError
from deltasam.lab.cli._runs import bad_input, wide_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from deltasam.lab.cli._sweep_view import SweepView
    from deltasam.lab.sweeps import Outcome, Planned, Sweep


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """Runs what is missing of a sweep file: setups x methods x grid x seeds. Stop it at any time and call it again.

    Finished runs are not repeated, interrupted ones go on from their last checkpoint. A failed run is tried once more
    where that may help, and then recorded under failures/; the others go on. Two calls on the same folder share the
    work.

    Examples:
      deltasam sweep configs/sweeps/quick.yaml
      deltasam sweep configs/sweeps/glue-bert-base.yaml --jobs 4 --data ../data
      deltasam sweep configs/sweeps/glue-bert-base.yaml --on ray --gpus 0.5
    """

    file: Positional[Path]
    """The sweep file; a bare name such as glue-bert-base is looked for among the ones that come along."""

    output: Path | None = None
    """Folder of the run folders; by default runs/<name of the file>."""

    jobs: int | None = None
    """Runs at a time; by default one per GPU, or one per four cores. More than GPUs share them."""

    on: str = "local"
    """Where: this machine, or a Ray cluster: `ray` for the one this machine belongs to, or its address."""

    gpus: float | None = None
    """On Ray: GPUs of a run, such as 0.5; by default one where the cluster has any."""

    cpus: float = 1.0
    """On Ray: cores of a run."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz; otherwise the variable DELTASAM_DATA, otherwise the hub."""

    show: bool = False
    """List the runs and stop."""

    @classmethod
    def arranged(cls, words: Sequence[str]) -> list[str]:
        """The words as they are.

        Raises:
            InputError: The folder of the runs is given by another name, to which tyro finds none that is alike.
        """
        for word in words:
            if (name := word.partition("=")[0]) in ("--runs", "--folder", "--run-folder", "--dir", "--to"):
                raise InputError(f"{name}: unknown option; did you mean --output?")
        return list(words)

    def run(self) -> int:
        """Runs the sweep."""
        from deltasam.lab.cli._sweep_view import SweepView, summary
        from deltasam.lab.sweeps import final_runs, read_sweep, tuning_runs

        console = wide_console()
        with bad_input():
            sweep = read_sweep(self._find())
            if self.show:
                return _list([*tuning_runs(sweep), *final_runs(sweep, {})], self.folder, console)
            _stop_on_sigterm()
            try:
                with SweepView(console) as view:
                    outcome = self._run(sweep, view)
            except KeyboardInterrupt as error:
                raise StoppedError("stopped; what is finished stays, and the same command goes on") from error
        summary(outcome, console)
        console.print(f"Run folders: {self.folder}", highlight=False)
        return 1 if outcome.failed else 0

    @property
    def folder(self) -> Path:
        """Folder of the run folders."""
        return self.output or Path("runs") / self.file.stem

    def _run(self, sweep: Sweep, view: SweepView) -> Outcome:
        from deltasam.lab.sweeps import LocalPool, RayPool, run_sweep

        if self.jobs is not None and self.jobs < 1:
            raise InputError(f"--jobs {self.jobs}: must be at least 1")
        pool: LocalPool | RayPool
        if self.on == "local":
            pool = LocalPool.find(self.jobs)
        else:
            pool = RayPool(address="auto" if self.on == "ray" else self.on, gpus=self.gpus, cpus=self.cpus)
        return run_sweep(
            sweep,
            self.folder.resolve(),
            pool,
            data=None if self.data is None else str(self.data.resolve()),
            watch=view.watch,
            announce=lambda runs: view.announce(runs, _known(runs, self.folder)),
        )

    def _find(self) -> Path:
        from deltasam.lab.experiments import preset_folder
        from deltasam.step.names import suggest

        if self.file.exists():
            return self.file
        folder = preset_folder() / "sweeps"
        packaged = {
            path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))
        }
        if str(self.file) in packaged:
            return packaged[str(self.file)]
        hint = (
            "" if self.file.suffix else f", and no sweep of this name comes along; {suggest(str(self.file), packaged)}"
        )
        raise InputError(f"{self.file}: there is no such file{hint}")


def _known(runs: Sequence[Planned], folder: Path) -> dict[str, float]:
    from deltasam.lab.experiments import Result

    paths = {planned.config.run_name: folder / planned.config.run_name / "result.json" for planned in runs}
    return {name: Result.read(path).primary_value for name, path in paths.items() if path.is_file()}


def _list(runs: list[Planned], folder: Path, console: Console) -> int:
    from deltasam.lab.experiments import ConfigError, Result
    from deltasam.step.names import counted

    for planned in runs:
        name = planned.config.run_name
        path, mark = folder / name / "result.json", "missing "
        if path.is_file():
            try:
                Result.read(path)
                mark = "finished"
            except ConfigError as error:
                mark = "damaged "
                print(f"deltasam sweep: {error}", file=sys.stderr)
        console.print(f"{mark}  {name}  {' '.join(f'{k}={v}' for k, v in planned.point)}", highlight=False)
    console.print(counted(len(runs), "run"), highlight=False)
    return 0


def _stop_on_sigterm() -> None:
    """A batch system ends a job by SIGTERM: the same as Ctrl-C, so that the processes are ended in order."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
