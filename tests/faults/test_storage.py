"""Atomic writes, and detection of altered files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasam.integrations import storage
from deltasam.integrations._state import load_state, save_state
from deltasam.integrations.storage import StorageError, explain_storage_errors, seal, sealed, write_text

CPU = torch.device("cpu")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with (
        pytest.raises(StorageError, match=r"disk is full.*another folder"),
        explain_storage_errors(tmp_path),
    ):
        write_text(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_read_only_folder(tmp_path: Path, number: int) -> None:
    with pytest.raises(StorageError, match="permissions"), explain_storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_storage_errors(tmp_path):
        (tmp_path / "nothing").read_text()


def test_sealed_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "sub" / "more").write_text("x")
    seal(tmp_path, "complete.json", {"seconds": 1.5})
    assert sealed(tmp_path, "complete.json") == {"seconds": 1.5}
    (tmp_path / "sub" / "more").unlink()
    with pytest.raises(StorageError, match="more: missing"):
        sealed(tmp_path, "complete.json")


@pytest.mark.parametrize("victim", ["weights", "complete.json"])
def test_every_alteration_is_found(tmp_path: Path, victim: str) -> None:
    (tmp_path / "weights").write_bytes(bytes(range(256)))
    seal(tmp_path, "complete.json", {})
    path = tmp_path / victim
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(60):
        if chance.random() < 0.5:
            altered = whole[: chance.randrange(len(whole))]
        else:
            place, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
            altered = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
        path.write_bytes(altered)
        if victim == "weights":
            with pytest.raises(StorageError, match="weights: truncated or altered"):
                sealed(tmp_path, "complete.json")
        else:  # a changed space does not change the content
            with suppress(StorageError):
                assert sealed(tmp_path, "complete.json") == {}
    path.write_bytes(whole)
    sealed(tmp_path, "complete.json")


def test_state_of_methods(tmp_path: Path) -> None:
    state = {"steps": 3, "gv": {"w": torch.arange(5.0)}}
    save_state(tmp_path, "method_state", state)
    found = load_state(tmp_path, "method_state", CPU)
    assert found is not None
    assert found["steps"] == 3
    assert torch.equal(found["gv"]["w"], state["gv"]["w"])
    assert {p.name for p in tmp_path.iterdir()} == {"method_state.json", "method_state.safetensors"}
    assert load_state(tmp_path, "another", CPU) is None
    tensors = tmp_path / "method_state.safetensors"
    whole = tensors.read_bytes()
    for altered in (whole[:-3], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        tensors.write_bytes(altered)
        with pytest.raises(StorageError, match="earlier checkpoint"):
            load_state(tmp_path, "method_state", CPU)


def test_sparse_tensors_stay_sparse(tmp_path: Path) -> None:
    """LookSAM stores the gradient of a sparse embedding, and SparseAdam needs it sparse."""
    kept = torch.sparse_coo_tensor([[4, 1, 4]], torch.ones(3, 2), (9, 2), check_invariants=True)
    save_state(tmp_path, "method_state", {"gv": {"w": kept}})
    found = load_state(tmp_path, "method_state", CPU)
    assert found is not None
    assert found["gv"]["w"].is_sparse
    assert torch.equal(found["gv"]["w"].to_dense(), kept.to_dense())
    file = tmp_path / "method_state.json"
    altered = json.loads(file.read_text())
    altered["gv"]["w"]["$sparse"][2] = [3, 2]  # has no fourth row
    file.write_text(json.dumps(altered))
    with pytest.raises(StorageError, match="truncated or altered"):
        load_state(tmp_path, "method_state", CPU)


def test_state_never_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "ran").write_text, ("x",))

    save_state(tmp_path, "method_state", {"steps": 1})
    for name in ("method_state.json", "method_state.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(StorageError):
            load_state(tmp_path, "method_state", CPU)
    assert not (tmp_path / "ran").exists()


def test_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert storage.checksum(tmp_path / "a").startswith("ba7816bf8f01cfea")
