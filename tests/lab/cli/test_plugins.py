"""Plugins on the command line, and plugins that cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deltasam.lab.cli import main
from helpers.pretrained import bert_folder

PLUGIN = Path(__file__).parents[2] / "helpers" / "plugin.py"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SMALL = {"batch": {"size": 8}, "schedule": {"steps": 2}, "evaluate_every": "end", "checkpoint_every": "never"}


def deltasam(*words: object, plugins: object = PLUGIN, path: object = "") -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, with plugins and a folder to import from."""
    paths = [str(path), os.environ.get("PYTHONPATH", "")]
    more = {"DELTASAM_PLUGINS": str(plugins), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "deltasam", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, **more}, check=False)


class Here:
    """Runs the command in this process, which has imported everything already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: object, plugins: object = PLUGIN) -> subprocess.CompletedProcess[str]:
        self.monkeypatch.setenv("DELTASAM_PLUGINS", str(plugins))
        self.monkeypatch.setenv("COLUMNS", "200")
        self.capsys.readouterr()
        code = main([str(word) for word in words])
        return subprocess.CompletedProcess(words, code, *self.capsys.readouterr())


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plugins_forgotten: None,
    libraries_speak_again: None,
) -> Here:
    return Here(monkeypatch, capsys)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("models") / "bert")


@pytest.mark.slow
def test_train_and_evaluate_with_plugins(bert: Path, tmp_path: Path, here: Here) -> None:
    run = tmp_path / "run"
    own = ("method.weighting={name: by-loss, power: 2}", "regularisers=[Times]")
    rest = ("batch.size=8", "schedule.steps=2", "checkpoint_every=never")
    options = ("--task", "few-docstrings", "--model", bert, "--method", "delta-sam", "--output", run)
    done = here("train", *options, *own, *rest)
    assert done.returncode == 0, done.stderr
    found = json.loads((run / "result.json").read_text())
    assert (found["task"], found["method"], found["train_rows"]) == ("few-docstrings", "DeltaSAM+Times", 24)
    assert found["config"]["method"]["weighting"] == {"name": "ByLoss", "power": 2.0}
    assert found["config"]["regularisers"] == [{"name": "Times"}]
    assert (found["forward_passes"], found["backward_passes"]) == (4, 4)  # it has no probe
    assert found["environment"]["plugins"] == "plugin.py"

    few = ("--rows", 4, "--batch-size", 4, "--json", "--weightings", "by-loss", "{name: ByLoss, power: 2}")
    done = here("analyze", "alignment", run, *few)
    names = [line["method"] for line in json.loads(done.stdout)]
    assert names == ["PerInstanceSAM", "SAM", "DeltaSAM ByLoss", "DeltaSAM ByLoss(power=2)"], done.stderr
    done = deltasam("evaluate", run, "--rows", 20, "--json")  # in a process that must import them first
    assert json.loads(done.stdout)["metrics"] == pytest.approx(found["metrics"]), done.stderr


@pytest.mark.slow
def test_a_sweep_of_two_processes(forkserver: None, bert: Path, tmp_path: Path, here: Here) -> None:
    sweep = {"tasks": ["few-docstrings"], "models": [str(bert)], "methods": ["wide-sam", "erm"], "common": SMALL}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(sweep))
    done = here("sweep", tmp_path / "own.yaml", "--output", tmp_path / "out", "--jobs", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 results, 2 runs trained now, 0 failed" in done.stdout
    found = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/result.json")]
    assert sorted(result["method"] for result in found) == ["ERM", "WideSAM"]


def test_lists_and_measurements(here: Here) -> None:
    listed = deltasam("list", "methods", plugins="helpers.plugin", path=PLUGIN.parents[1])
    assert "SAM by another name." in listed.stdout, listed.stderr
    assert "`deltasam list regularisers`" in listed.stdout
    assert "few-docstrings" in here("list", "tasks").stdout
    rows = {line.split()[0]: line.split() for line in here("list", "regularisers").stdout.splitlines()}
    assert {"RDrop", "R3F", "SMART", "VAT", "EmbeddingNoise", "Times"} <= set(rows)
    assert (rows["RDrop"][1], rows["SMART"][1]) == ("2/2", "4/3")
    short = "--no-third-party --no-memory --rounds 1 --warmup 0 --seconds 0.01"
    small = "--layers 1 --hidden 16 --heads 2 --length 8"
    step = here("bench", "step", "--methods", "wide-sam", *short.split(), *small.split())
    assert "WideSAM" in step.stdout, step.stderr


def installed(folder: Path, module: str) -> Path:
    """Writes an installed package with an entry point."""
    facts = folder / "own_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[deltasam.plugins]\nown = {module}\n")
    return folder


def test_the_entry_point_of_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text(PLUGIN.read_text())
    listed = deltasam("list", "methods", plugins="", path=installed(tmp_path, "own_module"))
    assert "WideSAM" in listed.stdout, listed.stderr


def test_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    done = deltasam("list", "methods", plugins="", path=installed(tmp_path, "missing_module"))
    error = "missing_module, a plugin of the installed package own-plugin, cannot be imported (ModuleNotFoundError: "
    assert done.returncode == 2
    assert error in done.stderr
    assert done.stderr.strip().endswith("; update or uninstall that package")


TAKEN = (
    "from dataclasses import dataclass\nfrom deltasam import SAM as Base\n"
    "from deltasam.lab.experiments import register\n@register\n@dataclass(frozen=True)\nclass SAM(Base):\n    pass\n"
)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import not_there\n", "ModuleNotFoundError: No module named 'not_there', own.py line 1"),
        ("def f(:\n", "SyntaxError: "),
        ("import sys\nsys.exit('no')\n", "SystemExit: no, own.py line 2"),
        ("import json\njson.loads('{')\n", "JSONDecodeError: "),
        (TAKEN, "the name 'SAM' is taken by the method SAM of deltasam.methods._sam; choose another"),
        (None, "FileNotFoundError: there is no "),
    ],
)
def test_a_plugin_that_cannot_be_imported(tmp_path: Path, here: Here, code: str | None, cause: str) -> None:
    file = tmp_path / "own.py"
    if code is not None:
        file.write_text(code)
    done = here("train", "--task", "docstrings", "--model", "minilm-l6", "--dry-run", plugins=file)
    assert done.returncode == 2
    assert done.stderr.startswith("deltasam train: DELTASAM_PLUGINS: own.py cannot be imported (")
    assert cause in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_a_plugin_that_does_not_exist(here: Here) -> None:
    done = here("train", "--task", "docstrings", "--model", "minilm-l6", "--dry-run", plugins="not_there.at_all")
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert "DELTASAM_PLUGINS: not_there.at_all cannot be imported (there is no module not_there: " in done.stderr


def test_help_imports_no_plugin() -> None:
    for words in (["--help"], ["train", "--help"], ["--version"]):
        done = deltasam(*words, plugins="not_there")
        assert (done.returncode, done.stderr) == (0, "")


def test_a_run_with_an_unknown_method_suggests_a_plugin(bert: Path, tmp_path: Path, here: Here) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom deltasam.lab.experiments import register\nfrom deltasam import ERM\n"
        "@register\n@dataclass(frozen=True, kw_only=True)\nclass Quaint(ERM):\n    rho: float = 0.1\n"
    )
    listed = here("list", "methods", plugins=own)
    assert "Quaint" in listed.stdout
    assert "Quaint(*" not in listed.stdout  # written by dataclass if there is no docstring
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(
        yaml.safe_dump({"task": "docstrings", "model": str(bert), "method": "zz"})
    )
    error = here("evaluate", tmp_path / "run", plugins="").stderr
    assert f"{tmp_path}/run/config.yaml: method: there is no 'zz'; there are ERM" in error
    assert "add its file to DELTASAM_PLUGINS" in error
