"""What is generated: the name of each file of ``docs/_generated``, its data and its statistic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from deltasam.lab.pages import (
    base,
    calibration,
    directions,
    figures,
    frontier,
    llm,
    lora,
    measurements,
    plan,
    radius,
    rounding,
    runs,
    shift,
    speed_costs,
    speed_growth,
    speed_tables,
    speed_targets,
    stress,
)
from deltasam.lab.pages.answers import answers
from deltasam.lab.pages.measurements import COSINE_PAIRS, named, weight_lines
from deltasam.lab.pages.runs import SETS, Selection, by_metric, finals, row_name, scores, trained
from deltasam.lab.pages.selections import (
    ETA,
    FIRST_ALL,
    GLUE,
    LARGER,
    LARGER_TUNED,
    SECOND,
    SECOND_ALL,
    SECOND_TUNED,
    SMALL,
)
from deltasam.lab.pages.statistics import (
    Pairs,
    batch_mean,
    cell_table,
    differences,
    geometric_mean,
    means,
    median_and_best,
    pooled,
)
from deltasam.lab.report import method_name, paper

MRPC = {"weights": "{} updates"}
MRPC_MORE = {**MRPC, "instance-weights": "{} updates, 512 rows"}
COLA = {"instance-weights-cola": "{} updates", "instance-weights-base": "base size, {} updates"}

DIRECTIONAL, OWN, LOSS, SHUFFLED = (
    f"DeltaSAM({name})" for name in ("Directional", "OwnGradient", "LossWeights", "RandomWeights")
)
REGULARISED = ("ERM+RDrop", "FreeLB", "ERM+SMART", "ERM+R3F")
WEIGHTED = ("DeltaSAM", DIRECTIONAL, LOSS, OWN, SHUFFLED, "PerInstanceSAM")
SPECIAL = ("", ", twice as long", ", rho = 0.02", ", rho = 0.01")
RISKS = ("SAM", "DeltaSAM", DIRECTIONAL, OWN, SHUFFLED, *(f"PerInstanceSAM{special}" for special in SPECIAL))
RADII = ("SAM", "DeltaSAM", LOSS, "PerInstanceSAM")
NOISY = ("ERM+EmbeddingNoise", "SAM+EmbeddingNoise", "DeltaSAM+EmbeddingNoise")


def against(second: str, methods: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of several methods with one other."""
    return [(method, second) for method in methods]


PAIRS = [
    *against("ERM", (*REGULARISED, "SAM", *WEIGHTED)),
    *against("SAM", WEIGHTED),
    *against("DeltaSAM", WEIGHTED[1:]),
]
POOLED_PAIRS = [
    *against("ERM", (*REGULARISED, "SAM", "DeltaSAM", "PerInstanceSAM")),
    *against("SAM", ("DeltaSAM", DIRECTIONAL, OWN, LOSS, SHUFFLED, "PerInstanceSAM")),
    *against("DeltaSAM", (LOSS, SHUFFLED)),
]
RISK_PAIRS = [*against("ERM", RISKS), *against("SAM", RISKS[1:]), *against("DeltaSAM", RISKS[2:])]
RADIUS_PAIRS = [*against("ERM", RADII), *against("SAM", RADII[1:]), (LOSS, "DeltaSAM")]
STS_PAIRS = [
    *against("ERM", ("FreeLB", NOISY[0], "SAM", "DeltaSAM", SHUFFLED, *NOISY[1:])),
    *against("SAM", ("DeltaSAM", SHUFFLED)),
    (SHUFFLED, "DeltaSAM"),
    (NOISY[2], NOISY[1]),
]
ROUGE_PAIRS = [*against("ERM", ("ERM+RDrop", "ERM+R3F", "SAM", "DeltaSAM")), ("DeltaSAM", "SAM")]
ETA_PAIRS = [(f"DeltaSAM{ETA.method_suffix}", second) for second in ("DeltaSAM", "SAM", "ERM")]

STS_PAPER = {method: f"{row['avg']:.2f}" for method, row in paper.STS.figures["Mirror-BERT-base"].items()}
ROUGE_PAPER = {
    method: " / ".join(f"{row[metric]:.2f}" for metric in paper.ROUGE)
    for method, row in paper.SUMMARIZATION.figures["BART-large"].items()
}


def weights(results: Path, folders: dict[str, str], field: str, cell: Callable[..., str] = batch_mean) -> str:
    """A table of one quantity of delta-SAM's weights."""
    head = {"spearman": "estimator | changed", "snr": "estimator | changed", "median": "estimator | computed in",
            "ideal": "estimator | computed in"}.get(field, "method")  # fmt: skip
    return cell_table(weight_lines(results, folders, field), cell, head, named)


def cosine_differences(results: Path, folders: dict[str, str]) -> str:
    """Differences of the cosines with the exact update."""
    frame = weight_lines(results, folders, "regulariser")
    return differences(frame, COSINE_PAIRS, "difference of cos(dR/dw, dR_inst/dw)", named, test=False)


def gain(results: Path, fixed: Selection, tuned: Selection) -> str:
    """The score at the setting chosen on the task minus the one at the fixed setting; 0 if the two are the same."""
    methods = [method for method in finals(results, tuned)["method"].unique() if method != "ERM"]
    frame = scores(results, fixed, dataclasses.replace(tuned, method_suffix=", chosen"))
    return differences(frame, [(f"{method}, chosen", method) for method in methods], label=row_name, test=False)


def mirror_name(method: str) -> str:
    """Plain training on this task is Mirror-BERT."""
    return "Mirror-BERT" if method == "ERM" else method_name(method)


def tuned_pairs(results: Path) -> Pairs:
    """The pairs of the methods that chose a radius on the larger tasks."""
    known = set(finals(results, LARGER_TUNED)["method"])
    return [pair for pair in POOLED_PAIRS if known.issuperset(pair)]


def of_each(what: str, make: Callable[..., str], *names: str) -> dict[str, Callable[[Path], str]]:
    """One kind of table for several selections."""
    return {f"{name}-{what}.md": partial(make, selection=GLUE[name]) for name in names}


CONTENTS: dict[str, Callable[[Path], str]] = {
    "risk-mrpc.md": lambda r: runs.risk_table(r, "mrpc"),
    "risk-mrpc-differences.md": lambda r: differences(runs.risk(r, "mrpc"), RISK_PAIRS, label=row_name),
    "risk-rte.md": lambda r: runs.risk_table(r, "rte"),
    "risk-rte-differences.md": lambda r: differences(runs.risk(r, "rte"), RISK_PAIRS, label=row_name),
    # delta-SAM's weights
    "weights.svg": lambda r: figures.weights(weight_lines(r, MRPC, "spearman"), named),
    "weights-repeat.md": lambda r: weights(r, MRPC_MORE, "spearman"),
    "weights-snr.md": lambda r: weights(r, MRPC, "snr", geometric_mean),
    "weights-median.md": lambda r: weights(r, MRPC, "median", lambda v: f"{np.mean(v):.1e}"),
    "weights-ideal.md": lambda r: weights(r, MRPC_MORE, "ideal"),
    "weights-cosines.md": lambda r: weights(r, MRPC, "regulariser"),
    "weights-cosines-whole.md": lambda r: weights(r, MRPC, "update"),
    "weights-cosine-differences.md": lambda r: cosine_differences(r, MRPC),
    "weights-cola-repeat.md": lambda r: weights(r, COLA, "spearman"),
    "weights-cola-ideal.md": lambda r: weights(r, COLA, "ideal"),
    "weights-cola-cosines.md": lambda r: weights(r, COLA, "regulariser"),
    "weights-cola-cosines-whole.md": lambda r: weights(r, COLA, "update"),
    "weights-cola-cosine-differences.md": lambda r: cosine_differences(r, COLA),
    "weights-by-label.md": measurements.by_label,
    "weights-eta.md": measurements.eta_floor,
    # GLUE
    **of_each("scores", lambda r, selection: means(scores(r, selection)), *GLUE),
    **of_each("differences", lambda r, selection: differences(scores(r, selection), PAIRS), *GLUE),
    **of_each("medians", lambda r, selection: cell_table(scores(r, selection), median_and_best), "glue", "larger"),
    **of_each("paper-protocol", runs.paper_protocol, "glue", "larger"),
    **of_each("grid", runs.grid, "glue", "larger", "second"),
    "eta-grid.md": lambda r: runs.grid(r, ETA),
    "glue.svg": lambda r: figures.above_plain(scores(r, SMALL)),
    "eta-moves.md": lambda r: means(runs.eta_moves(r), 2, "eta", str),
    "eta-differences.md": lambda r: differences(scores(r, SMALL, ETA), ETA_PAIRS, label=row_name),
    "radius-scores.md": lambda r: means(runs.radii(r)),
    "radius.svg": lambda r: figures.radii(runs.radii(r)),
    "radius-differences.md": lambda r: differences(runs.radii(r), RADIUS_PAIRS),
    "larger.svg": lambda r: figures.above_plain(scores(r, LARGER)),
    "larger-gain.md": lambda r: gain(r, LARGER, LARGER_TUNED),
    "second-gain.md": lambda r: gain(r, SECOND, SECOND_TUNED),
    "pooled.svg": lambda r: figures.pooled(scores(r, *FIRST_ALL), POOLED_PAIRS),
    "pooled.md": lambda r: pooled(scores(r, *FIRST_ALL), POOLED_PAIRS),
    "pooled-tuned.md": lambda r: pooled(scores(r, SMALL, LARGER_TUNED), tuned_pairs(r)),
    "pooled-second.md": lambda r: pooled(scores(r, *SECOND_ALL), POOLED_PAIRS),
    "pooled-both.md": lambda r: pooled(scores(r, *FIRST_ALL, *SECOND_ALL), POOLED_PAIRS),
    # other tasks, times, settings
    "sts.md": lambda r: runs.trained_table(r, "sts", SETS, STS_PAPER, spread=1),
    "sts-differences.md": lambda r: differences(
        by_metric(trained(r, "sts")[0], {"score": "average", "stsb": "STS-B"}), STS_PAIRS, label=mirror_name
    ),
    "summarization.md": lambda r: runs.trained_table(r, "summarization", paper.ROUGE, ROUGE_PAPER, spread=3),
    "summarization-differences.md": lambda r: differences(
        by_metric(trained(r, "summarization")[0], paper.ROUGE), ROUGE_PAIRS
    ),
    "times.md": measurements.training_times,
    "learning-rates.md": runs.learning_rates,
    "coverage.md": measurements.coverage,
    "missing.md": lambda r: plan.missing(r.parent),
    "arrival.svg": figures.arrival,
    "peers.md": lambda r: measurements.peers(r, others=False),
    "peers-others.md": lambda r: measurements.peers(r, others=True),
    # relatives of SAM and what users take instead
    "frontier.md": frontier.encoder_table,
    "frontier-llm.md": frontier.llm_table,
    "methods.svg": frontier.figure,
    "radius-default.md": radius.default_table,
    "radius-rules.md": radius.rules_table,
    "radius-units.md": radius.units_table,
    # speed
    "speed-costs.md": speed_costs.costs,
    "speed-answers.md": speed_costs.answers,
    "speed-ratios.md": lambda r: speed_targets.ratios(r, speed_targets.RATIOS),
    "speed-memory.md": lambda r: speed_targets.ratios(r, speed_targets.MEMORY),
    "speed-long.md": speed_targets.long_texts,
    "speed-growth.md": speed_growth.growth,
    "speed-growth.svg": speed_growth.figure,
    "speed-tokens.svg": partial(speed_growth.axis_figure, axis="tokens"),
    "speed-steps.md": speed_tables.steps,
    "speed-failures.md": speed_tables.failures,
    "speed-provenance.md": speed_tables.provenance,
    "speed-train.md": speed_tables.trainings,
    "speed-train-settings.md": speed_tables.training_settings,
    "speed-peers.md": speed_tables.peers,
    "speed-relatives.md": speed_tables.relatives,
    "speed-accumulation.md": speed_tables.accumulation,
    "speed-overhead.md": speed_tables.overhead,
    "speed-operations.md": speed_tables.operations,
    "speed-compile-time.md": speed_tables.compile_time,
    "speed-loop.md": speed_tables.loop,
    "speed-cpu.md": speed_tables.cpu,
    "speed-mlp.md": speed_tables.mlp,
    "speed-adamw.md": speed_tables.adamw,
    # LoRA
    "llm-radius.md": lora.radii,
    **{f"lora-{model}.md": partial(lora.steps, model=model) for model in ("llama-1.1b", "llama-7b")},
    **{f"lora-{model}-provenance.md": partial(lora.provenance, model=model) for model in ("llama-1.1b", "llama-7b")},
    # where it pays
    "answers.json": answers,
    "calibration.svg": calibration.dots,
    "reliability.svg": calibration.reliability,
    "calibration.md": calibration.differences,
    "calibration-pairs.md": calibration.pairs,
    **{f"calibration-{metric}.md": partial(calibration.by_setup, metric=metric) for metric in ("nll", "ece")},
    **{
        f"calibration-{metric}-differences.md": partial(calibration.by_setup_differences, metric=metric)
        for metric in ("nll", "ece")
    },
    "bits.svg": rounding.figure,
    "bits.md": rounding.scores,
    "bits-differences.md": rounding.drops,
    "bits-calibration.md": rounding.calibration,
    **{f"{axis}.svg": partial(stress.figure, axis=axis) for axis in stress.AXES},
    **{f"{axis}-missing.md": partial(stress.gaps, axis=axis) for axis in stress.AXES},
    **{
        f"{axis}-{metric}.md": partial(stress.differences, axis=axis, metric=metric)
        for axis in stress.AXES
        for metric in ("score", "nll", "ece", "nll_scaled")
    },
    "noise-pairs.md": partial(stress.pairs, axis="noise", level=0.2),
    "rows-pairs.md": partial(stress.pairs, axis="rows", level=1000),
    "noise-tasks.md": partial(stress.by_setup, axis="noise", level=0.2),
    "noise-tasks-ece.md": partial(stress.by_setup, axis="noise", level=0.2, metric="ece"),
    "noise-tasks-nll_scaled.md": partial(stress.by_setup, axis="noise", level=0.2, metric="nll_scaled"),
    "noise-tasks-40.md": partial(stress.by_setup, axis="noise", level=0.4),
    "rows-tasks.md": partial(stress.by_setup, axis="rows", level=250),
    "rows-tasks-1000.md": partial(stress.by_setup, axis="rows", level=1000),
    "shift.md": shift.overall,
    "shift-sets.md": shift.by_set,
    "base.md": base.overall,
    "base-scores.md": base.scores,
    "base-differences.md": base.differences,
    "directions.md": directions.differences,
    "forgetting.svg": llm.forgetting,
    "llm-chat.md": llm.chat,
    "radius-llm.md": partial(llm.sweep_table, sweep="radius-llm"),
    "radius-llm-default.md": llm.default_radius,
    **{
        f"llm-{name}{kind}": partial(make, part=part)
        for name, part in (("full", ""), ("lora", "LoRA"))
        for kind, make in ((".md", llm.differences), ("-tasks.md", llm.by_task), ("-bits.svg", llm.bits))
    },
}
