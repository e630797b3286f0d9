"""Names of a package that are imported when they are first used, so that none costs what another needs (PEP 562)."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str] | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package: its `if TYPE_CHECKING` imports, and `modules`."""
    parsed = ast.parse(inspect.getsource(sys.modules[package]))
    statements = [each for block in parsed.body if isinstance(block, ast.If) for each in block.body]
    imports = [each for each in statements if isinstance(each, ast.ImportFrom)]
    homes = {alias.name: str(each.module) for each in imports for alias in each.names}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if modules and name in modules:
            return importlib.import_module(modules[name])
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return [*homes], get, lambda: sorted(sys.modules[package].__all__)
