"""``deltasam search radius``: trains with several radii and chooses one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from deltasam.lab.cli._errors import CommandError, InputError, StoppedError, one_line_errors
from deltasam.lab.cli._output import plain_table, print_note, wide_console, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from deltasam.lab.experiments import Result, RunConfig
    from deltasam.lab.sweeps import Outcome, Planned, RadiusChoice, Sweep

RESULT = "radius.json"


@dataclass(frozen=True, kw_only=True)
class SearchRadius:
    """Chooses rho: trains plainly and with each radius, and evaluates on the end of the training split.

    The run is described as for `deltasam train`. The evaluation split of the task is not used, so the result there
    stays unbiased. The smallest radius within one standard error of the best mean is chosen. You can stop the command
    and start it again at any time; finished runs are not repeated. More --radii or --seeds add runs.

    Examples:
      deltasam search radius --task mrpc --model minilm-l6
      deltasam search radius --preset small/rte --method per-instance-sam --radii 0.001 0.002 0.005 0.01 --seeds 5
    """

    settings: Positional[tuple[str, ...]] = ()
    """Settings of the run as section.option=value. Values are YAML."""

    preset: str | None = None
    """Name of a preset, see `deltasam list presets`."""

    task: str | None = None
    """Name of the task, see `deltasam list tasks`."""

    model: str | None = None
    """The model: a folder, a name on the hub, or minilm-l6 or smollm2-135m (included in packages, no download)."""

    method: str | None = None
    """Name of the method, see `deltasam list methods`. Defaults to the preset's, or SAM."""

    radii: tuple[float, ...] = (0.002, 0.005, 0.01, 0.02, 0.05)
    """Values of rho."""

    seeds: int = 2
    """Number of seeds per radius. The first one is the seed of the run (42, or seed=...)."""

    holdout: float = 0.1
    """Share of the training split, at its end, that is evaluated on instead of trained on."""

    output: Path | None = None
    """Folder for the run folders and radius.json. Defaults to runs/radius-<task>-<model>-<method>."""

    jobs: int | None = None
    """Number of concurrent runs. Defaults to one per GPU, or one per four cores. Further runs share the GPUs."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz. Defaults to the variable DELTASAM_DATA, then to the hub."""

    dry_run: bool = False
    """List the runs without training."""

    @staticmethod
    def setting_hint(name: str) -> str:
        """Returns "did you mean section.option?" for a name that is not an option, or an empty string."""
        from deltasam.lab.experiments import option_hint

        return option_hint(name, {})

    def run(self) -> int:
        """Trains, and prints the choice."""
        from deltasam.lab.cli._sweep_view import SweepView
        from deltasam.lab.cli.sweep import list_runs, stop_on_sigterm
        from deltasam.lab.sweeps import final_runs, radius_sweep

        if self.jobs is not None and self.jobs < 1:
            raise InputError(f"--jobs {self.jobs}: must be at least 1")
        console = wide_console()
        with one_line_errors():
            config = self.resolve()
            sweep = radius_sweep(config, self.radii, seeds=self.seeds, holdout=self.holdout)
            folder = self.output or Path("runs") / f"radius-{config.run_name.rsplit('-', 2)[0]}"
            if self.dry_run:
                return list_runs(final_runs(sweep, {}), folder, console, lambda planned: planned.method)
            stop_on_sigterm()
            try:
                with SweepView(console) as view:
                    outcome = self._train(sweep, folder, view)
            except KeyboardInterrupt as error:
                raise StoppedError("stopped; finished runs are kept, and the same command continues") from error
        for name, error_text in outcome.failed.items():
            console.print(f"failed: {name}: {error_text}", highlight=False, style="red")
        found = found_scores(outcome.results)
        scores = {rho: list(by_seed.values()) for rho, by_seed in found.items() if _is_complete(by_seed, sweep.seeds)}
        console.print(scores_table(found, scores, outcome.results))
        if 0.0 not in scores or len(scores) < 2:
            missing = "plain training" if 0.0 not in scores else "every radius"
            raise CommandError(f"{missing} failed or diverged, so no radius can be chosen; see {folder / 'failures'}")
        first = outcome.results[0][1]
        choice = _choose(scores, first)
        self._write(folder, config, sweep, found, choice, first)
        console.print(f"\nRun folders and {RESULT}: {folder}", highlight=False)
        console.print(verdict(choice, scores), highlight=False)
        return 1 if outcome.failed else 0

    def resolve(self) -> RunConfig:
        """Returns the run that the options describe."""
        from deltasam.lab.experiments import resolve
        from deltasam.methods import ERM

        options = {"task": self.task, "model": self.model}
        options["data"] = str(self.data.resolve()) if self.data is not None else None

        def with_method(method: str | None, note: Any = lambda text: None) -> RunConfig:
            return resolve(preset=self.preset, method=method, options=options, settings=self.settings, note=note)

        config = with_method(self.method, print_note)
        return with_method("sam") if self.method is None and isinstance(config.method, ERM) else config

    def _train(self, sweep: Sweep, folder: Path, view: Any) -> Outcome:
        from deltasam.lab.cli.sweep import known_values
        from deltasam.lab.sweeps import LocalPool, run_sweep

        return run_sweep(
            sweep,
            folder.resolve(),
            LocalPool.find(self.jobs),
            watch=view.watch,
            announce=lambda runs: view.announce(runs, known_values(runs, folder)),
        )

    def _write(
        self,
        folder: Path,
        config: RunConfig,
        sweep: Sweep,
        found: Mapping[float, Mapping[int, float]],
        choice: RadiusChoice,
        first: Result,
    ) -> None:
        from deltasam.lab.cli._output import without_nan

        content = {
            "task": config.task.name,
            "model": config.model.path,
            "method": type(config.method).__name__,
            "metric": first.primary_metric,
            "higher_is_better": first.higher_is_better,
            "holdout": self.holdout,
            "seeds": list(sweep.seeds),
            "scores": [
                {"rho": rho, "values": {str(seed): value for seed, value in by_seed.items()}}
                for rho, by_seed in found.items()
            ],
            "choice": vars(choice),
            "settings": settings_of(choice),
        }
        write_file(folder / RESULT, json.dumps(without_nan(content), indent=1) + "\n")


def found_scores(results: Sequence[tuple[Planned, Result]]) -> dict[float, dict[int, float]]:
    """Returns the scores by radius (0: plain training) and seed; nan where a run diverged."""
    from deltasam.lab.sweeps import PLAIN

    found: dict[float, dict[int, float]] = {}
    for planned, result in results:
        rho = 0.0 if planned.method == PLAIN else float(planned.config.method.rho)  # type: ignore[attr-defined]
        found.setdefault(rho, {})[planned.config.seed] = result.score
    return dict(sorted(found.items()))


def _is_complete(by_seed: Mapping[int, float], seeds: Sequence[int]) -> bool:
    return set(by_seed) == set(seeds) and all(map(math.isfinite, by_seed.values()))


def _choose(scores: Mapping[float, Sequence[float]], first: Result) -> RadiusChoice:
    from deltasam.lab.sweeps import choose_radius

    return choose_radius(scores, higher_is_better=first.higher_is_better)


def scores_table(
    found: Mapping[float, Mapping[int, float]],
    scores: Mapping[float, Sequence[float]],
    results: Sequence[tuple[Planned, Result]],
) -> Table:
    """Returns the table: mean of every radius, and its difference to plain training with the paired interval."""
    from deltasam.lab.report import bootstrap_interval

    metric = results[0][1].primary_metric if results else "mean"
    table = plain_table("rho", "seeds", metric, "difference to plain", "95% interval")
    for column in table.columns:
        column.justify = "right"
    for rho, by_seed in found.items():
        name = f"{rho:g}" if rho else "plain"
        if rho not in scores:
            table.add_row(name, str(len(by_seed)), "incomplete or diverged", "", "")
            continue
        own, plain = scores[rho], scores.get(0.0)
        difference = interval = ""
        if rho and plain is not None:
            pairs = [a - b for a, b in zip(own, plain, strict=True)]
            difference = f"{fmean(pairs):+.4f}"
            if len(pairs) > 1:
                low, high = bootstrap_interval(pairs)
                interval = f"[{low:+.4f}, {high:+.4f}]"
        table.add_row(name, str(len(own)), f"{fmean(own):.4f}", difference, interval)
    return table


def settings_of(choice: RadiusChoice) -> str:
    """Returns the settings of the choice for a command line."""
    return f"method.rho={choice.rho:g}" if choice.rho else "method=ERM"


def verdict(choice: RadiusChoice, scores: Mapping[float, Sequence[float]]) -> str:
    """Returns the choice, how sure it is, and the settings to use, in one line."""
    if not choice.rho:
        what = "Plain training is best: no radius has a better mean"
    elif choice.rho == choice.best:
        what = f"rho = {choice.rho:g} is best"
    else:
        what = f"rho = {choice.rho:g}, the smallest radius within one standard error of the best ({choice.best:g})"
    if choice.rho and choice.rho == max(scores):
        what += ", and the largest that was tried"
    if choice.beats_others is None:
        sure = "with 1 seed, nothing can be said about how sure this is"
    else:
        plain = "" if choice.beats_plain is None else f"plain training in {choice.beats_plain:.0%} and "
        others = "all radii" if choice.beats_plain is None else "all others"
        sure = (
            f"it beats {plain}{others} in {choice.beats_others:.0%} of {choice.resamples} resamples of "
            f"{choice.seeds} seeds"
        )
    return f"{what}; {sure}. Settings: {settings_of(choice)}"
