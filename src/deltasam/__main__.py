"""``python -m deltasam``: the command without its script on the PATH."""

from __future__ import annotations

import sys

from deltasam.cli import main

sys.exit(main())
