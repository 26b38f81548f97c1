"""``python -m deltasam.cli``: the command without its script on the PATH."""

from __future__ import annotations

import sys

from deltasam.cli._main import main

sys.exit(main())
