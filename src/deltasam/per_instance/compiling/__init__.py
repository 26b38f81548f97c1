"""Compiled models: the perturbation becomes a part of the graph that the compiler gets, instead of proxies.

``torch.compile`` traces the model with ordinary parameters. The graph of that trace is run by an interpreter that knows
the rules of the operations: once to compare it with the proxies, and once more under the eyes of the compiler, which
then sees the plain operations of a recording or of a perturbed pass only.
"""
