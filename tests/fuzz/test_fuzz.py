"""Generated configurations, batches and files: each gives a correct result or a clear error.

``make fuzz`` runs many more examples than the test suite does (``DELTASAM_FUZZ`` is their number).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasam import MicroBatches
from deltasam.integrations._state import load_state, save_state
from deltasam.integrations.storage import StorageError, seal, sealed
from deltasam.lab.catalogue import METHODS
from deltasam.lab.experiments import ConfigError, Result, RunConfig, resolve
from deltasam.methods import FunctionalSAM
from deltasam.per_instance import InstancesMixedError, UncoveredError
from deltasam.speed.splitting import Splitting
from helpers.problems import Outputs

EXAMPLES = int(os.environ.get("DELTASAM_FUZZ", "60"))
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
pytestmark = pytest.mark.filterwarnings("ignore")

# -- configurations ---------------------------------------------------------------------------------------------------

WHOLE = RunConfig.from_plain({"task": "mrpc", "model": "bert-base-cased", "method": "delta-sam"}).to_plain()
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(
    ["sam", "mrpc", "RDrop", "all", "local", "epoch", -1, 0, 1e400, "1e-3", "../x", "!!python/object:os.system"]
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def paths(plain: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [prefix] if prefix else []
    if isinstance(plain, dict):
        for key, value in plain.items():
            found += paths(value, (*prefix, key))
    return found


PATHS = paths(WHOLE)


def clear(error: Exception) -> None:
    """Checks that a message is neither empty nor a traceback."""
    text = str(error)
    assert len(text) > 10
    assert "Traceback" not in text


def changed(plain: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(plain))
    here = copy
    for key in path[:-1]:
        here = here.setdefault(key, {}) if isinstance(here, dict) else {}
        if not isinstance(here, dict):
            return copy
    here[path[-1]] = value
    return copy


@fuzzed
@given(st.lists(st.tuples(st.sampled_from(PATHS), values), min_size=1, max_size=3), st.text(max_size=6), st.booleans())
def test_configurations(changes: list[tuple[tuple[str, ...], Any]], key: str, add: bool) -> None:
    plain = WHOLE
    for path, value in changes:
        plain = changed(plain, (*path, key) if add else path, value)
    try:
        config = RunConfig.from_plain(plain)
    except ConfigError as error:
        clear(error)
    else:
        assert RunConfig.from_plain(config.to_plain()).run_id == config.run_id


@fuzzed
@given(
    st.sampled_from(PATHS),
    st.text(max_size=20) | st.sampled_from(["[", "{a: ", "!!python/name:os", "&a *a", "0x", "\t"]),
)
def test_settings(path: tuple[str, ...], text: str) -> None:
    options = {"task": "mrpc", "model": "bert-base-cased"}
    try:
        resolve(preset=None, file=None, method=None, options=options, settings=(f"{'.'.join(path)}={text}", text))
    except ConfigError as error:
        clear(error)


@fuzzed
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_configuration_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        RunConfig.read(path)
    clear(raised.value)


# -- files ------------------------------------------------------------------------------------------------------------


@st.composite
def damage(draw: Any) -> Callable[[bytes], bytes]:
    where, bit, cut = draw(st.integers(0, 10**6)), draw(st.integers(0, 7)), draw(st.booleans())
    extra = draw(st.binary(max_size=8))

    def apply(content: bytes) -> bytes:
        place = where % max(1, len(content))
        if cut:
            return content[:place] + extra
        return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :] if content else extra

    return apply


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_state(folder, "method_state", {"steps": 3, "gv": {"w": torch.arange(50.0)}, "list": [1, 2.5, None, True]})
    (folder / "config.yaml").write_text(RunConfig.from_plain(WHOLE).to_yaml())
    seal(folder, "complete.json", {"seconds": 2.0})
    return folder


@fuzzed
@given(st.sampled_from(["method_state.json", "method_state.safetensors", "config.yaml", "complete.json"]), damage())
def test_damaged_files(files: Path, name: str, spoil: Callable[[bytes], bytes]) -> None:
    path = files / name
    whole = path.read_bytes()
    try:
        path.write_bytes(spoil(whole))
        same = path.read_bytes() == whole
        for read in (
            lambda: sealed(files, "complete.json"),
            lambda: load_state(files, "method_state", torch.device("cpu")),
            lambda: RunConfig.read(files / "config.yaml"),
            lambda: Result.read(path),
        ):
            try:
                read()
            except (StorageError, ConfigError) as error:
                clear(error)
        if not same and name != "complete.json":
            with pytest.raises(StorageError):
                sealed(files, "complete.json")
    finally:
        path.write_bytes(whole)


# -- batches ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embeddings(ids).mean(1))


def no_memory(losses: Tensor) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


SPOILED: dict[str, Callable[[Tensor], Any]] = {
    "as it should be": lambda x: x,
    "scalar": lambda x: x.mean(),
    "column": lambda x: x.unsqueeze(1),
    "integers": lambda x: x.long(),
    "detached": lambda x: x.detach(),
    "none": lambda x: None,
    "number": lambda x: 0.5,
    "empty": lambda x: x[:0],
    "nan": lambda x: x * float("nan"),
    "infinite": lambda x: x * float("inf"),
    "zero": lambda x: x * 0,
    "huge": lambda x: x * 1e38,
    "one fewer": lambda x: x[1:],
    "no memory": no_memory,
}


@fuzzed
@given(
    st.sampled_from(sorted(METHODS)), st.sampled_from(sorted(SPOILED)), st.integers(0, 5), st.integers(1, 4),
    st.integers(1, 6), st.booleans(), st.sampled_from(["shared", "independent"]), st.sampled_from(["all", "norms"]),
    st.booleans(),
)  # fmt: skip
def test_batches(
    name: str, spoiled: str, size: int, length: int, at: int, split: bool, randomness: str, params: str, halve: bool
) -> None:
    torch.manual_seed(size)
    model = Net().train()
    options = {"embeddings": "embeddings"} if hasattr(METHODS[name](), "embeddings") else {}
    method = METHODS[name](randomness=randomness, params=params, **options)
    calls = 0

    def objective(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return SPOILED[spoiled](losses) if calls == at else losses

    batch: Any = (torch.randint(7, (size, length)), torch.randint(2, (size,)))
    if split and size > 1:
        batch = MicroBatches([(batch[0][:1], batch[1][:1]), (batch[0][1:], batch[1][1:])])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    earlier = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for key, p in model.named_parameters():
        p.grad = earlier[key].clone()
    try:
        used = Outputs(objective) if isinstance(method, FunctionalSAM) else objective
        step = (Splitting(method) if halve else method).backward(model, batch, used)
    except (ValueError, TypeError, InstancesMixedError, UncoveredError, torch.OutOfMemoryError) as error:
        clear(error)
        if halve:  # a failed attempt leaves no gradient
            assert all(torch.equal(p.grad, earlier[key]) for key, p in model.named_parameters() if p.grad is not None)
    else:
        assert step.losses.ndim == 1
        assert step.forwards >= 1
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(p.requires_grad and type(p) is nn.Parameter for p in model.parameters())
    assert state.shape == torch.get_rng_state().shape
