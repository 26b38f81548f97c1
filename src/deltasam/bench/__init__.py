"""What a step costs: time, passes and memory of every method beside the implementations people use today.

``deltasam bench step`` from an installation, or ``python -m deltasam.bench.step`` where there is only torch and
transformers. Parts: ``options`` (what to measure), ``_workbench`` (model, batch, objective), ``_contestants`` (our
methods and the field's), ``_passes`` (counted by hooks), ``_memory``, ``_clock`` (interleaved rounds), ``isolate``
(perturb and restore alone), ``report`` (table, JSON, plot).
"""
