"""Sphinx configuration of the site; `docs/build.py` writes the sources and runs Sphinx."""

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

from docstrings import to_rst
from reference import links
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain

from hf_ctxmodels import __version__

project = "hf_ctxmodels"
author = "the authors of hf_ctxmodels"
copyright = "the authors of hf_ctxmodels; Apache-2.0"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_parts", "comparison/table.md", "notebooks/runs"]
smartquotes = False  # would change the dashes of flags

# Markdown: heading anchors as on GitHub
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Notebooks are executed in each build, offline and with the commands of this environment.
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the notebooks run at the same time
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# Only code is copied, without its output.
copybutton_selector = "div:not(.output) > div.highlight pre"

# API reference: documented objects in the order of the source
autodoc_default_options = {"members": True, "ignore-module-all": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # docstrings of transformers use another markup
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
toc_object_entries = True

# Pages load no resources from other hosts.
html_theme = "pydata_sphinx_theme"
html_title = f"{project} {release}"
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark as the system
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
_PAGES_WITHOUT_SECTION = ("quickstart", "gallery", "usage", "layers", "tour", "ecosystem", "changelog")
html_sidebars: dict[str, list[str]] = {page: [] for page in _PAGES_WITHOUT_SECTION}
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "back_to_top_button": False,
}


def describe(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Convert the docstring of an object to reStructuredText; classes start with their base classes."""
    text = "\n".join(lines)
    bases = [base.__qualname__ for base in obj.__bases__ if base is not object] if isinstance(obj, type) else []
    if bases:
        text = f"Bases: {', '.join(f'`{base}`' for base in bases)}.\n\n{text}"
    lines[:] = to_rst(text, links()).splitlines()


def make_signature_valid(
    app: Sphinx, what: str, name: str, obj: object, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Replace defaults such as `<factory>`, which are not Python, by `...`.

    Sphinx shows signatures that it cannot parse as plain text, with `~package.module.Class` instead of links.
    """
    try:
        ast.parse(f"def function{signature or '()'}: ...")
    except SyntaxError:
        count = 1
        while count:  # also nested ones, such as `<function <lambda> at 0x7f>`
            signature, count = re.subn(r"<[^<>]*>", "...", signature or "")
    return signature, returns


class IndexedPythonDomain(PythonDomain):
    """The domain of Python objects with a fast search for names that are not documented here, such as `Tensor`.

    Sphinx compares each of them with the names of all objects, which takes minutes for the types in signatures.
    """

    _last_names: tuple[int, set[str]] = (0, set())  # number of objects, and the last parts of their names

    def find_obj(self, env: Any, modname: Any, classname: Any, name: str, *arguments: Any) -> list[tuple[str, Any]]:
        """Find objects, see `PythonDomain.find_obj`."""
        if self._last_names[0] != len(self.objects):
            self._last_names = len(self.objects), {full_name.rpartition(".")[2] for full_name in self.objects}
        if name.removesuffix("()").rpartition(".")[2] not in self._last_names[1]:
            return []
        return super().find_obj(env, modname, classname, name, *arguments)


def setup(app: Sphinx) -> None:
    """Register the conversions of docstrings and signatures, and the domain of Python objects, with Sphinx."""
    app.add_domain(IndexedPythonDomain, override=True)
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", make_signature_valid)
