"""Two or four processes (gloo, CPU) against one, in float64; the cases are in ``helpers/rank_cases.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from helpers.data import REPOSITORY
from helpers.rank_blocks import CAN_SHARD

WORLDS = (2, pytest.param(4, marks=pytest.mark.slow))
TOLERANCE = 1e-10  # relative
Found = list[dict[str, dict[str, Any]]]
shards = pytest.mark.skipif(not CAN_SHARD, reason="this version of torch cannot shard a model on a CPU")


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world}-processes")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of every process of a world."""
    world: int = request.param
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    script = str(REPOSITORY / "tests" / "helpers" / "rank_cases.py")
    result = subprocess.run(
        [sys.executable, script, str(folder), str(world)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1800,  # minutes on a busy machine; only a deadlock takes longer
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(
    "case",
    [
        *("replicas", "accumulation", "held_back", "routed", "buffers", "closures", "compiled"),
        "frozen_replicas",
        *(pytest.param(case, marks=shards) for case in ("shards", "gathered", "blocks")),
        *(pytest.param(case, marks=shards) for case in ("looped", "parts", "frozen_shards")),
    ],
)
def test_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    wrong = {name: error for rank in ranks for name, error in rank[case].items() if not error < TOLERANCE}
    assert not wrong


def test_the_comparisons_are_complete(ranks: list[dict[str, Any]]) -> None:
    named = ("erm", "sam", "delta-sam", "asam", "gsam", "friendly-sam", "momentum-sam", "freelb", "rdrop")
    named += ("random", "random-all", "bi-lora", "wsam", "gradient-norm-penalty", "functional-sam")
    named += ("rw-sam", "awp", "multi-step-sam", "sam-share", "sam-tensors", "sam-groups")
    for name in (*named, "look-sam", "per-instance", "per-instance-loop", "per-instance-share"):
        assert {f"{name} local", f"{name} global"} <= ranks[0]["replicas"].keys()
    frozen = {f"{name} local gradient" for name in ("sam", "asam", "per-instance", "per-instance-groups")}
    assert frozen <= ranks[0]["frozen_replicas"].keys()
    if CAN_SHARD:
        assert set(named) <= ranks[0]["shards"].keys()
        assert frozen <= ranks[0]["frozen_shards"].keys()


def test_local_perturbations_cost_no_communication(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sent = rank["communication"]
        plain = sent["erm local"]
        assert plain > 0
        extra = {name: size for name, size in sent.items() if not name.endswith("global") and size != plain}
        assert not extra
        assert sent["per-instance global"] == sent["freelb global"] == plain  # per instance, whatever the option
        assert sent["sam global"] == 2 * plain
        assert sent["delta-sam global"] == 2 * plain + 8  # and the mean of the weights


def test_decisions_agree(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["decisions"]["skipped"] == 1
        assert rank["decisions"]["plain"] < TOLERANCE
        assert rank["decisions"]["local: finite and equal"] == 1


@shards
def test_random_directions(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        drawn = rank["directions"]
        assert drawn["replicated differ"] == 0
        assert abs(drawn["mean"]) < 0.02
        assert abs(drawn["std"] - 1) < 0.02
        assert drawn["distinct"] > 0.99  # the parts are not copies of each other
        assert drawn["norm"] < 1e-5


@shards
def test_refusals(ranks: list[dict[str, Any]]) -> None:
    messages = ranks[0]["refusals"]
    assert "scope='global'" in messages["local"]
    assert "DistributedDataParallel" in messages["shards"]
    assert "tensor parallelism" in messages["tensor-parallel"]
    assert "fully_shard" in messages["fsdp1"]
    assert "DeepSpeed" in messages["deepspeed"]
    for name in ("part", "composable"):
        assert "wrap the whole model" in messages[name]
    assert "feed.weight" in messages["unsharded"]
    for name in ("unsharded local", "unsharded kept"):
        assert messages[name] == "nothing was refused"


@shards
def test_a_state_of_shards_belongs_to_its_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in ("LookSAM", "FriendlySAM", "MomentumSAM"):
            assert rank["kept"][f"{name} own"] < TOLERANCE
            assert "every process must save and load its own file" in rank["kept"][f"{name} other"]


def test_a_part_of_a_model_inside_its_forward(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "self.trainer.strategy.model" in rank["inside"]["part"]


def test_a_closure_whose_model_is_wrapped_elsewhere(ranks: list[dict[str, Any]]) -> None:
    """DDP would silently average the gradients of the ascent."""
    for rank in ranks:
        messages = rank["unwrapped"]
        assert "pass the wrapped model" in messages["local"]
        assert messages["plain"] == messages["global"] == ""


def test_uneven_inputs(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["uneven"]["local"] for rank in ranks}) == 1  # the replicas are still equal
    for rank in ranks:
        for case in ("global", "gsam"):
            assert "join()" in rank["uneven"][case]
            assert "scope='local'" in rank["uneven"][case]
