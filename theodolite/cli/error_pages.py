"""What an error means and what to do about it: the page of errors, which the package carries.

Looked up by section name or by message: a section explains a message if one of its rows quotes a part of it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "assets" / "errors.md"


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: its key and anchor: the title in lower case with hyphens.
        text: in Markdown, without links.
        quoted: the message fragments that its rows begin with.
    """

    name: str
    title: str
    text: str
    quoted: tuple[str, ...]


@functools.cache
def sections() -> dict[str, Section]:
    """All sections by name, in the order of the page."""
    _, *chunks = re.split(r"^#{2,3} ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_name = {}
    for section in chunks:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
        if not rows:
            continue
        quoted = tuple(quote for row in rows for quote in re.findall(r"`([^`]+)`", row))
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        by_name[name] = Section(name, title, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).strip(), quoted)
    return by_name


def section_of(message: str) -> Section | None:
    """The section that explains this message, if there is one."""
    return next((s for s in sections().values() if any(quote in message for quote in s.quoted)), None)
