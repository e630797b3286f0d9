"""Names of a package that are imported when they are first used, so that none costs what another needs (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        homes: the module that each name is defined in; modules: those that are names themselves, and not listed.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if modules and name in modules:
            return importlib.import_module(modules[name])
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return get, lambda: sorted(sys.modules[package].__all__)
