"""What writes parts of the docs can be imported: after a move, nothing else would tell."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks
import tools

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (tools, benchmarks)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name):
    importlib.import_module(name)
