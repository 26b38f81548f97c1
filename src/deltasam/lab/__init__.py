"""The laboratory: tasks, experiments, sweeps, reports, benchmarks and the command ``deltasam``.

Install it with ``pip install "deltasam[lab]"``.
"""
