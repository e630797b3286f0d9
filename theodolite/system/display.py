"""HTML representations for notebooks: results do not import the report package that draws them.

The package root registers the functions, which are imported when something is first displayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

View = Callable[[Any], str]

_views: dict[str, View] = {}


def register_view(kind: str, view: View) -> None:
    """Display objects of this kind as the HTML that `view` returns."""
    _views[kind] = view


def view_of(kind: str) -> View:
    """The function that renders this kind as HTML."""
    return _views[kind]
