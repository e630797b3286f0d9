"""How objects show themselves in a notebook: what is measured does not know the report, which draws it.

The package's root says which function draws what; it is imported when something is first shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

View = Callable[[Any], str]

_views: dict[str, View] = {}


def register_view(kind: str, view: View) -> None:
    """Have things of this kind shown as the HTML that `view` makes of them."""
    _views[kind] = view


def view_of(kind: str) -> View:
    """What makes HTML of a thing of this kind."""
    return _views[kind]
