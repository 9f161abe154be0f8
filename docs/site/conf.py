"""How Sphinx makes the site: ``make site``.

The source folder is the repository, so that links between pages lead to the same files there as in the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

project = "zero_opt"
author = "zero_opt developers"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "dist", "native", "out", "release", "test", "zero_opt", "*.egg-info"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
# Results begin with a heading of the third level: benchmarks write several of them into one file.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
# Signatures have the types. Defaults stay as they are written.
autodoc_preserve_defaults = True
napoleon_use_ivar = True
maximum_signature_line_length = 100

highlight_language = "none"  # of a block that names none
html_theme = "furo"
_NARROW = {"code-font-size": "75%"}  # lines of 88 characters fit
html_theme_options = {"light_css_variables": _NARROW, "dark_css_variables": _NARROW}
# Lines that a diff adds and removes have colors of their own in both.
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_title = "zero_opt"
html_copy_source = False
html_show_copyright = False
# A page at the root of the site that leads to docs/index.html.
html_extra_path = ["root"]
