"""``deltasam sweep``: trains all missing runs of a sweep file."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError, StoppedError, one_line_errors
from deltasam.lab.cli._output import warn_if_not_learned, wide_console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from deltasam.lab.cli._sweep_view import SweepView
    from deltasam.lab.sweeps import Outcome, Planned, Sweep


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """Trains all missing runs of a sweep file: setups x methods x grid x seeds. It can be stopped at any time.

    Finished runs are not repeated, interrupted ones continue from their last checkpoint. A failed run is retried once
    if that may help, then recorded under failures/; the other runs continue. Two processes on the same folder share
    the work.

    Examples:
      deltasam sweep configs/sweeps/quick.yaml
      deltasam sweep configs/sweeps/glue-bert-base.yaml --jobs 4 --data ../data
      deltasam sweep configs/sweeps/glue-bert-base.yaml --backend ray --gpus 0.5
    """

    file: Positional[Path]
    """The sweep file, or the name of an included one, such as glue-bert-base."""

    output: Path | None = None
    """Folder for the run folders. Defaults to runs/<name of the file>."""

    jobs: int | None = None
    """Number of concurrent runs. Defaults to one per GPU, or one per four cores. Further runs share the GPUs."""

    backend: str = "local"
    """`local` (this machine), `ray` (the cluster of this machine; pip install 'deltasam[cluster]'), or its address."""

    gpus: float | None = None
    """With Ray: GPUs per run, such as 0.5. Defaults to one if the cluster has any."""

    cpus: float = 1.0
    """With Ray: cores per run."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz. Defaults to the variable DELTASAM_DATA, then to the hub."""

    dry_run: bool = False
    """List the runs without training."""

    def run(self) -> int:
        """Runs the sweep."""
        from deltasam.lab.cli._sweep_view import SweepView, summary
        from deltasam.lab.sweeps import final_runs, read_sweep, tuning_runs

        console = wide_console()
        with one_line_errors():
            sweep = read_sweep(self._find())
            if self.dry_run:
                return list_runs([*tuning_runs(sweep), *final_runs(sweep, {})], self.folder, console)
            stop_on_sigterm()
            try:
                with SweepView(console) as view:
                    outcome = self._run(sweep, view)
            except KeyboardInterrupt as error:
                raise StoppedError("stopped; finished runs are kept, and the same command continues") from error
        summary(outcome, console)
        console.print(f"Run folders: {self.folder}", highlight=False)
        warn_if_not_learned([self.folder / planned.config.run_name for planned, _ in outcome.results], console)
        return 1 if outcome.failed else 0

    @property
    def folder(self) -> Path:
        """The folder of the run folders."""
        return self.output or Path("runs") / self.file.stem

    def _run(self, sweep: Sweep, view: SweepView) -> Outcome:
        from deltasam.lab.sweeps import LocalPool, RayPool, run_sweep

        if self.jobs is not None and self.jobs < 1:
            raise InputError(f"--jobs {self.jobs}: must be at least 1")
        pool: LocalPool | RayPool
        if self.backend == "local":
            pool = LocalPool.find(self.jobs)
        else:
            pool = RayPool(address="auto" if self.backend == "ray" else self.backend, gpus=self.gpus, cpus=self.cpus)
        return run_sweep(
            sweep,
            self.folder.resolve(),
            pool,
            data=None if self.data is None else str(self.data.resolve()),
            watch=view.watch,
            announce=lambda runs: view.announce(runs, known_values(runs, self.folder)),
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
        hint = "" if self.file.suffix else f", and no included sweep of this name; {suggest(str(self.file), packaged)}"
        raise InputError(f"{self.file}: there is no such file{hint}")


def known_values(runs: Sequence[Planned], folder: Path) -> dict[str, float]:
    """Returns the values of the finished runs by name."""
    from deltasam.lab.experiments import Result

    paths = {planned.config.run_name: folder / planned.config.run_name / "result.json" for planned in runs}
    return {name: Result.read(path).primary_value for name, path in paths.items() if path.is_file()}


def list_runs(
    runs: Sequence[Planned], folder: Path, console: Console, describe: Callable[[Planned], str] | None = None
) -> int:
    """Lists the runs, finished or not, each with its description: by default its point of the grid."""
    from deltasam.lab.experiments import ConfigError, Result
    from deltasam.step.names import pluralized

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
        what = " ".join(f"{k}={v}" for k, v in planned.point) if describe is None else describe(planned)
        console.print(f"{mark}  {name}  {what}", highlight=False)
    console.print(pluralized(len(runs), "run"), highlight=False)
    return 0


def stop_on_sigterm() -> None:
    """Treats SIGTERM, which batch systems send, like Ctrl-C, so that the processes shut down in order."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
