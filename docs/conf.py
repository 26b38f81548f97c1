"""Sphinx: MyST pages, notebooks, the API from docstrings, furo. Built by ``make docs``; warnings are errors."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

import deltasam

sys.path.insert(0, str(Path(__file__).parent))
import rooms

project = "deltasam"
author = "The deltasam authors"
project_copyright = "2026, The deltasam authors"
version = release = deltasam.__version__

extensions = [
    "myst_nb",  # loads myst_parser
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
exclude_patterns = ["_build", "_generated"]  # pages include the generated tables

html_theme = "furo"
html_title = f"deltasam {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "substitution"]
# The answers on the front page of the results: {{ name }} in the text.
myst_substitutions = json.loads((Path(__file__).parent / "_generated" / "answers.json").read_text(encoding="utf-8"))
myst_heading_anchors = 3
pygments_dark_style = "github-dark"

# The notebooks contain their outputs, so that a build takes no training. `make docs-full` executes them.
nb_execution_mode = "force" if os.environ.get("DELTASAM_EXECUTE_NOTEBOOKS") else "off"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Relations", "notes_style"), ("Cost", "notes_style")]
# List the attributes of a dataclass only once, as variables of the class.
napoleon_use_ivar = True

_BAR = re.compile(r"<mo[^>]*>([|‖])</mo>")  # keeps the bars of a norm as high as its letters, and close to them


def _formula(node: nodes.Element, *, block: bool) -> str:
    """Returns MathML, which browsers render natively: the pages need neither a script nor a network."""
    text = node.astext()
    known = text.replace(r"\textstyle\sum", r"{\textstyle\sum}").replace(r"\big|", "|")  # docutils does not know these
    try:
        found = tex2mathml(known, as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s: %s", error, text, location=node)
        return f"<code>{html.escape(text)}</code>"
    return _BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', found)


def _inline(page: Any, node: nodes.math) -> None:
    page.body.append(_formula(node, block=False))
    raise nodes.SkipNode


def _block(page: Any, node: nodes.math_block) -> None:
    page.body.append(f'<div class="math">{_formula(node, block=True)}</div>')
    raise nodes.SkipNode


def _fill_rooms(app: Any, page: str, source: list[str]) -> None:
    if page == "layers":
        source[0] = rooms.fill(source[0])


def setup(app: Any) -> None:
    """Registers the formulas without MathJax and the generated page of the rooms."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.connect("source-read", _fill_rooms)
