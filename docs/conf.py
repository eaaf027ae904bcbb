"""The documentation as a site: ``tox run -e docs`` builds it into .tox/docs/html."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [HERE, ROOT, os.path.join(ROOT, "tests")]

import compat  # noqa: E402

project = "keras-gpu-compat"
version = release = compat.__version__
# Messages are shown as they are printed.
smartquotes = False
html_title = "{} {}".format(project, version)
html_theme = "furo"
html_copy_source = False
html_show_copyright = False

# Finds the entry of a message that is pasted into the search.
html_static_path = ["search.js", "site.css"]
html_css_files = ["site.css"]
html_js_files = [("search.js", {"defer": "defer"})]

# extension.py is in this folder.
extensions = ["myst_parser", "sphinx.ext.autodoc", "extension"]
exclude_patterns = ["jobs"]
# The anchors that a code host gives to headings.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
# What is written in the signatures are names for a type checker, most of which have no page.
autodoc_typehints = "none"
nitpicky = True
# Python's own documentation cannot be reached where the site is built without a network.
nitpick_ignore_regex = [("py:.*", r"(?!compat\b).*")]
