"""A release: one version everywhere, a complete source archive, workflows that match the project."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import deltasam
from helpers.data import REPOSITORY
from helpers.empty_environment import build

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check() -> ModuleType:
    pytest.importorskip("tomllib")  # the release workflow has Python 3.11
    return tool("check_release")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that can be released as v1.2.3."""
    urls = "\n".join(f'{name} = "https://example.org/a/b"' for name in ("Issues", "Changelog", "Documentation"))
    files = {
        "pyproject.toml": f'[project]\nversion = "1.2.3"\n[project.urls]\nRepository = "https://example.org/a/b"\n{urls}\n',
        "src/deltasam/__init__.py": '__version__ = "1.2.3"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
        "codemeta.json": '{"version": "1.2.3"}',
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - today\n\n- New.\n\n## [1.2.2]\n\n- Old.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_file_names_the_same_version(check: ModuleType) -> None:
    assert set(check.versions(REPOSITORY).values()) == {deltasam.__version__}


def test_a_complete_project_can_be_released(check: ModuleType, project: Path) -> None:
    assert not check.problems(project, "v1.2.3", "https://example.org/a/b/")
    assert check.notes(project, "1.2.3") == "- New."


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("CITATION.cff", "\nversion: 1.2.3", "\nversion: 1.2.2", "CITATION.cff: version '1.2.2', but"),
        ("src/deltasam/__init__.py", "__version__", "version", "__init__.py: version ''"),
        ("CHANGELOG.md", "[1.2.3]", "[Next]", "no section [1.2.3]"),
        ("pyproject.toml", "Issues", "Bugs", "project.urls has no Issues"),
        ("pyproject.toml", 'Repository = "https://example.org/a', 'Repository = "https://example.org/c', "but this"),
    ],
)  # fmt: skip
def test_what_prevents_a_release_is_named(
    check: ModuleType, project: Path, file: str, old: str, new: str, message: str
) -> None:
    path = project / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    (found,) = check.problems(project, "v1.2.3", "https://example.org/a/b")
    assert message in found


def test_the_site_keeps_every_version(tmp_path: Path) -> None:
    publish = tool("publish_docs").publish
    html, site = tmp_path / "html", tmp_path / "site"
    html.mkdir()
    site.mkdir()

    def add(version: str) -> None:
        (html / "index.html").write_text(version)
        publish(html, site, version)

    add("dev")
    assert 'url=dev/"' in (site / "index.html").read_text()
    (html / "old.html").touch()
    add("0.9.0")
    (html / "old.html").unlink()
    add("0.10.0")
    add("0.9.1")  # a fix of an older version is not the stable one
    assert (site / "stable/index.html").read_text() == "0.10.0"
    assert not (site / "stable/old.html").exists()
    assert (site / "0.9.0/index.html").read_text() == "0.9.0"
    assert 'url=stable/"' in (site / "index.html").read_text()
    listed = re.findall(r'href="([^"]+)/"', (site / "versions.html").read_text())
    assert listed == ["0.10.0", "0.9.1", "0.9.0", "dev"]
    with pytest.raises(ValueError, match=r"version '\.\./x'"):
        publish(html, site, "../x")


def test_the_workflows_test_the_pythons_that_the_metadata_names() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    assert workflow["jobs"]["quick"]["strategy"]["matrix"]["python"] == named
    (oldest,) = re.findall(r'^requires-python = ">=(3\.\d+)"', text, flags=re.MULTILINE)
    assert oldest == named[0]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists_with_few_rights(path: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] in ({}, {"contents": "read"})  # jobs ask for more, one by one
    for name, job in workflow["jobs"].items():
        assert "uses" in job or "timeout-minutes" in job, name
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job.get("steps", ()):
            command = step.get("run", "")
            for target in re.findall(r"^make (\S+)", command, flags=re.MULTILINE):
                for library in matrix.get("libraries", [""]):
                    rule = target.strip('"').replace("$LIBRARIES", library)
                    assert re.search(rf"^{re.escape(rule)}:", makefile, flags=re.MULTILINE), rule
            for script in re.findall(r"python (\S+\.py)", command):
                assert (REPOSITORY / script).is_file(), script
            assert "${{" not in command, "text from outside belongs to env, where the shell does not interpret it"


@pytest.mark.slow
def test_the_source_archive_has_every_file(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    with tarfile.open(build("sdist", tmp_path)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in listed.stdout.splitlines() if not name.startswith(".ci/")} <= packed
