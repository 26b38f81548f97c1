"""Compiled models: the perturbation becomes a part of the graph that the compiler gets, instead of proxies.

``torch.compile`` traces the model with ordinary parameters (``region``). An interpreter that knows the rules of the
operations runs the graph of that trace (``interpreter``): once to compare it with the proxies (``comparison``), and
once more while the compiler watches (``graph``), which then sees plain operations of a recording, or of a perturbed
pass. The factors are outputs and inputs of these graphs (``flat``); their norms are compiled, too (``collector``).

Whatever has no rule here runs uncompiled, with a warning that says why.
"""
