"""What a step costs: time, passes and memory of every method beside the implementations people use today.

``deltasam bench step`` from an installation, or ``python -m deltasam.bench.step`` where there is only torch and
transformers; ``deltasam bench train`` compares whole trainings. Parts: ``options`` (what to measure), ``_workbench``
(model, batch, objective), ``_contestants`` (our methods and the field's), ``_optimizers`` (what is behind them),
``_passes`` (counted by hooks), ``_memory``, ``_engine`` (how the per-instance engine keeps the layers), ``_clock``
(interleaved rounds), ``isolate`` (perturb and restore alone), ``report`` (table, JSON), ``_plot``, ``train``.
"""
