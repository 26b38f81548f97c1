"""Names to display: methods and models as the paper writes them, and the order of the methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_METHODS = {  # in the order of the tables
    "ERM": "ERM", "ERM+RDrop": "R-Drop", "FreeLB": "FreeLB", "ERM+SMART": "SMART", "ERM+R3F": "R3F",
    "ERM+EmbeddingNoise": "random noise", "ERM+VAT": "VAT", "ERM+NEFTune": "NEFTune",
    "ERM+LabelSmoothing": "label smoothing", "ERM+EMA": "EMA of the weights", "ERM+SWA": "SWA of the weights",
    "SAM": "SAM", "DeltaSAM": "δ-SAM",
    "SAM+EmbeddingNoise": "SAM + random noise", "DeltaSAM+EmbeddingNoise": "δ-SAM + random noise",
    "PerInstanceSAM": "per-instance SAM",
}  # fmt: skip
_WEIGHTS = {
    "RandomWeights": "weights shuffled", "Directional": "directional weights",
    "OwnGradient": "weights along own gradients", "LossWeights": "weights by the loss", "Uniform": "uniform weights",
    "NormWeights": "weights by the norms of gradients",
}  # fmt: skip
_ORDER = list(_METHODS)
_MODELS = {"bert-base": "BERT-base", "roberta-large": "RoBERTa-large"}
_MODELS_OF_TABLES = {
    "sts": {"bert-base": "Mirror-BERT-base", "roberta-base": "Mirror-RoBERTa-base"},
    "summarization": {"bart-large": "BART-large", "pegasus": "PEGASUS"},
}


def method_name(method: str) -> str:
    """Returns the name of a method to display.

    Example:
        >>> method_name("DeltaSAM+RDrop"), method_name("ERM+RDrop"), method_name("LookSAM")
        ('δ-SAM + RDrop', 'R-Drop', 'LookSAM')
        >>> method_name("DeltaSAM(RandomWeights)")
        'δ-SAM, weights shuffled'
        >>> method_name("SAM(LossBudget 0.05, Scheduled)")
        'SAM, LossBudget 0.05, Scheduled'
    """
    if method in _METHODS:
        return _METHODS[method]
    first, *others = method.split("+")
    kind, _, inside = first.removesuffix(")").partition("(")
    parts = inside.split(", ") if inside else []
    name = ", ".join([_METHODS.get(kind, kind), *(_WEIGHTS.get(part, part) for part in parts)])
    return " + ".join([name, *others])


def method_order(method: str) -> tuple[int, str]:
    """Sorting key: methods in the order of the paper, then the others by name."""
    return (_ORDER.index(method) if method in _ORDER else len(_ORDER), method)


def paper_model(table: str, model: str) -> str:
    """Returns the paper's name of a model, found by the start of its hub name, or the name unchanged.

    Example:
        >>> paper_model("glue", "bert-base-cased"), paper_model("sts", "bert-base-uncased")
        ('BERT-base', 'Mirror-BERT-base')
        >>> paper_model("glue", "minilm-l6")
        'minilm-l6'
    """
    base = model.rpartition("/")[2].lower()
    known = _MODELS_OF_TABLES.get(table, _MODELS)
    return next((name for start, name in known.items() if base.startswith(start)), model)


def short_models(models: Iterable[str]) -> dict[str, str]:
    """Returns short names: the last part of each path, with as many parts before it as keep the names distinct.

    Example:
        >>> short_models(["models/minilm-l6", "/a/final", "/b/final"])
        {'models/minilm-l6': 'minilm-l6', '/a/final': 'a/final', '/b/final': 'b/final'}
    """
    given = list(dict.fromkeys(models))
    left, found = given, {model: model for model in given}
    for count in range(1, max((model.count("/") for model in given), default=0) + 1):
        ends = {model: "/".join(model.split("/")[-count:]) for model in given}
        times = Counter(ends.values())
        found |= {model: ends[model] for model in left if times[ends[model]] == 1}
        left = [model for model in left if times[ends[model]] > 1]
    return found
