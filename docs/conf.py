"""Sphinx: MyST pages, the API from docstrings, furo. Built by ``make docs``; warnings are errors."""

from __future__ import annotations

import deltasam

project = "deltasam"
author = "The deltasam authors"
project_copyright = "2026, The deltasam authors"
version = release = deltasam.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"deltasam {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
pygments_dark_style = "github-dark"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Relations", "notes_style"), ("Cost", "notes_style")]
# Attributes of a dataclass are listed with their meaning once, as variables of the class, not again one by one.
napoleon_use_ivar = True
