"""``deltasam compare``: several methods and seeds on your own files, then a table and a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError, StoppedError, one_line_errors
from deltasam.lab.cli._output import print_note, silence_libraries, wide_console
from deltasam.lab.cli.report import ReportCommand
from deltasam.lab.cli.sweep import known_values, list_runs, stop_on_sigterm
from deltasam.lab.cli.table import show_results

if TYPE_CHECKING:
    from deltasam.lab.experiments import RunConfig
    from deltasam.lab.sweeps import Outcome, Planned, Sweep


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Trains a model on your files with several methods and seeds, prints a table, and writes a report.

    Everything but the method and the seed is the same in all runs. A learning rate that is not set is chosen by the
    size of the model. Every method has its own default radius; `method.rho=0.01` sets one for all. You can stop the
    command and start it again; finished runs are not repeated, and more `--methods` or `--seeds` only add runs.

    Examples:
      deltasam compare --train reviews.csv --test more.csv --text review --label verdict
      deltasam compare --train a.csv --test b.csv --text first second --label same --model bert-base-cased
        --methods erm sam delta-sam --seeds 5 schedule.epochs=5 batch.size=16
    """

    settings: Positional[tuple[str, ...]] = ()
    """Settings of all runs as section.option=value. Values are YAML."""

    train: Path
    """File to train on: CSV, TSV, JSON Lines (also gzipped) or Parquet."""

    test: Path
    """File to evaluate on, with the same columns."""

    text: tuple[str, ...] = ("text",)
    """The column of the text, or the two columns of a pair."""

    label: str = "label"
    """The column of the label."""

    task: str = "classification"
    """classification or regression."""

    model: str = "minilm-l6"
    """The model: a folder, a name on the hub, or minilm-l6 (22M parameters, included in a package, no download)."""

    methods: tuple[str, ...] = ("erm", "sam", "per-instance")
    """The methods, see `deltasam list methods`. ERM is plain training, with which the others are compared."""

    seeds: int = 3
    """Number of seeds per method: 1, 2, ..."""

    output: Path | None = None
    """Folder for the run folders and report.html. Defaults to runs/compare-<name of the training file>."""

    jobs: int | None = None
    """Number of concurrent runs. Defaults to one per GPU, or one per four cores. Further runs share the GPUs."""

    keep: Literal["results", "weights", "checkpoints"] = "weights"
    """What to keep of each finished run: results only, the final weights too, or also the checkpoints."""

    dry_run: bool = False
    """List the runs without training."""

    @staticmethod
    def setting_hint(name: str) -> str:
        """Returns "did you mean section.option?" for a name that is not an option, or an empty string."""
        from deltasam.lab.experiments import option_hint

        return option_hint(name, {})

    @property
    def folder(self) -> Path:
        """The folder of the run folders."""
        return self.output or Path("runs") / f"compare-{self.train.name.partition('.')[0]}"

    def run(self) -> int:
        """Trains, and prints the table."""
        from deltasam.lab.experiments import prepare
        from deltasam.lab.sweeps import final_runs

        if not self.methods:
            raise InputError("--methods: name at least one, see `deltasam list methods`")
        if self.seeds < 1 or (self.jobs is not None and self.jobs < 1):
            name, value = ("seeds", self.seeds) if self.seeds < 1 else ("jobs", self.jobs)
            raise InputError(f"--{name} {value}: must be at least 1")
        console = wide_console()
        with one_line_errors():
            sweep = self.sweep()
            runs = final_runs(sweep, {})
            if self.dry_run:
                return list_runs(runs, self.folder, console)
            silence_libraries()
            for planned in runs[:: self.seeds]:  # one per method: mistakes are reported before any training
                prepare(planned.config)
            names = ", ".join(_with_radius(planned.config) for planned in runs[:: self.seeds])
            console.print(f"{len(runs)} runs: {names}; seeds 1 to {self.seeds}", highlight=False)
            stop_on_sigterm()
            try:
                outcome = self._train(sweep)
            except KeyboardInterrupt as error:
                raise StoppedError("stopped; finished runs are kept, and the same command continues") from error
        self._show(runs)
        for name, failure in outcome.failed.items():
            console.print(f"failed: {name}: {failure}", highlight=False, style="red")
        return 1 if outcome.failed else 0

    def sweep(self) -> Sweep:
        """Returns the runs as a sweep."""
        from deltasam.lab.experiments import resolve
        from deltasam.lab.sweeps import Sweep

        sections: dict[str, dict[str, Any]] = {}
        for name in self.methods:
            kind, settings = self._of_method(name)
            files = {"train": str(self.train), "validation": str(self.test)}
            task = {"name": self.task, "files": files, "text": list(self.text), "label": self.label}
            note = print_note if not sections else lambda text: None
            options = {"task": task, "model": self.model}
            config = resolve(method=kind, options=options, settings=settings, note=note)
            found = config.to_plain()
            if found.pop("seed") != type(config).seed:
                raise InputError("seed=...: the seeds are 1, 2, ...; set their number by --seeds")
            sections["+".join(config.arm)] = found
        first = next(iter(sections.values()))
        parts = {name: {"method": each["method"]} for name, each in sections.items()}
        common = {key: value for key, value in first.items() if key not in ("task", "model", "method")}
        return Sweep(
            name="compare",
            tasks=(first["task"],),
            models=(first["model"],),
            methods=parts,
            common=common,
            seeds=tuple(range(1, self.seeds + 1)),
            keep=self.keep,
        )

    def _of_method(self, name: str) -> tuple[str, list[str]]:
        """The name of the class, and the settings without those of `method` that this method does not have."""
        from deltasam.lab.catalogue import METHODS, find_method
        from deltasam.lab.experiments.plain import option_types

        try:
            kinds = {each: find_method(each) for each in self.methods}
        except ValueError as error:
            raise InputError(f"--methods: {error}") from error
        others = {option for kind in kinds.values() for option in option_types(kind)} - set(option_types(kinds[name]))
        kept = [each for each in self.settings if each.partition("=")[0] not in {f"method.{one}" for one in others}]
        return next(key for key, kind in METHODS.items() if kind is kinds[name]), kept

    def _train(self, sweep: Sweep) -> Outcome:
        from deltasam.lab.cli._sweep_view import SweepView
        from deltasam.lab.sweeps import LocalPool, run_sweep

        with SweepView(wide_console()) as view:

            def announce(runs: Any) -> None:
                view.announce(runs, known_values(runs, self.folder))

            pool = LocalPool.find(self.jobs)
            return run_sweep(sweep, self.folder.resolve(), pool, watch=view.watch, announce=announce)

    def _show(self, planned: list[Planned]) -> None:
        """Prints the table of these runs, and writes the report of the folder."""
        from deltasam.lab.report import read_runs, result_tables

        places = [self.folder / each.config.run_name for each in planned]
        found = read_runs(*(place for place in places if place.is_dir()))
        print()
        show_results(result_tables(found), found.problems())
        if found.finished:
            print()
            title = f"{', '.join(dict.fromkeys(run.task for run in found.finished))}: {self.train.name}"
            ReportCommand(folders=(self.folder,), output=self.folder / "report.html", title=title).run()


def _with_radius(config: RunConfig) -> str:
    rho = getattr(config.method, "rho", None)
    return "+".join(config.arm) + (f" (rho {rho})" if rho is not None else "")
