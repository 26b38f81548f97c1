"""Makes a run: from its configuration to its result."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltasam.integrations.storage import explain_storage_errors, remove_partial, sealed, write_text
from deltasam.lab.experiments._adapters import add_adapters, check_installed
from deltasam.lab.experiments._attention import attention_without_nan
from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._data_record import changed_since, changed_split, record_rows
from deltasam.lab.experiments._environment import device_name, environment, peak_memory
from deltasam.lab.experiments._errors import ConfigError, RunStoppedError
from deltasam.lab.experiments._folder import COMPLETE, RunFolder
from deltasam.lab.experiments._lengths import check_lengths
from deltasam.lab.experiments._parts import named_plain, to_method
from deltasam.lab.experiments._result import Result, rank
from deltasam.lab.experiments.lock import lock_run
from deltasam.lab.experiments.plain import build
from deltasam.lab.tasks import Data, DataSource, Measured, dropout_options, find_model, load_tokenizer, tokenizing_once
from deltasam.methods import Method
from deltasam.objectives import Objective
from deltasam.speed.capture import PadToBuckets
from deltasam.speed.splitting import Splitting
from deltasam.step.float32 import float32_kept
from deltasam.step.selection import select

_AUTOCAST = "ACCELERATE_MIXED_PRECISION"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Everything that a run needs, loaded and checked: rows, tokenizer, number of updates."""

    config: RunConfig
    data: Data
    tokenizer: Any
    total: int

    @property
    def train_rows(self) -> list[dict[str, Any]]:
        """Rows to train on."""
        return self.data.splits[self.config.task.train_split]

    @property
    def eval_rows(self) -> list[dict[str, Any]]:
        """Rows to evaluate on."""
        return self.data.splits[self.config.task.eval_split]

    def objective(self) -> Objective:
        """Returns the task's objective wrapped by the regularisers."""
        return _objective(self.config, self.total)

    def method(self) -> Method:
        """Returns a new method without state; the seed of the run is added to its own seed, if it has one."""
        method = to_method(named_plain(self.config.method))
        return method.replace(seed=method.seed + self.config.seed) if hasattr(method, "seed") else method

    def collator(self) -> Any:
        """Returns the task's collator; with captured steps it pads texts, so that few shapes occur."""
        collate = self.config.task.collator(self.tokenizer)
        if not self.config.capture:
            return collate
        if hasattr(collate, "to_multiple"):  # it pads on the left
            return collate.to_multiple(32)
        padded = PadToBuckets(lambda batch: batch, pad_token_id=self.tokenizer.pad_token_id, multiple=32)

        def few_shapes(rows: Any) -> Any:
            batch = collate(rows)
            return padded(batch) if "input_ids" in batch else batch

        return few_shapes

    def model(self) -> Any:
        """Returns the model with a head initialised from the seed."""
        from transformers import set_seed

        set_seed(self.config.seed)
        settings = self.config.model
        changes = {} if settings.dropout is None else dropout_options(settings.path, settings.dropout)
        model = self.config.task.model(settings.path, self.data, **changes)
        return model if settings.lora is None else add_adapters(model, settings.lora)


def _objective(config: RunConfig, total: int) -> Objective:
    objective = config.task.objective()
    for one in config.regularisers:
        known = {"total_steps": total} if one.takes("total_steps") else {}
        objective = one.wrap(objective, **known)
    return objective


def prepare(config: RunConfig) -> Prepared:
    """Loads and checks everything except the weights, so that mistakes are reported before any training.

    Raises:
        DataError: The data or the model is missing or wrong.
        ConfigError: The configuration does not fit the data.
    """
    if config.precision == "tf32" and not torch.cuda.is_available():
        raise ConfigError("precision=tf32: needs a CUDA device; use fp32")
    if config.precision in ("bf16", "fp16") and not torch.accelerator.is_available():
        # Trainer would reject bf16 by the name of its own option, and silently use fp32 instead of fp16.
        raise ConfigError(f"precision={config.precision}: needs a GPU; use fp32")
    if config.method.perturbs == "instances" and not config.task.objective().separable:
        raise ConfigError(
            f"method={type(config.method).__name__}: the objective of {config.task.name} compares the instances of a "
            "batch with each other, so a perturbation per instance is not defined; use SAM or DeltaSAM"
        )
    build(lambda: _objective(config, total=1), {}, "regularisers")  # raises for one that does not fit the task
    if config.on_out_of_memory == "split":
        _check_splitting(config)
    if config.model.lora is not None:
        check_installed()
    find_model(config.model.path)
    data = config.task.stressed(config.task.load(DataSource.find(config.data)), config.seed)
    tokenizer = load_tokenizer(config.model.path)
    rows = len(data.splits[config.task.train_split])
    if config.batch.drop_last and rows < config.batch.size:
        raise ConfigError(f"batch.size={config.batch.size} with drop_last leaves no batch of {rows} training rows")
    total = config.schedule.total(config.batch.updates_per_epoch(rows))
    if config.schedule.warmup_of(total) >= total:
        raise ConfigError(
            f"schedule.warmup_steps={config.schedule.warmup_steps} must be less than the {total} updates of the run"
        )
    return Prepared(config, data, tokenizer, total)


def _check_splitting(config: RunConfig) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))  # they connect only when the Trainer is created
    try:
        Splitting(config.method).check(config.task.objective(), processes=launched)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _checked_model(prepared: Prepared) -> Any:
    """Returns the model after checking method and texts; called before the folder is created."""
    config, model = prepared.config, prepared.model()
    try:
        select(model, config.method.params)
    except ValueError as error:
        raise ConfigError(f"method: {error}") from error
    check_lengths(config.task, model, prepared.tokenizer, prepared.data.splits)
    return model


def run(
    config: RunConfig, folder: Path, *, watch: Any = None, tensorboard: bool = False, keep_weights: bool = True
) -> Result:
    """Trains and evaluates; a finished run is not repeated, an interrupted one resumes from its last checkpoint.

    On a CPU, an interrupted run ends with the same weights and metrics as an undisturbed one, bit for bit.

    Args:
        config: The run.
        folder: The run folder; see :class:`~deltasam.lab.experiments.RunFolder`.
        watch: Called after every update with (update, total number of updates, latest log entry).
        tensorboard: Also write event files.
        keep_weights: Write the final weights.

    Returns:
        The result, as in ``result.json``.

    Raises:
        ConfigError: The folder holds another run, or the configuration does not fit the data or device.
        DataError: The data or the model is missing or wrong.
        RunStoppedError: A signal (SIGTERM, SIGINT) stopped the run; it wrote a checkpoint.
        DivergedError: The gradients were not finite in many updates in a row.
        StorageError: The disk is full, or the folder is not writable.
        LostError: A worker of the data loader, or another process of the run, has died.
    """
    place = RunFolder(folder)
    finished = place.finished(config)
    if finished is not None:
        other = changed_since(config, folder)
        if other is not None:
            _log.warning(
                "the rows of %s have changed since the run in %s was made; its result belongs to the earlier rows: "
                "choose another folder by --output to train on the present ones", other, folder,
            )  # fmt: skip
        return finished
    prepared = prepare(config)
    other = changed_split(prepared.data, folder)
    if other is not None:
        raise ConfigError(
            f"the rows of {other} have changed since the run in {folder} was started; choose another folder by "
            "--output, or remove that one"
        )
    # Trainer takes the folder of event files from this variable only.
    logs = _variable("TENSORBOARD_LOGGING_DIR", str(place.path / "tensorboard")) if tensorboard else nullcontext()
    with explain_storage_errors(folder), _precision(config.precision), attention_without_nan(), logs:
        model = _checked_model(prepared)
        place.claim(config)
        with lock_run(folder), tokenizing_once():
            # Another process may have finished the run while this one was waiting.
            return place.finished(config) or _train(
                prepared, model, place, watch, tensorboard=tensorboard, keep_weights=keep_weights
            )


@contextmanager
def _precision(wanted: str) -> Iterator[None]:
    """Sets the precision for the length of a run, whatever the process used before.

    Accelerate and Trainer read autocast from a variable by default, and transformers before version 5 sets it: a run
    in float32 after one in bfloat16 would also use bfloat16.
    """
    variable = os.environ.get(_AUTOCAST)
    autocast = wanted if wanted in ("bf16", "fp16") else "no"
    if variable not in (None, "no", autocast):
        _log.warning("%s=%s is ignored: the run has precision=%s; change that instead", _AUTOCAST, variable, wanted)
    with _variable(_AUTOCAST, autocast), float32_kept():
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision("high" if wanted == "tf32" else "highest")
            torch.cuda.reset_peak_memory_stats()  # without earlier runs of this process
        yield


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable temporarily."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _train(
    prepared: Prepared, model: Any, place: RunFolder, watch: Any, *, tensorboard: bool, keep_weights: bool
) -> Result:
    from transformers import PrinterCallback

    from deltasam.integrations import WeightAverageCallback
    from deltasam.lab.experiments._callbacks import Clock, EvaluationFirst, Recorder, Watcher
    from deltasam.lab.experiments._guard import Guard
    from deltasam.lab.experiments._stopping import Stopper
    from deltasam.lab.experiments._trainer import RunTrainer, arguments

    config, task, total = prepared.config, prepared.config.task, prepared.total
    facts = environment()
    write_text(place.path / "environment.json", json.dumps(facts, indent=2))
    record_rows(config, prepared.data, place.path)
    clock, stopper = Clock(), Stopper()
    guard = Guard(lambda: place.last_checkpoint(total))
    # After the callbacks that ask for checkpoints, before the one that marks them as complete.
    averages = [] if config.average is None else [WeightAverageCallback(config.average.made())]
    trainer = RunTrainer(
        model=model,
        args=arguments(config, total, place.checkpoints, tensorboard=tensorboard),
        method=prepared.method(),
        objective=prepared.objective(),
        train_dataset=task.encode(prepared.train_rows, prepared.tokenizer, seed=config.seed),
        eval_dataset=prepared.eval_rows,
        data_collator=prepared.collator(),
        capture=config.capture,
        on_out_of_memory=config.on_out_of_memory,
        config=config,
        tokenizer=prepared.tokenizer,
        clock=clock,
        callbacks=[
            EvaluationFirst(),
            stopper,
            guard,
            *averages,
            Recorder(place, clock),
            *([Watcher(watch)] if watch is not None else []),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = place.last_checkpoint(total)
    if checkpoint is not None:
        clock.resume(sealed(checkpoint, COMPLETE))
    before = task.initial(trainer.model, prepared.tokenizer, prepared.data)
    clock.start()
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    finally:
        stopper.release()
    done = trainer.state.global_step
    if stopper.by is not None and done < total:
        raise RunStoppedError(
            f"stopped by {stopper.by} after update {done} of {total}; start the run again to resume from there"
        )
    seconds = clock.training
    if trainer.evaluated_at != trainer.state.global_step:
        trainer.evaluate()
    final = _final(prepared, trainer, before)
    result = _result(prepared, trainer, facts, seconds, clock.evaluating, final)
    weights = trainer.whole_weights()
    if trainer.is_world_process_zero():
        if keep_weights:
            trainer.model.save_pretrained(str(place.model), state_dict=weights)
            prepared.tokenizer.save_pretrained(str(place.model))
        write_text(place.result, result.to_json())
        remove_partial(place.path)  # files that a killed process was writing
    return result


def _final(prepared: Prepared, trainer: Any, before: dict[str, float]) -> Measured:
    """Returns what the task measures once, after training. The model must be whole for that."""
    config = prepared.config
    if trainer.is_fsdp_enabled:
        return Measured()
    size, rows = config.batch.eval_size, prepared.eval_rows
    return config.task.final(trainer.model, prepared.tokenizer, prepared.data, rows, before=before, batch_size=size)


def _result(
    prepared: Prepared,
    trainer: Any,
    facts: dict[str, str],
    seconds: float,
    evaluating: float,
    more: Measured,
) -> Result:
    config, task = prepared.config, prepared.config.task
    primary = f"eval_{task.primary}"
    evaluations = [entry for entry in trainer.state.log_history if primary in entry]
    final = {name[5:]: value for name, value in evaluations[-1].items() if name.startswith("eval_")}
    best = max(evaluations, key=lambda entry: rank(entry[primary], higher_is_better=task.higher_is_better))
    return Result(
        run_id=config.run_id,
        task=task.name,
        model=config.model.path,
        method="+".join(config.arm),
        seed=config.seed,
        primary_metric=task.primary,
        primary_value=final[task.primary],
        higher_is_better=task.higher_is_better,
        best_value=best[primary],
        best_step=best["step"],
        metrics={**final, **more.metrics},
        reliability=more.reliability,
        steps=trainer.state.global_step,
        train_rows=len(prepared.train_rows),
        eval_rows=len(prepared.eval_rows),
        origins=prepared.data.origins,
        parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        train_seconds=round(seconds, 3),
        eval_seconds=round(evaluating, 3),
        forward_passes=trainer.forwards,
        backward_passes=trainer.backwards,
        skipped_steps=trainer.method.skipped,
        captured_steps=0 if trainer.captured is None else trainer.captured.report.replayed,
        peak_memory_bytes=peak_memory(),
        device=device_name(),
        config=config.to_plain(),
        environment=facts,
    )
