"""The sections of docs/results.md on self-supervised STS (the paper's Table 2) and on summarization (Table 3)."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

from deltasam.lab.report import Run, method_name, paper, read_runs

common = runpy.run_path(str(Path(__file__).with_name("results_common.py")))
table, with_interval, order = (common[name] for name in ("table", "with_interval", "order"))

SETS = {"sts12": "STS12", "sts13": "STS13", "sts14": "STS14", "sts15": "STS15", "sts16": "STS16", "stsb": "STS-B",
        "sickr": "SICK-R"}  # fmt: skip
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeLsum": "ROUGE-L"}

STS = """Mirror-BERT on the raw encoder: {updates} updates, batch 200, learning rate {lr:g}, mean pooling without
padding. Spearman correlation times 100 on the seven test sets, mean over the seeds. *Random noise* is what the paper
calls R3F here. The radius, and FreeLB's step, are chosen with one seed on STS-B's development set, where the paper
chooses them, too. The paper's averages are those of Mirror-BERT-base, which starts from another model, means of
five seeds."""

STS_COMMANDS = """    deltasam sweep configs/sweeps/evidence/sts.yaml --output results/sts
    deltasam sweep configs/sweeps/evidence/sts-untrained.yaml --output results/sts"""

SUMMARIZATION = """**Small**: a title writer of flan-t5-small's shape (77M parameters; its ancestor has seen
CNN/DailyMail), trained for {steps} updates on {train} articles, evaluated on {rows} of the validation set by beam
search. Nothing is tuned: one learning rate for all, the paper's rho and eta. ROUGE times 100, mean over the seeds; the
paper's figures are those of BART-large on the whole data."""


def points(run: Run, metric: str) -> float:
    """A metric in points."""
    return 100 * run.metrics[metric]


def sts_section(results: Path) -> str:
    """Seven test sets and their average, with the difference to plain Mirror-BERT."""
    runs = read_runs(results / "sts").finished
    finals = [run for run in runs if run.split == "test"]
    if not finals:
        return ""
    untrained = [run for run in finals if dict(run.settings)["lr"] == 0]
    chosen = common["chosen_points"]([run for run in runs if run.split == "validation"])
    methods = {
        method: common["once"]([
            run for run in finals
            if run.method == method and run not in untrained
            and run.settings == chosen.get((run.task, method), run.settings)
        ])
        for method in sorted({run.method for run in finals}, key=order)
    }  # fmt: skip
    methods = {method: found for method, found in methods.items() if found}
    theirs = paper.STS.figures["Mirror-BERT-base"]
    rows = [sts_row("without training", "", untrained[:1], "-")] if untrained else []
    for method, found in methods.items():
        average = theirs.get(method, {}).get("avg")
        name = "Mirror-BERT" if method == "ERM" else method_name(method)
        rows.append(sts_row(name, setting(found[0]), found, "-" if average is None else f"{average:.2f}"))
    head = ["method", "setting", "seeds", "average", *SETS.values(), "paper: average"]
    # Without runs that were trained there is nothing to compare.
    pairs = [(method, "ERM") for method in methods if method != "ERM"]
    pairs += [("DeltaSAM", "SAM"), ("DeltaSAM(RandomWeights)", "SAM"), ("DeltaSAM(RandomWeights)", "DeltaSAM")]
    pairs += [("DeltaSAM+EmbeddingNoise", "SAM+EmbeddingNoise")]
    tests = common["difference_table"](
        {"average": (methods, common["primary"]), "STS-B": (methods, lambda run: points(run, "stsb"))}, pairs
    ).replace("- ERM |", "- Mirror-BERT |")
    some = next(iter(methods.values()), untrained)[0]
    facts = {"updates": some.steps, "lr": dict(some.settings)["lr"]}
    return "\n\n".join(
        filter(None, ["## Self-supervised STS", STS.format(**facts), STS_COMMANDS, table(head, rows), tests,
                      common["HOLM"] + " " + FEW if tests else ""])
    )  # fmt: skip


FEW = "With five seeds no p before the correction is below 0.06."


def sts_row(name: str, chosen: str, runs: Sequence[Run], known: str) -> list[str]:
    """One row of the table."""
    sets = [f"{sum(points(run, each) for run in runs) / len(runs):.2f}" for each in SETS]
    return [name, chosen, str(len(runs)), with_interval([common["primary"](run) for run in runs], 2), *sets, known]


def setting(run: Run) -> str:
    """What was chosen for a method."""
    found = dict(run.settings)
    return next((f"{name} = {found[name]:g}" for name in ("rho", "adv_lr") if name in found), "")


def summarization_section(results: Path) -> str:
    """ROUGE with intervals, and the differences to plain training."""
    runs = [run for run in read_runs(results / "summarization").finished if "rouge1" in run.metrics]
    untrained = [run for run in runs if dict(run.settings)["lr"] == 0]
    runs = [run for run in runs if run not in untrained]
    if not runs:
        return ""
    methods = {
        method: common["once"]([run for run in runs if run.method == method])
        for method in sorted({run.method for run in runs}, key=order)
    }
    theirs = paper.SUMMARIZATION.figures["BART-large"]
    named = [("without training", "", untrained[:1])] if untrained else []
    named += [(method_name(method), method, found) for method, found in methods.items()]
    rows = []
    for name, method, found in named:
        known = theirs.get(method, {})
        rows.append([
            name, setting(found[0]), str(len(found)),
            *(with_interval([points(run, metric) for run in found], 2) for metric in ROUGES),
            f"{sum(run.metrics['words'] for run in found) / len(found):.0f}",
            " / ".join(f"{known[metric]:.2f}" for metric in ROUGES) if known else "-",
        ])  # fmt: skip
    head = ["method", "setting", "seeds", *ROUGES.values(), "words", "paper: ROUGE-1 / 2 / L"]
    columns = {ROUGES[m]: (methods, lambda run, m=m: points(run, m)) for m in ROUGES}
    pairs = [(method, "ERM") for method in methods if method != "ERM"] + [("DeltaSAM", "SAM")]
    tests = common["difference_table"](columns, pairs)
    first = runs[0]
    given = common["result"](first)
    facts = {"steps": first.steps, "train": given["train_rows"], "rows": given["eval_rows"]}
    return "\n\n".join(
        filter(None, [
            "## Summarization",
            SUMMARIZATION.format(**facts),
            "    deltasam sweep configs/sweeps/evidence/summarization.yaml --output results/summarization",
            table(head, rows),
            tests,
            common["HOLM"] + " With three seeds no p before the correction is below 0.25." if tests else "",
        ])
    )  # fmt: skip
