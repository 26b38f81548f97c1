"""``deltasam check``: whether the results of runs can be shared and compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._output import plain_table, wide_console
from deltasam.lab.cli._run_folders import check_folders


@dataclass(frozen=True, kw_only=True)
class Check:
    """Checks the result.json of every run, also of other programs, and lists what they compare.

    Exits with 1 if a run breaks the format or could not be compared with others.

    Examples:
      deltasam check results/next-sam
    """

    folders: Positional[tuple[Path, ...]] = (Path("runs"),)
    """Run folders, or folders that contain some at any depth."""

    def run(self) -> int:
        """Prints one line per problem, then how many seeds every method has."""
        from deltasam.lab.report import read_runs, short_models
        from deltasam.lab.report.checks import check_runs
        from deltasam.step.names import pluralized

        check_folders(self.folders)
        found = check_runs(*self.folders)
        if not found:
            raise InputError(f"{', '.join(map(str, self.folders))}: no run folder; each holds a result.json")
        console = wide_console()
        bad = {place: problems for place, problems in found.items() if problems}
        for place, problems in bad.items():
            for problem in problems:
                console.print(f"{place}: {problem}", highlight=False, markup=False, soft_wrap=True)
        runs = read_runs(*self.folders).finished
        names = short_models({run.model for run in runs})
        seeds: dict[tuple[str, str, str], dict[int, set[int]]] = {}
        for run in runs:
            variants = seeds.setdefault((run.task, names[run.model], run.method), {})
            variants.setdefault(run.variant, set()).add(run.seed)
        table = plain_table("task", "model", "method", "settings", "seeds")
        for key, variants in sorted(seeds.items()):
            table.add_row(*key, str(len(variants)), _range(sorted(map(len, variants.values()))))
        console.print(table)
        console.print(f"{pluralized(len(found), 'run')}, {len(bad)} with problems", highlight=False)
        return 1 if bad else 0


def _range(counts: list[int]) -> str:
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]}-{counts[-1]}"
