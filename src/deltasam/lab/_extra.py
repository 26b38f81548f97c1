"""Imported first by the packages that need the extra ``lab``: experiments, sweeps and report.

The tasks and the benchmarks of ``deltasam.lab.bench`` do without it.
"""

from importlib.util import find_spec

if missing := [name for name in ("numpy", "pydantic", "transformers", "yaml") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"experiments, sweeps and reports need {', '.join(missing)}, which the extra `lab` installs: "
        'pip install "deltasam[lab]". The methods themselves need only torch: from deltasam import SAM.',
        name=missing[0],
    )
