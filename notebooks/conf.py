"""Sphinx configuration of the book: the notebooks as they are committed, no network to build or read it."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # autodoc imports attnlib
# `lesson` wants Triton's interpreter without a GPU, and torch.distributed loads Triton before it.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.nn.attention.flex_attention  # noqa: E402, F401  (signatures name its BlockMask)

project = "attnlib"
author = "The attnlib authors"
copyright = "2026, The attnlib authors; text CC BY 4.0, code MIT"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
exclude_patterns = ["solutions", "checks", "**.ipynb_checkpoints"]

# Notebooks: outputs come from the committed files, a build never runs a kernel.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # the default loads require.js from a CDN
nb_mime_priority_overrides = [
    ("html", "image/svg+xml", 0),  # plotting.publish() shows SVG and PDF of the same figure
]

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_render_markdown_format = "myst"  # tables and math in Markdown outputs too

# MathJax 3.2.2, vendored: the one file that holds every TeX extension (tex-svg.js loads \boldsymbol later).
mathjax_path = "mathjax/tex-svg-full.js"

default_role = "code"  # `name` in a docstring is code
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "sphinx_book_theme"
html_title = "attnlib"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_use_index = False  # the search does it, and the index is wider than a phone
html_domain_indices = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the search field is in the side bar already
}
