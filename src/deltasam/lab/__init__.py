"""The laboratory: tasks, experiments, sweeps, reports, benchmarks, the command line. The engine never imports it."""
