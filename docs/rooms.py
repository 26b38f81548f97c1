"""The rooms of the package for ``layers.md``: a picture and tables, from the contract in pyproject.toml.

The description of a room is the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
STYLE = """
.rooms { max-width: 46rem; width: 100%; height: auto; display: block; margin: 1.2rem auto; }
.rooms text { font: 13px system-ui, sans-serif; fill: var(--color-foreground-primary, currentColor); }
.rooms .code { font: 600 14px ui-monospace, monospace; }
.rooms rect { fill: var(--color-background-secondary, none); stroke: var(--color-foreground-muted, gray); rx: 6px; }
"""


def layers(contract: str = "rooms") -> list[list[str]]:
    """Returns the rooms of a contract from the top; rooms in one row may import each other."""
    text = (REPOSITORY / "pyproject.toml").read_text()  # Python 3.10 has no tomllib
    block = text.split(f'id = "{contract}"')[1].split("\nlayers = [")[1].split("\n]")[0]
    return [re.findall(r"\w+", line) for line in re.findall(r'"([^"]+)"', block)]


def purpose(room: str, inside: str = "") -> str:
    """Returns the first sentence of a room's docstring."""
    folder = REPOSITORY / "src" / "deltasam" / inside
    path = folder / room / "__init__.py"
    source = (path if path.is_file() else folder / f"{room}.py").read_text()
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())
    return text.rstrip(".")


def picture() -> str:
    """Returns the rooms, stacked, as SVG."""
    rows = []
    for k, row in enumerate(layers()):
        for j, room in enumerate(row):
            width = 700 / len(row)
            x, y = 10 + j * width, 10 + 42 * k
            note = re.sub(r"``|:\w+:`~?[\w.]*?(\w+)`", r"\1", purpose(room))
            note = note if len(row) == 1 and len(note) < 82 else ""
            rows.append(
                f'<rect x="{x:g}" y="{y}" width="{width - 8:g}" height="34"/>'
                f'<text class="code" x="{x + 12:g}" y="{y + 22}">{room}</text>'
                f'<text x="{x + 130:g}" y="{y + 22}">{html.escape(note)}</text>'
            )
    height = 20 + 42 * len(layers())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="rooms" viewBox="0 0 720 {height}" role="img" '
        f'aria-label="The rooms of the package"><style>{STYLE}</style>{"".join(rows)}</svg>'
    )


def table(contract: str, inside: str = "") -> str:
    """Returns the rooms of a contract and their descriptions as a Markdown table."""
    lines = ["| room | what is in it |", "|---|---|"]
    for room in (room for row in layers(contract) for room in row):
        note = re.sub(r":\w+:`~?[\w.]*?(\w+)`", r"`\1`", purpose(room, inside)).replace("``", "`")
        lines.append(f"| `{inside.replace('/', '.')}{'.' * bool(inside)}{room}` | {note} |")
    return "\n".join(lines)


def fill(text: str) -> str:
    """Replaces the comments of the page by the picture and the tables."""
    text = text.replace("<!-- picture -->", f"```{{raw}} html\n{picture()}\n```")
    return re.sub(r"<!-- table (\w+)(?: of (\w+))? -->", lambda found: table(found[1], found[2] or ""), text)
