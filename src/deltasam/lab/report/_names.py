"""Names for people: methods and models as the paper writes them, and the order they are listed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_METHODS = {
    "ERM": "ERM",
    "ERM+RDrop": "R-Drop",
    "ERM+R3F": "R3F",
    "ERM+SMART": "SMART",
    "ERM+VAT": "VAT",
    "ERM+EmbeddingNoise": "random noise",
    "FreeLB": "FreeLB",
    "SAM": "SAM",
    "DeltaSAM": "δ-SAM",
    "PerInstanceSAM": "per-instance SAM",
    "SAM+EmbeddingNoise": "SAM + random noise",
    "DeltaSAM+EmbeddingNoise": "δ-SAM + random noise",
}
_WEIGHTS = {
    "RandomWeights": "weights shuffled",
    "Directional": "directional weights",
    "OwnGradient": "weights along own gradients",
    "LossWeights": "weights by the loss",
    "Uniform": "uniform weights",
}
_ORDER = [
    "ERM", "ERM+RDrop", "FreeLB", "ERM+SMART", "ERM+R3F", "ERM+EmbeddingNoise", "ERM+VAT", "SAM", "DeltaSAM",
    "SAM+EmbeddingNoise", "DeltaSAM+EmbeddingNoise", "PerInstanceSAM",
]  # fmt: skip
_MODELS = (("bert-base", "BERT-base"), ("roberta-large", "RoBERTa-large"))
_MIRRORED = (("bert-base", "Mirror-BERT-base"), ("roberta-base", "Mirror-RoBERTa-base"))
_SUMMARISERS = (("bart-large", "BART-large"), ("pegasus", "PEGASUS"))


def method_name(method: str) -> str:
    """A method as people write it.

    Example:
        >>> method_name("DeltaSAM+RDrop"), method_name("ERM+RDrop"), method_name("LookSAM")
        ('δ-SAM + RDrop', 'R-Drop', 'LookSAM')
        >>> method_name("DeltaSAM(RandomWeights)")
        'δ-SAM, weights shuffled'
    """
    if method in _METHODS:
        return _METHODS[method]
    first, *others = method.split("+")
    kind, _, weights = first.removesuffix(")").partition("(")
    name = _METHODS.get(kind, kind) + (f", {_WEIGHTS.get(weights, weights)}" if weights else "")
    return " + ".join([name, *others])


def method_order(method: str) -> tuple[int, str]:
    """Sorts methods as the paper lists them, others after them by name."""
    return (_ORDER.index(method) if method in _ORDER else len(_ORDER), method)


def paper_model(table: str, model: str) -> str:
    """The paper's name of a model, by the beginning of its name on the hub; otherwise the model's own name.

    Example:
        >>> paper_model("glue", "bert-base-cased"), paper_model("sts", "bert-base-uncased")
        ('BERT-base', 'Mirror-BERT-base')
        >>> paper_model("glue", "minilm-l6")
        'minilm-l6'
    """
    known = {"sts": _MIRRORED, "summarization": _SUMMARISERS}.get(table, _MODELS)
    own = model.rpartition("/")[2].lower()
    return next((name for start, name in known if own.startswith(start)), model)


def short_models(models: Iterable[str]) -> dict[str, str]:
    """Names to show: the last part of each path, with as many parts before it as it takes to tell them apart.

    Example:
        >>> short_models(["models/minilm-l6", "/a/final", "/b/final"])
        {'models/minilm-l6': 'minilm-l6', '/a/final': 'a/final', '/b/final': 'b/final'}
    """
    left = list(dict.fromkeys(models))
    given, found = left, {model: model for model in left}
    for count in range(1, max((model.count("/") for model in given), default=0) + 1):
        ends = {model: "/".join(model.split("/")[-count:]) for model in given}
        times = Counter(ends.values())
        found |= {model: ends[model] for model in left if times[ends[model]] == 1}
        left = [model for model in left if times[ends[model]] > 1]
    return found
