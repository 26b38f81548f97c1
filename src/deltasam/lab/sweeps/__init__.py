"""Sweeps: one file describes many runs; missing runs are made, existing ones are kept.

A sweep file lists setups (presets, or tasks and models), methods, a grid per method, and seeds. Its runs have the ids
of :class:`~deltasam.lab.experiments.RunConfig`, so a sweep can be interrupted, extended, and shared by several
processes.
"""

import deltasam.lab._extra  # noqa: F401
from deltasam.lab.sweeps._file import Risk, Sweep, Tune, read_sweep
from deltasam.lab.sweeps._measure import RISK, WEIGHTS, measured, record_risk, record_weights
from deltasam.lab.sweeps._plan import Planned, final_runs, select, tuning_runs
from deltasam.lab.sweeps._pool import Event, Job, LocalPool
from deltasam.lab.sweeps._radius import PLAIN, RadiusChoice, choose_radius, radius_sweep
from deltasam.lab.sweeps._ray import RayPool
from deltasam.lab.sweeps._search import Search, read_search, run_search
from deltasam.lab.sweeps._sweep import Outcome, run_sweep

__all__ = [
    "PLAIN",
    "RISK",
    "WEIGHTS",
    "Event",
    "Job",
    "LocalPool",
    "Outcome",
    "Planned",
    "RadiusChoice",
    "RayPool",
    "Risk",
    "Search",
    "Sweep",
    "Tune",
    "choose_radius",
    "final_runs",
    "measured",
    "radius_sweep",
    "read_search",
    "read_sweep",
    "record_risk",
    "record_weights",
    "run_search",
    "run_sweep",
    "select",
    "tuning_runs",
]
