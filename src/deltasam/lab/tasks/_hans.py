"""A task without download: does a premise entail a hypothesis that is made of its words?

Models of natural language inference often answer yes if all words of the hypothesis are in the premise. McCoy, Pavlick
and Linzen (2019, https://arxiv.org/abs/1902.01007) test this with templates in which the answer is yes and no equally
often. These are the same three kinds of overlap, with templates and words of our own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from deltasam.lab.tasks._data import DataError, Row, Split
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._tables import whole

_ENTAILMENT, _NOT_ENTAILMENT = 0, 1
_PER_TEMPLATE = 50


class _Template(NamedTuple):
    """Two sentences with slots. {a}, {b}, {c} are people, {v}, {w} transitive and {i}, {j} intransitive verbs."""

    heuristic: str
    label: int
    premise: str
    hypothesis: str


#: For each heuristic four templates with entailment and four without.
_TEMPLATES = tuple(
    _Template(heuristic, label, *pair)
    for heuristic, label, pairs in (
        # The hypothesis has the words of the premise, in any order.
        ("lexical overlap", _ENTAILMENT, (
            ("The {a} was {v} by the {b}.", "The {b} {v} the {a}."),
            ("The {a} and the {b} {v} the {c}.", "The {a} {v} the {c}."),
            ("The {a} {place} the {b} {v} the {c}.", "The {a} {v} the {c}."),
            ("The {a} who the {b} {v} {w} the {c}.", "The {b} {v} the {a}."),
        )),
        ("lexical overlap", _NOT_ENTAILMENT, (
            ("The {a} {v} the {b}.", "The {b} {v} the {a}."),
            ("The {a} was {v} by the {b}.", "The {a} {v} the {b}."),
            ("The {a} {place} the {b} {v} the {c}.", "The {c} {v} the {b}."),
            ("The {a} {v} the {b} and the {c}.", "The {b} {v} the {c}."),
        )),
        # The hypothesis is a contiguous part of the premise.
        ("subsequence", _ENTAILMENT, (
            ("The {a} and the {b} {i}.", "The {b} {i}."),
            ("The {a} {v} the {b} {place} the {c}.", "The {a} {v} the {b}."),
            ("The {a} {v} the {b} who {w} the {c}.", "The {a} {v} the {b}."),
            ("The {a} {consumed}.", "The {a} {consume}."),
        )),
        ("subsequence", _NOT_ENTAILMENT, (
            ("The {a} {place} the {b} {i}.", "The {b} {i}."),
            ("The {a} who {v} the {b} {i}.", "The {b} {i}."),
            ("The {a} {thought} the {b} {i}.", "The {a} {thought} the {b}."),
            ("While the {a} {also} the {b} {i}.", "The {a} {also} the {b}."),
        )),
        # The hypothesis is a constituent of the premise's parse tree.
        ("constituent", _ENTAILMENT, (
            ("{because} the {a} {i}, the {b} {v} the {c}.", "The {a} {i}."),
            ("The {a} {i}, and the {b} {v} the {c}.", "The {b} {v} the {c}."),
            ("The {a} {fact} that the {b} {i}.", "The {b} {i}."),
            ("{surely} the {a} {v} the {b}.", "The {a} {v} the {b}."),
        )),
        ("constituent", _NOT_ENTAILMENT, (
            ("{unless} the {a} {i}, the {b} {v} the {c}.", "The {a} {i}."),
            ("The {a} {i}, or the {b} {v} the {c}.", "The {b} {v} the {c}."),
            ("The {a} {opinion} that the {b} {i}.", "The {b} {i}."),
            ("{perhaps} the {a} {v} the {b}.", "The {a} {v} the {b}."),
        )),
    )
    for pair in pairs
)  # fmt: skip

#: The words of the slots. All but the common ones are divided between the splits.
_PEOPLE = (
    "baker", "pilot", "nurse", "teacher", "farmer", "painter", "gardener", "plumber", "singer", "tailor", "dentist",
    "librarian", "sailor", "miner", "poet", "cyclist", "barber", "chemist", "drummer", "hunter", "waiter",
    "surgeon", "builder", "novelist", "referee", "translator", "postman", "juggler", "welder", "violinist",
    "carpenter", "historian",
)  # fmt: skip
_TRANSITIVE = (
    "admired", "greeted", "praised", "warned", "invited", "ignored", "thanked", "interrupted", "followed",
    "visited", "trusted", "helped", "blamed", "rescued", "called", "watched",
)  # fmt: skip
_INTRANSITIVE = (
    "laughed", "slept", "danced", "sneezed", "arrived", "waited", "smiled", "shouted", "vanished", "fainted",
    "yawned", "apologized",
)  # fmt: skip
_COMMON = {
    "place": ("near", "behind", "beside", "next to"),
    "also": ("called", "watched", "helped", "followed"),  # also without an object
    "thought": ("believed", "knew", "feared", "forgot"),
    "because": ("Because", "Since", "Although", "After"),
    "unless": ("If", "Unless", "In case", "Whether or not"),
    "fact": ("knew", "remembered", "forgot", "noticed"),
    "opinion": ("believed", "claimed", "hoped", "said"),
    "surely": ("Undoubtedly", "Of course", "Fortunately", "As everyone knows,"),
    "perhaps": ("Perhaps", "Supposedly", "Hopefully", "Probably"),
}
#: Verbs that keep their meaning without the object.
_CONSUMED = (
    "read the letter", "sang the song", "painted the wall", "cooked the soup", "wrote the report", "ate the apple",
    "drank the juice", "baked the cake", "swept the floor", "knitted the scarf",
)  # fmt: skip
_SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class HansTask(SentenceTask):
    """Pairs in which the premise has all words of the hypothesis, with and without entailment, 1,200 per split.

    For each of three heuristics (lexical overlap, subsequence, constituent) and both labels there are four templates,
    with 50 pairs each. A model that takes overlap for entailment is right on all pairs with entailment and on none of
    the others. The splits have the same templates and no person in common. The rows are the same everywhere.

    The task is meant for the evaluation of models that were trained on MNLI or RTE: ``task.evaluate_on=[hans-like]``.

    Example:
        >>> task = HansTask(name="hans-like")
        >>> rows = task.load(DataSource()).splits["validation"]
        >>> len(rows), sorted(rows[0]), sum(row["label"] for row in rows)
        (1200, ['hypothesis', 'label', 'premise'], 600)
    """

    text: tuple[str, ...] = ("premise", "hypothesis")
    classes: tuple[str, ...] = ("entailment", "not_entailment")
    metrics: tuple[str, ...] = ("accuracy",)
    max_length: int = 64

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return "generated from templates, no download"

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of ``train`` or ``validation``, or of a part, with their ``heuristic``."""
        if whole(split) != split:
            return super().read(source, split)
        if split not in _SPLITS:
            raise DataError(f"{self.name}: there is no split {split!r}, only {', '.join(_SPLITS)}")
        return Split([dict(row) for row in _rows(split)], f"templates of hans-like, {split}")


@lru_cache(maxsize=len(_SPLITS))
def _rows(split: str) -> tuple[Row, ...]:
    part = _SPLITS.index(split)
    generator = random.Random(f"hans-like {split}")
    rows: dict[tuple[str, str], Row] = {}
    for template in _TEMPLATES:
        wanted = len(rows) + _PER_TEMPLATE
        while len(rows) < wanted:  # every template has more than 50 different pairs
            words = _words(generator, part)
            premise, hypothesis = template.premise.format(**words), template.hypothesis.format(**words)
            row = {"premise": premise, "hypothesis": hypothesis, "label": template.label}
            rows.setdefault((premise, hypothesis), {**row, "heuristic": template.heuristic})
    shuffled = list(rows.values())
    generator.shuffle(shuffled)  # so that parts such as validation[:50%] have all templates
    return tuple(shuffled)


def _words(generator: random.Random, part: int) -> dict[str, str]:
    words = {name: generator.choice(choices) for name, choices in _COMMON.items()}
    for slots, choices in (("abc", _PEOPLE), ("vw", _TRANSITIVE), ("ij", _INTRANSITIVE)):
        words |= zip(slots, generator.sample(_half(choices, part), len(slots)), strict=True)
    consumed = generator.choice(_half(_CONSUMED, part))
    return words | {"consumed": consumed, "consume": consumed.split()[0]}


def _half(choices: Sequence[str], part: int) -> Sequence[str]:
    return choices[part::2]
