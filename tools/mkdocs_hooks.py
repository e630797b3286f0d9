"""Hooks of the documentation site: formulas become MathML, a few files outside docs/ become pages, all is offline.

Two things are written when the site is built: the page of every command, from the command line, and under each
measurement what its columns mean, quoted from the page of the run folder, which alone says so.

MathML is read by browsers themselves, so that the site shows formulas without a script and without a network.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs loads this file alone, from wherever it is called

from tools import commands  # noqa: E402
from tools.columns import quoted_columns  # noqa: E402

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "theodolite/assets/embedded/README.md": "embedded-model.md",
    "theodolite_papers/hidden_geometry/README.md": "paper-geometry.md",
    "theodolite_papers/localization/README.md": "paper-localization.md",
    "theodolite_papers/catch_tag_release/README.md": "paper-sinks.md",
}
"""File of the repository → page of the site."""

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)
_SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in OUTSIDE.items():
        text = _LINK.sub(_from_root, (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "commands.md", content=commands.page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Quote what columns mean, and lead links to those files to their pages."""
    if page.file.src_uri.startswith("measurements/"):
        markdown += quoted_columns(markdown, (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8"))
    return _LINK.sub(lambda link: _into_site(link, page.file.src_uri), markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Turn every formula to MathML."""
    return _FORMULA.sub(lambda found: _mathml(found[3], found[2] == "[", page.file.src_uri), content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is loaded from elsewhere: the search of pages opened from disk has a script of ours."""
    return output.replace(
        _SHIM, f'<script src="{"../" * page.url.count("/")}theme/frame-worker.js"></script>'
    )


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """Nor by the page for what is not found, which may be shown at any depth: it goes without."""
    return output_content.replace(_SHIM, "")


def _mathml(formula: str, block: bool, where: str) -> str:
    made = convert(html.unescape(formula).strip(), display="block" if block else "inline")
    unknown = re.search(r"<m\w+>\\\w+", made)
    if unknown:
        raise PluginError(f"{where}: {unknown[0].split('>')[1]} has no MathML in {formula!r}")
    return f'<div class="formula">{made}</div>' if block else made


def _from_root(link: re.Match[str]) -> str:
    """A link of a file in the repository's root, or in a folder that links upwards, as seen from docs/."""
    if "://" in link[1]:
        return link[0]
    target = re.sub(r"^(\.\./)+", "", link[1])
    target = OUTSIDE.get(target) or target.removeprefix("docs/")
    return f"]({target}{link[2] or ''})"


def _into_site(link: re.Match[str], page: str) -> str:
    depth = page.count("/")
    up = "../" * (depth + 1)
    inside = OUTSIDE.get(link[1].removeprefix(up)) if link[1].startswith(up) else None
    return f"]({'../' * depth}{inside}{link[2] or ''})" if inside else link[0]
