"""Hooks of the documentation site: formulas become MathML, and nothing is loaded from elsewhere.

MathML is read by browsers themselves, so that the site shows formulas without a script and without a network.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)
_SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
_REMOTE = re.compile(
    r'<script(?: [^>]*src="https?://[^>]*>|[^>]*type="module"[^>]*>[^<]*https?://).*?</script>', re.DOTALL
)
"""What notebooks would load for formulas and drawings that these have none of: MathJax, Mermaid."""


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turn every formula to MathML, and take out what a notebook's page would load."""
    if page.file.src_uri.endswith(".ipynb"):
        return _REMOTE.sub("", content)
    return _FORMULA.sub(lambda found: _mathml(found[3], found[2] == "[", page.file.src_uri), content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Point the search of pages opened from disk to our own script."""
    return output.replace(
        _SHIM, f'<script src="{"../" * page.url.count("/")}theme/frame-worker.js"></script>'
    )


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """Take the search's script out of the 404 page, which may be shown at any depth."""
    return output_content.replace(_SHIM, "")


def _mathml(formula: str, block: bool, where: str) -> str:
    made = convert(html.unescape(formula).strip(), display="block" if block else "inline")
    unknown = re.search(r"<m\w+>\\\w+", made)
    if unknown:
        raise PluginError(f"{where}: {unknown[0].split('>')[1]} has no MathML in {formula!r}")
    return f'<div class="formula">{made}</div>' if block else made
