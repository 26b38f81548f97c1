"""Imported first by the packages that need the extra ``lab``: experiments, sweeps and report.

The benchmarks of ``deltasam.lab.bench`` do without it, the tasks with numpy alone.
"""

from importlib.util import find_spec

_PACKAGES = {"numpy": "numpy", "pydantic": "pydantic", "transformers": "transformers", "yaml": "pyyaml"}

if missing := [name for name in _PACKAGES if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"experiments, sweeps and reports need {', '.join(_PACKAGES[name] for name in missing)}: "
        'pip install "deltasam[lab]". The methods themselves need only torch: from deltasam import SAM.',
        name=missing[0],
    )
