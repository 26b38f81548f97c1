"""Registered parts of the user: found by name, with the same errors as those of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deltasam import SAM, Classification, Method, Objective, Weighting
from deltasam.lab import plugins
from deltasam.lab.catalogue import METHODS, find_method
from deltasam.lab.experiments import WEIGHTINGS, ConfigError, PluginError, RunConfig, register, resolve
from deltasam.lab.sweeps import LocalPool, Sweep, run_sweep
from deltasam.lab.tasks import TASKS, DocstringTask, find_task
from helpers.pretrained import bert_folder

PLUGIN = Path(__file__).parents[2] / "helpers" / "plugin.py"


pytestmark = pytest.mark.usefixtures("plugins_forgotten")


def make(**sections: Any) -> RunConfig:
    return RunConfig.from_plain({"task": "docstrings", "model": "minilm-l6", **sections})


def test_all_kinds_are_known_and_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, f" {PLUGIN} ,")
    weighting = {"name": "by-loss", "power": 2}
    config = make(
        task="few_docstrings", method={"name": "DeltaSAM", "weighting": weighting}, regularisers=[{"name": "times"}]
    )
    assert (config.task.train_rows, config.method.weighting.power) == (24, 2.0)
    assert config.regularisers[0].wrap(Classification()).factor == 3.0
    again = RunConfig.from_plain(config.to_plain())
    assert (again, again.run_id) == (config, config.run_id)
    assert config.run_name.startswith("few-docstrings-minilm-l6-DeltaSAM-Times-s42-")
    assert config.run_id != replace(config, method=replace(config.method, weighting=WEIGHTINGS["ByLoss"]())).run_id
    assert make(method={"name": "wide-sam", "wide": 3}).run_id != make(method="wide-sam").run_id
    assert find_method("wide_sam").__name__ == "WideSAM"
    assert find_task("few-docstrings").eval_rows == 20


@pytest.mark.parametrize("name", ["My_SAM", "my-sam", "mysam"])
def test_a_name_with_an_underscore_is_found_however_it_is_spelled(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(METHODS, "My_SAM", SAM)
    monkeypatch.setitem(TASKS, "My-SAM", TASKS["rte"])
    assert find_method(name) is SAM
    assert find_task(name) is TASKS["rte"]
    assert make(method=name).method == SAM()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": "wide-smm"}, r"method: there is no 'wide-smm'; did you mean WideSAM\?"),
        ({"method": {"name": "wide-sam", "wid": 1}}, r"method.wid: unknown option of WideSAM; did you mean wide\?"),
        ({"method": {"name": "wide-sam", "wide": "x"}}, r"method.wide='x': .*valid number"),
        ({"method": {"name": "wide-sam", "rho": -1}}, r"method: rho=-1.0 must be"),
        ({"method": {"name": "delta-sam", "weighting": "by-los"}}, r"weighting: .*did you mean ByLoss\?"),
        ({"method": {"name": "delta-sam", "weighting": {"name": "ByLoss", "power": []}}}, r"weighting.power=\[\]: "),
        ({"regularisers": [{"name": "Times", "factr": 1}]}, r"regularisers.0.factr: .*did you mean factor\?"),
        ({"task": "few-docstring"}, r"task: .*did you mean few-docstrings\?"),
    ],
)
def test_mistakes(monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str) -> None:
    monkeypatch.setenv(plugins.VARIABLE, str(PLUGIN))
    with pytest.raises(ConfigError, match=message):
        make(**sections)


def test_a_plugin_is_imported_once_at_the_first_lookup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "counted_plugin,./counted.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = "from pathlib import Path\nwith Path(__file__ + '.log').open('a') as log:\n    log.write('x')\n"
    looks_up = "from deltasam.lab.experiments import resolve\n" + code + "resolve(preset='quickstart')\n"
    (tmp_path / "counted_plugin.py").write_text(looks_up)
    (tmp_path / "counted.py").write_text(code)
    assert not list(tmp_path.glob("*.log"))
    for _ in range(3):
        resolve(preset="quickstart")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.log")} == {
        "counted_plugin.py.log": "x",
        "counted.py.log": "x",
    }
    assert plugins.loaded_plugins() == ["counted_plugin", "counted.py"]


def test_a_broken_plugin_can_be_fixed_without_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine_plugin.py"
    file.write_text(PLUGIN.read_text() + "\n1 / 0\n")
    monkeypatch.setenv(plugins.VARIABLE, str(file))
    for _ in range(2):
        with pytest.raises(PluginError, match=r"ZeroDivisionError: division by zero, mine_plugin.py line \d+\)"):
            make()
    file.write_text(PLUGIN.read_text() + "\n# fixed\n")
    assert make(method="wide-sam").method.rho == 0.01


def test_what_cannot_be_registered() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(SAM):
        pass

    class Bare(SAM):
        more: float = 1.0

    @dataclass(frozen=True, kw_only=True)
    class Unfinished(Weighting):
        pass

    @dataclass(frozen=True)
    class Lonely(Classification):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Typed(SAM):
        strange: Strange = None  # type: ignore[name-defined]  # noqa: F821

    for part, message in (
        (Bare, r"register\(Bare\): must be a dataclass; add @dataclass\(frozen=True\)"),
        (Unfinished, r"register\(Unfinished\): must define probe"),
        (Lonely, r"register\(Lonely\): must have a field `objective`"),
        (Typed, r"register\(Typed\): the type of a field cannot be resolved \(name 'Strange'"),
        (DocstringTask, r"register\(DocstringTask\): must be .* a task object"),
        (dict, r"register\(dict\): must be a class derived from Method, Weighting or Objective"),
        (SAM(), r"register\(SAM\(.*\): must be a class"),
    ):
        with pytest.raises(TypeError, match=message):
            register(part)
    with pytest.raises(ValueError, match="task 'a/b' must have a name"):
        register(replace(TASKS["docstrings"], name="a/b"))
    assert register(Other) is Other
    assert METHODS["Other"] is Other


@pytest.mark.parametrize(
    ("base", "name", "owner"),
    [
        (SAM, "delta_sam", "method DeltaSAM of deltasam.methods._delta_sam"),
        (Weighting, "Uniform", "weighting Uniform of deltasam.weighting._controls"),
    ],
)
def test_a_name_that_is_taken(base: type[Method] | type[Weighting], name: str, owner: str) -> None:
    body = {"probe": lambda self, passes, **more: None, "__annotations__": {}}
    kind = dataclass(frozen=True, kw_only=True)(type(name, (base,), body))
    with pytest.raises(ValueError, match=f"the name {name!r} is taken by the {owner}.*; choose another"):
        register(kind)
    with pytest.raises(ValueError, match="'mrpc' is taken by the task mrpc"):
        register(DocstringTask(name="mrpc"))


def test_a_cell_that_is_run_again_replaces_its_class() -> None:
    def cell() -> type[Objective]:
        @dataclass(frozen=True, kw_only=True)
        class Mine(SAM):
            pass

        return register(Mine)

    first, second = cell(), cell()
    assert METHODS["Mine"] is second is not first
    task = replace(TASKS["docstrings"], name="my-task")
    assert register(register(task)) is task


@pytest.mark.slow
def test_processes_of_a_sweep_know_it_whatever_their_environment(
    forkserver: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The fork server is older than the variable, as after an earlier sweep.
    monkeypatch.chdir(PLUGIN.parent)
    monkeypatch.setenv(plugins.VARIABLE, PLUGIN.name)
    common = {"schedule": {"steps": 2}, "batch": {"size": 8}, "evaluate_every": "end", "checkpoint_every": "never"}
    plain = {"tasks": ["few-docstrings"], "models": [str(bert_folder(tmp_path / "bert"))], "common": common}
    methods = {"wide": "wide-sam", "by loss": {"method": {"name": "delta-sam", "weighting": "by-loss"}}}
    sweep = Sweep.from_plain({**plain, "methods": methods, "keep": "results"}, "own")
    outcome = run_sweep(sweep, tmp_path / "out", LocalPool(workers=2))
    assert outcome.failed == {}
    assert {result.method for _, result in outcome.results} == {"WideSAM", "DeltaSAM"}
    found = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/environment.json")]
    assert [facts["plugins"] for facts in found] == ["plugin.py", "plugin.py"]
