"""``python -m deltasam.lab.pages [--check] [--only NAME ...]``: writes the tables and figures of the documentation."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from deltasam.lab.pages.contents import CONTENTS
from deltasam.lab.pages.figures import not_drawn
from deltasam.lab.pages.prose import problems

ROOT = Path(__file__).parents[4]


def differs(name: str, committed: str, made: str) -> bool:
    """Whether a file changed. Figures are compared by the digest of their data: drawings differ between platforms."""
    if name.endswith(".svg"):
        committed, made = (str(re.findall("data [0-9a-f]{64}", text)) for text in (committed, made))
    return committed != made


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files, or names those that would change."""
    parser = argparse.ArgumentParser(prog="python -m deltasam.lab.pages", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if something is stale",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these files", choices=list(CONTENTS))
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout, with results/ and docs/")
    options = parser.parse_args(argv)
    folder = options.root / "docs" / "_generated"
    folder.mkdir(exist_ok=True)
    wanted = options.only or list(CONTENTS)
    with not_drawn() if options.check else nullcontext():
        made = {name: CONTENTS[name](options.root / "results").rstrip() + "\n" for name in wanted}
    old = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    changed = [name for name, text in made.items() if name not in old or differs(name, old[name], text)]
    unknown = sorted(old.keys() - CONTENTS.keys())
    if options.check:
        for name in [*changed, *unknown]:
            print(f"docs/_generated/{name} is not what results/ gives; run python -m deltasam.lab.pages")
        wrong = [] if options.only else problems(options.root)
        print(*wrong, sep="\n", end="\n" if wrong else "")
        return int(bool(changed or unknown or wrong))
    changed = options.only or changed  # a figure that was asked for is drawn again, whatever its data
    for name in changed:
        (folder / name).write_text(made[name], encoding="utf-8")
    for name in unknown:
        (folder / name).unlink()
    print(f"{len(changed)} of {len(made)} files written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
