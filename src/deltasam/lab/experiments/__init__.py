"""Runs from one typed, saved, repeatable configuration; the paper's setups as presets.

    >>> from deltasam.lab.experiments import RunConfig
    >>> config = RunConfig.from_plain({"task": "docstrings", "model": "minilm-l6", "method": "SAM"})
    >>> config.run_name.rpartition("-")[0]
    'docstrings-minilm-l6-SAM-s42'

``run(config, folder)`` trains and evaluates; a finished run is not repeated, an interrupted one resumes.
"""

import deltasam.lab._extra  # noqa: F401
from deltasam.lab.experiments._attention import attention_without_nan
from deltasam.lab.experiments._config import RunConfig, option_hint
from deltasam.lab.experiments._data_record import changed_runs
from deltasam.lab.experiments._environment import environment
from deltasam.lab.experiments._errors import ConfigError, DivergedError, LockedError, RunStoppedError
from deltasam.lab.experiments._folder import Keep, RunFolder
from deltasam.lab.experiments._learning_rate import usual_learning_rate, with_learning_rate
from deltasam.lab.experiments._load import Loaded, load, load_run
from deltasam.lab.experiments._parts import REGULARISERS, WEIGHTINGS, Regulariser, to_weighting
from deltasam.lab.experiments._presets import load_preset, preset_folder, preset_names, preset_variants
from deltasam.lab.experiments._register import register
from deltasam.lab.experiments._resolve import resolve
from deltasam.lab.experiments._result import Result, rank
from deltasam.lab.experiments._run import Prepared, prepare, run
from deltasam.lab.experiments._sections import Average, Batch, Lora, ModelConfig, Optimizer, Schedule
from deltasam.lab.plugins import PluginError

__all__ = [
    "REGULARISERS",
    "WEIGHTINGS",
    "Average",
    "Batch",
    "ConfigError",
    "DivergedError",
    "Keep",
    "Loaded",
    "LockedError",
    "Lora",
    "ModelConfig",
    "Optimizer",
    "PluginError",
    "Prepared",
    "Regulariser",
    "Result",
    "RunConfig",
    "RunFolder",
    "RunStoppedError",
    "Schedule",
    "attention_without_nan",
    "changed_runs",
    "environment",
    "load",
    "load_preset",
    "load_run",
    "option_hint",
    "prepare",
    "preset_folder",
    "preset_names",
    "preset_variants",
    "rank",
    "register",
    "resolve",
    "run",
    "to_weighting",
    "usual_learning_rate",
    "with_learning_rate",
]
