"""The documentation site: it builds strictly, and all that its pages link to is there, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ASIDE = {"404.html"}
"""Made for a server: its links begin at the server's root."""


class _Page(HTMLParser):
    """Targets and anchors of a page, and what it loads by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        source = named.get("src") or (named.get("href") if tag == "link" else None)
        if source and named.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Page → what is in it, of the site as CI builds it."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: _Page(path) for path in sorted(place.rglob("*.html")) if path.name not in ASIDE}


def test_every_page_is_built_with_what_belongs_in_it(site):
    """A word of what is made of other files, on each page that has some; no comment that asks for it is left."""
    text = {path.name: path.read_text(encoding="utf-8") for path in site}
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= set(text)
    assert {"contributing.html", "changelog.html", "embedded-model.html"} <= set(text)
    for page, words in (
        ("commands", "--per-label"),
        ("gallery-geometry", "geometry/table1"),
        ("trust", "<code>llama</code>"),
        ("trust", "Text too short"),
        ("reproduce", "<code>sinks/figure4</code>"),
        ("position", "<code>stable_rank</code></td>"),
        ("run-folder", "<code>tag_by_group</code></td>"),
        ("collapse", "Plotly.newPlot"),
    ):
        assert words in text[f"{page}.html"], page
    assert not re.search(
        r"<!-- (table|columns|arrays|families|chaos|errors|gpu|experiments)", "".join(text.values())
    )


def test_links_and_anchors_are_there(site):
    broken = []
    for path, page in site.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in site and anchor not in site[target].anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site):
    """Neither by a tag nor by a script or a style, of notebooks say."""
    for path, page in site.items():
        assert {urlsplit(link).scheme for link in page.loaded} <= {"", "data"}, path.name
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"""import[^;<]{,80}["']https?://|url\(["']?https?://""", text), path.name


def test_formulas_are_mathml(site):
    """No TeX is left over, and none was lost on the way."""
    root = next(path.parent for path in site if path.name == "changelog.html")
    for source in (ROOT / "docs").glob("*.md"):
        path = root / f"{source.stem}.html"
        text = path.read_text(encoding="utf-8")
        assert "arithmatex" not in text, path.name
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", source.read_text(encoding="utf-8"), flags=re.DOTALL)
        written = len(re.findall(r"\$\$.*?\$\$|\$[^$]+\$", prose, re.DOTALL))
        assert text.count("<math ") == written, path.name
