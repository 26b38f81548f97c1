"""Generates the tables and figures of the documentation from ``results/``; the prose around them is written by hand.

``python -m deltasam.lab.pages`` writes ``docs/_generated/``, and ``--check`` fails if that would change a file,
or if a number in the text is in none of them.
``contents.py`` lists what is generated: a name, the data, and the statistic. The data are long frames with the columns
``row``, ``column``, ``unit`` (the seed or the batch) and ``value``.
"""
