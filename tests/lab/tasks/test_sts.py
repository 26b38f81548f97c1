"""STS evaluation agrees with sentence-transformers; the two views of Mirror-BERT."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deltasam.lab.tasks import STS_SETS, DataError, DataSource, MirrorTask, find_task, load_tokenizer, sts_scores
from helpers.pretrained import bert_folder

TASK = find_task("mirror")
assert isinstance(TASK, MirrorTask)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("bert")))


def test_scores_equal_sentence_transformers_evaluator_on_the_same_embeddings() -> None:
    pytest.importorskip("sentence_transformers.sentence_transformer")
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(90, 8, generator=generator) for _ in range(2))
    gold = torch.randint(0, 6, (90,), generator=generator).double().tolist()  # with ties
    rows = [{"set": "sts12" if i < 40 else "sickr", "score": score} for i, score in enumerate(gold)]
    found = sts_scores(first, second, rows)

    class Fixed:
        """A model with known embeddings."""

        similarity_fn_name = "cosine"
        truncate_dim = None
        model_card_data = None

        def __init__(self, table: dict[str, torch.Tensor]) -> None:
            self.table = table

        def encode(self, sentences: list[str], **_: object) -> np.ndarray:
            return np.stack([self.table[sentence].numpy() for sentence in sentences])

    table = {f"a{i}": first[i] for i in range(90)} | {f"b{i}": second[i] for i in range(90)}
    for name, where in (("sts12", range(40)), ("sickr", range(40, 90))):
        evaluator = EmbeddingSimilarityEvaluator(
            [f"a{i}" for i in where], [f"b{i}" for i in where], [gold[i] for i in where], main_similarity="cosine",
            write_csv=False, show_progress_bar=False,
        )  # fmt: skip
        embeddings = [
            evaluator.embed_inputs(Fixed(table), texts) for texts in (evaluator.sentences1, evaluator.sentences2)
        ]
        from scipy.stats import spearmanr
        from sentence_transformers.util import pairwise_cos_sim

        theirs = spearmanr(evaluator.scores, pairwise_cos_sim(*embeddings).numpy()).statistic
        assert found[name] == pytest.approx(theirs, abs=1e-6)
    assert found["sts_average"] == pytest.approx((found["sts12"] + found["sickr"]) / 2)


@pytest.mark.data
def test_evaluation_equals_sentence_transformers_end_to_end(shared: Path, bert: str) -> None:
    from sentence_transformers import SentenceTransformer

    pytest.importorskip("sentence_transformers.sentence_transformer")
    from sentence_transformers.sentence_transformer import modules
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    task = replace(TASK, pooling="mean", pad_to_max_length=False, eval_split="validation", eval_rows=60)
    data = task.load(DataSource.find(shared / "data"), ["validation"])
    rows = data.splits["validation"]
    model, tokenizer = task.model(bert, data), load_tokenizer(bert)
    found = task.evaluate(model, tokenizer, rows, batch_size=16)
    word = modules.Transformer(bert, max_seq_length=64)
    theirs = SentenceTransformer(modules=[word, modules.Pooling(word.get_embedding_dimension())], device="cpu")
    evaluator = EmbeddingSimilarityEvaluator(
        [row["sentence1"] for row in rows], [row["sentence2"] for row in rows], [row["score"] for row in rows],
        main_similarity="cosine", write_csv=False,
    )  # fmt: skip
    assert found["stsb"] == pytest.approx(evaluator(theirs)["spearman_cosine"], abs=1e-6)


@pytest.mark.data
def test_all_seven_sets(shared: Path) -> None:
    data = TASK.load(DataSource.find(shared / "data"))
    sizes = {name: sum(row["set"] == name for row in data.splits["test"]) for name in STS_SETS}
    assert sizes == {
        "sts12": 3108, "sts13": 1500, "sts14": 3750, "sts15": 3000, "sts16": 1186, "stsb": 1379, "sickr": 4927
    }  # fmt: skip
    assert len(data.splits["stsb_train_sents_10k"]) == 10_000


def test_span_is_masked_in_the_second_view_only(bert: str) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    for seed in range(20):
        masked = TASK.masked(text, random.Random(seed))
        left, _, right = masked.partition(" [MASK] ")
        assert text.startswith(left)
        assert text.endswith(right)
        assert len(left) + len(right) == len(text) - 5
    assert TASK.masked("too short to mask", random.Random(0)) == "too short to mask"
    rows = [{"sentence": text}] * 3
    tokenizer = load_tokenizer(bert)
    items = TASK.encode(rows, tokenizer, seed=1)
    mask = tokenizer.mask_token_id
    assert all(mask not in item["first"]["input_ids"] and mask in item["second"]["input_ids"] for item in items)
    assert items == TASK.encode(rows, tokenizer, seed=1)
    assert items != TASK.encode(rows, tokenizer, seed=2)
    assert len({tuple(item["second"]["input_ids"]) for item in items}) > 1  # the span depends on the index


def test_held_out_pairs_have_views_too(bert: str) -> None:
    long = "the quick brown fox jumps over the lazy dog"
    pairs = [{"set": "stsb", "sentence1": f"{long} {i}", "sentence2": "other", "score": 1.0} for i in range(3)]
    tokenizer = load_tokenizer(bert)
    assert TASK.encode(pairs, tokenizer) == TASK.encode([{"sentence": p["sentence1"]} for p in pairs], tokenizer)


def test_bad_spans_raise() -> None:
    with pytest.raises(ValueError, match=r"task.shortest=1 must be greater than task.span=50"):
        replace(TASK, span=50, shortest=1)
    with pytest.raises(ValueError, match=r"task.span=-1 must be"):
        replace(TASK, span=-1)
    assert replace(TASK, span=0, shortest=0).masked("a", random.Random(0)) == "a"
    assert replace(TASK, span=3, shortest=4).masked("abcd", random.Random(0)) == " [MASK] d"


def test_unknown_metrics_raise() -> None:
    with pytest.raises(ValueError, match=r"task.metrics=\['foo'\] .* mirror: sts_average, "):
        replace(TASK, metrics=("foo",))


def test_parts_of_splits(tmp_path: Path) -> None:
    for folder, name, row in (
        ("mirror_wiki", "stsb_train_sents_10k", {"sentence": "a"}),
        ("stsb", "validation", {"sentence1": "a", "sentence2": "b", "score": 1.0}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 10)
    task = replace(TASK, train_split="stsb_train_sents_10k[:90%]", eval_split="validation[50%:]")
    data = task.load(DataSource(tmp_path))
    other = replace(task, metrics=("sts12",), eval_split="validation")
    with pytest.raises(DataError, match=r"task.metrics: 'sts12' is not measured on validation, .* stsb"):
        other.load(DataSource(tmp_path))
    assert len(other.load(DataSource(tmp_path), ["validation"]).splits["validation"]) == 10  # evaluation alone
    assert [len(rows) for rows in data.splits.values()] == [9, 5]
    with pytest.raises(DataError, match=r"no split 'test\[:50%\]'"):
        TASK.load(DataSource(tmp_path), ["test[:50%]"])


def test_views_are_padded_as_the_original_does(bert: str) -> None:
    tokenizer = load_tokenizer(bert)
    items = TASK.encode([{"sentence": "a b c"}, {"sentence": "d"}], tokenizer)
    assert TASK.collator(tokenizer)(items)["second"]["input_ids"].shape == (2, 50)
    assert replace(TASK, pad_to_max_length=False).collator(tokenizer)(items)["first"]["input_ids"].shape == (2, 5)


def test_padding_counts_in_mean_all_only(bert: str) -> None:
    rows = [
        {"set": "stsb", "sentence1": f"get {w}", "sentence2": f"set {w} file", "score": i}
        for i, w in enumerate("abcd")
    ]
    tokenizer = load_tokenizer(bert)
    model = TASK.model(bert, None)

    def score(pooling: str, length: int) -> float:
        return replace(TASK, pooling=pooling, eval_max_length=length).evaluate(model, tokenizer, rows)["stsb"]

    assert score("mean", 16) == score("mean", 64)
    assert score("cls", 16) == score("cls", 64)


def test_wrong_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="evaluate on test"):
        TASK.load(DataSource(tmp_path), ["tset"])
