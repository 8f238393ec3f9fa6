"""Settings of the documentation site: `make docs` builds it with Sphinx, and warnings are errors."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

# In a terminal without colours, and with the width that the pages have.
os.environ |= {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "84"}
sys.path.insert(0, str(Path(__file__).parent))

from generated import write_api_pages, write_commands_page, write_results_pages

import skyformer

project = "Skyformer"
version = release = skyformer.__version__
copyright = "the authors of the Skyformer package, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "images"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # tables of studies begin at level 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
default_role = "code"

html_theme = "furo"
html_title = f"Skyformer {release}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False

_CODE_OR_MARK = re.compile(r"(``.*?``|`.*?`)|([*|\\]|(?<=\w)_(?!\w))")


def _escape_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks: what reStructuredText would read as a mark is escaped."""
    for number, line in enumerate(lines):
        if ">>> " not in line and "... " not in line:
            lines[number] = _CODE_OR_MARK.sub(lambda found: found[1] or "\\" + found[2], line)


def _short_signature(app: object, what: str, name: str, obj: Any, *rest: object) -> tuple[str, None] | None:
    """The settings of a config are listed where it is described; their constraints would fill the page."""
    return ("(**settings)", None) if what == "class" and hasattr(obj, "model_fields") else None


def _link_to_pages(app: object, name: str, source: list[str]) -> None:
    """Links to the tables in results/, which readers of the repository follow, lead to the pages made from them."""
    source[0] = re.sub(r"\(\.\./results/(\w+)/table\.md\)", r"(measured/\1.md)", source[0])


def setup(app: Any) -> None:
    write_results_pages()
    write_commands_page()
    write_api_pages()
    app.connect("autodoc-process-signature", _short_signature)
    app.connect("source-read", _link_to_pages)
    app.connect("autodoc-process-docstring", _escape_docstring, priority=100)
