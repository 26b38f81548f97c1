"""What is generated: the name of each file of ``docs/_generated``, its data and its statistic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deltasam.lab.pages import figures, measurements, plan, runs, speed
from deltasam.lab.pages.measurements import COSINE_PAIRS, named, weight_lines
from deltasam.lab.pages.runs import ROUGES, SETS, Selection, finals, long, scores, trained
from deltasam.lab.pages.statistics import batch_means, cell_table, differences, geometric_means, means, medians, pooled
from deltasam.report import method_name, paper

SMALL = Selection(("glue", "glue-weightings", "adversarial-risk"))  # plain training there is the same run
ETA = Selection(("glue-eta",))
LARGER = Selection(("glue-larger",), fixed=True)
LARGER_TUNED = Selection(("glue-larger",), tuned_only=True)
SECOND = Selection(("minilm",), fixed=True)
SECOND_TUNED = Selection(("minilm",), tuned_only=True)
SECOND_LARGER = Selection(("minilm-larger",), fixed=True)
SECOND_BOTH = [Selection(s.folders, fixed=True, suffix=", second encoder") for s in (SECOND, SECOND_LARGER)]

MRPC = {"weights": "{} updates"}
MRPC_MORE = {**MRPC, "instance-weights": "{} updates, 512 rows"}
COLA = {"instance-weights-cola": "{} updates", "instance-weights-base": "base size, {} updates"}

DIRECTIONAL, OWN, LOSS, SHUFFLED = (
    f"DeltaSAM({name})" for name in ("Directional", "OwnGradient", "LossWeights", "RandomWeights")
)
REGULARISED = ["ERM+RDrop", "FreeLB", "ERM+SMART", "ERM+R3F"]
WEIGHTED = ["DeltaSAM", DIRECTIONAL, LOSS, OWN, SHUFFLED, "PerInstanceSAM"]
PAIRS = [
    *((method, "ERM") for method in (*REGULARISED, "SAM", *WEIGHTED)),
    *((method, "SAM") for method in WEIGHTED),
    *((method, "DeltaSAM") for method in WEIGHTED[1:]),
]
POOLED_PAIRS = [
    *((method, "ERM") for method in (*REGULARISED, "SAM", "DeltaSAM", "PerInstanceSAM")),
    *((method, "SAM") for method in ("DeltaSAM", DIRECTIONAL, OWN, LOSS, SHUFFLED, "PerInstanceSAM")),
    (LOSS, "DeltaSAM"), (SHUFFLED, "DeltaSAM"),
]  # fmt: skip
SPECIAL = [f"PerInstanceSAM{special}" for special in ("", ", twice as long", ", rho = 0.02", ", rho = 0.01")]
RISK_METHODS = ["SAM", "DeltaSAM", DIRECTIONAL, OWN, SHUFFLED, *SPECIAL]
RISK_PAIRS = [
    *((method, "ERM") for method in RISK_METHODS),
    *((method, "SAM") for method in RISK_METHODS[1:]),
    *((method, "DeltaSAM") for method in RISK_METHODS[2:]),
]
RADIUS_METHODS = ["SAM", "DeltaSAM", LOSS, "PerInstanceSAM"]
RADIUS_PAIRS = [
    *((method, "ERM") for method in RADIUS_METHODS),
    *((method, "SAM") for method in RADIUS_METHODS[1:]),
    (LOSS, "DeltaSAM"),
]
STS_PAIRS = [
    *((m, "ERM") for m in ("FreeLB", "ERM+EmbeddingNoise", "SAM", "DeltaSAM", SHUFFLED, "SAM+EmbeddingNoise",
                           "DeltaSAM+EmbeddingNoise")),
    ("DeltaSAM", "SAM"), (SHUFFLED, "SAM"), (SHUFFLED, "DeltaSAM"), ("DeltaSAM+EmbeddingNoise", "SAM+EmbeddingNoise"),
]  # fmt: skip
ROUGE_PAIRS = [*((m, "ERM") for m in ("ERM+RDrop", "ERM+R3F", "SAM", "DeltaSAM")), ("DeltaSAM", "SAM")]
STS_PAPER = {method: f"{row['avg']:.2f}" for method, row in paper.STS.figures["Mirror-BERT-base"].items()}
ROUGE_PAPER = {
    method: " / ".join(f"{row[metric]:.2f}" for metric in ROUGES)
    for method, row in paper.SUMMARIZATION.figures["BART-large"].items()
}
ESTIMATOR = "estimator | changed"
COMPUTED = "estimator | computed in"
COSINE = "difference of cos(dR/dw, dR_inst/dw)"


def mirror_name(method: str) -> str:
    """Plain training on this task is Mirror-BERT."""
    return "Mirror-BERT" if method == "ERM" else method_name(method)


def all_tuned(results: Path) -> object:
    """All tasks of the first encoder, each at the radius it chose; only methods that chose one on the larger tasks."""
    frame = scores(results, SMALL, LARGER_TUNED)
    return frame[frame["row"].isin(finals(results, LARGER_TUNED)["method"])]


RESULTS: dict[str, Callable[[Path], str]] = {
    # adversarial risk
    **{f"risk-{task}.md": lambda r, task=task: runs.risk_table(r, task) for task in ("mrpc", "rte")},
    **{
        f"risk-{task}-differences.md": lambda r, task=task: differences(
            runs.risk(r, task), RISK_PAIRS, label=runs.row_name
        )
        for task in ("mrpc", "rte")
    },
    # delta-SAM's weights
    "weights-repeat.md": lambda r: batch_means(weight_lines(r, MRPC_MORE, "spearman"), ESTIMATOR, named),
    "weights-snr.md": lambda r: geometric_means(weight_lines(r, MRPC, "snr"), ESTIMATOR, named),
    "weights-median.md": lambda r: cell_table(
        weight_lines(r, MRPC, "median"), lambda values: f"{sum(values) / len(values):.1e}", COMPUTED, named
    ),
    "weights-ideal.md": lambda r: batch_means(weight_lines(r, MRPC_MORE, "ideal"), COMPUTED, named),
    "weights-cosines.md": lambda r: measurements.cosines(r, MRPC),
    "weights-cosine-differences.md": lambda r: differences(
        weight_lines(r, MRPC, "regulariser"), COSINE_PAIRS, COSINE, named, test=False
    ),
    "weights-cola-repeat.md": lambda r: batch_means(weight_lines(r, COLA, "spearman"), ESTIMATOR, named),
    "weights-cola-ideal.md": lambda r: batch_means(weight_lines(r, COLA, "ideal"), COMPUTED, named),
    "weights-cola-cosines.md": lambda r: measurements.cosines(r, COLA),
    "weights-cola-cosine-differences.md": lambda r: differences(
        weight_lines(r, COLA, "regulariser"), COSINE_PAIRS, COSINE, named, test=False
    ),
    "weights.svg": lambda r: figures.weights(weight_lines(r, MRPC, "spearman"), named),
    "weights-by-label.md": measurements.by_label,
    "weights-eta.md": measurements.eta_floor,
    # GLUE
    "glue-grid.md": lambda r: runs.grid(r, *SMALL.folders),
    **{
        f"{name}-{kind}": lambda r, statistic=statistic, which=which: statistic(scores(r, which))
        for name, which in {
            "glue": SMALL,
            "larger": LARGER,
            "larger-tuned": LARGER_TUNED,
            "second": SECOND,
            "second-tuned": SECOND_TUNED,
            "second-larger": SECOND_LARGER,
        }.items()
        for kind, statistic in {
            "scores.md": means,
            "differences.md": lambda frame: differences(frame, PAIRS),
        }.items()
    },
    **{
        name: lambda r, which=which: figures.forest(
            figures.above(scores(r, which), "ERM"), "points above plain training"
        )
        for name, which in {"glue.svg": SMALL, "larger.svg": LARGER}.items()
    },
    **{
        f"{name}-{kind}": lambda r, statistic=statistic, which=which: statistic(r, which)
        for name, which in {"glue": SMALL, "larger": LARGER}.items()
        for kind, statistic in {
            "medians.md": lambda r, which: medians(scores(r, which)),
            "paper-protocol.md": runs.paper_protocol,
        }.items()
    },
    "eta-grid.md": lambda r: runs.grid(r, "glue-eta"),
    "eta-moves.md": lambda r: means(runs.eta_moves(r), 2, "eta", str),
    "eta-finals.md": lambda r: runs.eta_finals(r, ETA, SMALL),
    "radius-scores.md": lambda r: means(runs.radii(r)),
    "radius-differences.md": lambda r: differences(runs.radii(r), RADIUS_PAIRS),
    "radius.svg": lambda r: figures.radii(runs.radii(r)),
    "second-grid.md": lambda r: runs.grid(r, "minilm"),
    "second-gain.md": lambda r: runs.gain_of_choice(r, SECOND_TUNED, SECOND),
    "larger-grid.md": lambda r: runs.grid(r, "glue-larger"),
    "larger-gain.md": lambda r: runs.gain_of_choice(r, LARGER_TUNED, LARGER),
    "pooled.md": lambda r: pooled(scores(r, SMALL, LARGER), POOLED_PAIRS),
    "pooled-tuned.md": lambda r: pooled(all_tuned(r), POOLED_PAIRS),
    "pooled-second.md": lambda r: pooled(scores(r, *SECOND_BOTH), POOLED_PAIRS),
    "pooled-both.md": lambda r: pooled(scores(r, SMALL, LARGER, *SECOND_BOTH), POOLED_PAIRS),
    "pooled.svg": lambda r: figures.pooled(scores(r, SMALL, LARGER), POOLED_PAIRS),
    # other tasks, times, settings
    "sts.md": lambda r: runs.trained_table(r, "sts", SETS, STS_PAPER, spread=1),
    "sts-differences.md": lambda r: differences(
        long(trained(r, "sts")[0], "method", {"score": "average", "stsb": "STS-B"}), STS_PAIRS, label=mirror_name
    ),
    "summarization.md": lambda r: runs.trained_table(r, "summarization", ROUGES, ROUGE_PAPER, spread=3),
    "summarization-differences.md": lambda r: differences(
        long(trained(r, "summarization")[0], "method", ROUGES), ROUGE_PAIRS
    ),
    "times.md": measurements.training_times,
    "learning-rates.md": runs.learning_rates,
    "coverage.md": measurements.coverage,
    "missing.md": lambda r: plan.missing(r.parent),
    "arrival.svg": figures.arrival,
}
SPEED: dict[str, Callable[[Path], str]] = {
    "speed-ratios.md": lambda r: speed.ratios(r, speed.RATIOS),
    "speed-memory.md": lambda r: speed.ratios(r, speed.MEMORY),
    "speed-steps.md": speed.steps,
    "speed-provenance.md": speed.provenance,
    "speed-train.md": speed.trainings,
    "speed-loop.md": speed.loop,
    "speed-cpu.md": speed.cpu,
    "speed-adamw.md": speed.adamw,
    **{f"speed-{axis}.md": lambda r, axis=axis: speed.growth(r, axis) for axis in speed.AXES},
    **{f"speed-{axis}.svg": lambda r, axis=axis: figures.growth(r, axis) for axis in speed.AXES},
}
CONTENTS = {**RESULTS, **SPEED}
