"""Measures the quality of delta-SAM's weights: trains the models of a sweep file and analyses each.

All in one process, on a GPU or a CPU; the datasets are in the folder ``--data`` or ``DELTASAM_DATA``:

    python benchmarks/weights_run.py --device cuda --rows 512 --batch-size 8

Existing models are not trained again. Each model has one file in ``--out`` with its result and all measurements. The
file is written after every measurement, and existing measurements are not repeated. A measurement that fails is
reported, and the rest continues. ``python -m deltasam.lab.pages`` makes the tables of docs/results.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "instance-weights"
SWEEP = ROOT / "configs" / "sweeps" / "evidence" / "weights.yaml"
RHO, ETA = 0.05, 1e-4
ALL = ("float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks")
BRIEF = ("float64", "float32", "another direction")
MEASUREMENTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "weights of Eq. 5": (["FiniteDifference"], ALL),
    "weights of Eq. 5, larger probes": (["FiniteDifference(radius=0.5)", "FiniteDifference(radius=2.0)"], BRIEF),
    "weights of Eq. 5, eight draws": (["FiniteDifference(samples=8)"], BRIEF),
    "weights by derivatives": (["Directional"], ("float64", "float32", "bf16", "another direction")),
    "weights along the own gradient": (["OwnGradient"], tuple(name for name in ALL if name != "another direction")),
    "alignment": (
        [
            "FiniteDifference", "FiniteDifference(radius=0.5)", "FiniteDifference(radius=2.0)",
            "FiniteDifference(samples=8)", "Directional", "OwnGradient", "RandomWeights",
        ],
        (),
    ),
    "alignment, weights by the loss": (["LossWeights"], ()),
}  # fmt: skip
"""What is measured on every model: estimators, and conditions for the quality of the weights."""


@dataclass(frozen=True)
class Store:
    """The file of one model: its result, the settings of the measurements, and the measurements."""

    path: Path
    record: dict[str, Any]

    @classmethod
    def open(cls, path: Path, about: dict[str, Any]) -> Store:
        """The existing file if its settings are the same, otherwise a new one."""
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            if all(known[key] == value for key, value in about.items()):
                return cls(path, known)
            print(f"{path.stem}: {path} has other settings; it is replaced", flush=True)
        return cls(path, {**about, "measurements": {}})

    @property
    def missing(self) -> list[str]:
        """Names of the measurements that are not there yet."""
        return [name for name in MEASUREMENTS if name not in self.record["measurements"]]

    def put(self, name: str, found: dict[str, Any]) -> None:
        """Adds a measurement and writes the file."""
        from deltasam.integrations.storage import write_text

        self.record["measurements"][name] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(_strict(self.record)) + "\n")


def weighting(name: str) -> Any:
    """An estimator by its name, with its options in brackets."""
    from deltasam.analysis import WEIGHTINGS

    kind, _, options = name.rstrip(")").partition("(")
    pairs = (option.split("=") for option in options.split(", ") if option)
    return dataclasses.replace(WEIGHTINGS[kind], **{key: json.loads(value) for key, value in pairs})


def measure(name: str, model: Any, batches: Sequence[Any], objective: Any) -> list[dict[str, Any]]:
    """The lines of one measurement, in the format of ``deltasam analyze ... --json``."""
    from deltasam.analysis import alignment, weights_quality

    names, conditions = MEASUREMENTS[name]
    options: dict[str, Any] = {"weightings": {each: weighting(each) for each in names}, "rho": RHO, "eta": ETA}
    analysis: Callable[..., list[Any]] = weights_quality if conditions else alignment
    if conditions:
        options["conditions"] = conditions
    return [dataclasses.asdict(line) for line in analysis(model, batches, objective, **options)]


def analyse(label: str, config: Any, options: argparse.Namespace) -> None:
    """Trains one model, unless it exists, and makes the missing measurements."""
    import torch

    from deltasam.lab.commit import commit
    from deltasam.lab.experiments import load_run, run

    about = {
        "model": label, "run_id": config.run_id, "split": "train", "rows": options.rows,
        "batch_size": options.batch_size, "rho": RHO, "eta": ETA,
    }  # fmt: skip
    store = Store.open(options.out / f"{label}.json", about)
    if not store.missing:
        print(f"{label}: nothing is missing", flush=True)
        return
    start = time.perf_counter()
    folder = options.runs / config.run_name
    result = run(config, folder)
    print(f"{label}: trained, {result.primary_value:.3f} ({time.perf_counter() - start:.1f} s)", flush=True)
    _, loaded = load_run(folder, split="train", rows=options.rows, data=options.data)
    model = loaded.model.to(options.device)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    store.record.update(
        method=result.method, updates=result.steps, metric=result.primary_metric, value=result.primary_value,
        eval_rows=result.eval_rows, device=device, torch=torch.__version__, commit=commit(),
        command=command_of(options),
    )  # fmt: skip
    batches = loaded.batches(options.batch_size)
    for name in store.missing:
        start = time.perf_counter()
        try:
            lines = measure(name, model, batches, loaded.objective)
        except (RuntimeError, ValueError) as error:  # probably out of memory: the others can still be made
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"{label}, {name}: failed after {time.perf_counter() - start:.1f} s: {why}", flush=True)
            continue
        seconds = time.perf_counter() - start
        store.put(name, {"seconds": round(seconds, 1), "lines": lines})
        print(f"{label}, {name}: {seconds:.1f} s", flush=True)


def command_of(options: argparse.Namespace) -> str:
    """The command that repeats the measurement, in the folder of the repository."""
    words = f"python benchmarks/weights_run.py --rows {options.rows} --batch-size {options.batch_size}"
    for name, usual in (("sweep", SWEEP), ("out", OUT)):
        place = getattr(options, name).resolve()
        if place != usual:
            words += f" --{name} {place.relative_to(ROOT) if place.is_relative_to(ROOT) else place.name}"
    return f"{words} --device {options.device}"


def _strict(value: Any) -> Any:
    """Strict JSON: infinities become null, and floats keep the seven digits of float32."""
    text = json.dumps(value)
    return json.loads(text, parse_constant=lambda _: None, parse_float=lambda digits: float(f"{float(digits):.7g}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the missing models and makes the missing measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=512, help="size of the fixed random sample of training rows")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the measurements, one file per model")
    parser.add_argument("--runs", type=Path, default=Path("runs/weights"), help="folder of the trained models")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="sweep file of the models")
    parser.add_argument("--models", nargs="+", metavar="LABEL", help="some of the models of the sweep")
    parser.add_argument("--data", help="folder with the datasets; DELTASAM_DATA by default")
    options = parser.parse_args(argv)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the training, too
    import transformers

    from deltasam.lab.sweeps import final_runs, read_sweep

    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    planned = {run.method: run.config for run in final_runs(read_sweep(options.sweep), {})}
    if unknown := set(options.models or ()) - set(planned):
        parser.error(f"--models {unknown.pop()}: the sweep has {', '.join(planned)}")
    for label in options.models or planned:
        analyse(label, dataclasses.replace(planned[label], data=options.data), options)


if __name__ == "__main__":
    main()
