"""The laboratory: tasks, experiments, sweeps, reports, benchmarks and the command line. The engine never imports it."""
