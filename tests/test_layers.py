"""Imports go downwards only, and the package is light to import."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import theodolite
import theodolite_papers

PACKAGE = Path(theodolite.__file__).parent
PAPERS = Path(theodolite_papers.__file__).parent
REFERENCE = PACKAGE.parent / "docs" / "reference.md"
FACES = ("theodolite", "theodolite.theory", "theodolite.train")  # packages whose `__all__` is public

# From the ground up: a package imports from those before it only.
LAYERS = [
    "errors",
    "system",
    "estimates",
    "judging",
    "jobs",
    "corpus",
    "attention",
    "theory",
    "models",
    "accumulate",
    "measure",
    "logits",
]
LAYERS += ["passes", "sinks", "prune", "evaluate", "report", "train", "comparison"]
LAYERS += ["explore", "cli", "__main__"]
HEIGHT = {name: height for height, name in enumerate(LAYERS)}
TRANSFORMERS = {"models", "train"}


def _parsed(path: Path, kind: type) -> list:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind)]


def _imports(path: Path) -> set[str]:
    names = {node.module for node in _parsed(path, ast.ImportFrom) if node.module}
    return names | {alias.name for node in _parsed(path, ast.Import) for alias in node.names}


def _submodules(path: Path) -> set[str]:
    """Modules that are imported as names of their package."""
    return {f"{node.module}.{alias.name}" for node in _parsed(path, ast.ImportFrom) for alias in node.names}


def _modules() -> list[tuple[str, Path]]:
    """Packages and modules of the root, each with its files."""
    paths = sorted(PACKAGE.rglob("*.py"))
    parts = [(path.relative_to(PACKAGE).with_suffix("").parts[0], path) for path in paths]
    return [(name, path) for name, path in parts if path != PACKAGE / "__init__.py"]


def test_every_module_has_a_place():
    assert {name for name, _ in _modules()} == set(HEIGHT)


def test_imports_go_downwards():
    upward = [
        f"{path.relative_to(PACKAGE)} imports {imported}"
        for name, path in _modules()
        for imported in _imports(path)
        for package, _, rest in [imported.partition(".")]
        if package == "theodolite" and rest
        if (other := rest.split(".")[0]) != name and HEIGHT[other] >= HEIGHT[name]
    ]
    assert not upward


def test_no_files_import_each_other_in_a_circle():
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    imports = {
        name: (_imports(path) | _submodules(path)) & set(files) - {name} for name, path in files.items()
    }
    imports["theodolite"] = set()  # the root names everything, and is imported for its version
    graphlib.TopologicalSorter(imports).prepare()  # or it raises


def test_no_import_is_hidden_in_a_string():
    """But for the tables of public names, which the type checker sees as imports."""
    hidden = re.compile(r"""(import_module|__import__)\(["']""")
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not [name for name, text in texts.items() if hidden.search(text)]
    callers = {name for name, text in texts.items() if "import_module(" in text or "__import__(" in text}
    assert callers == {"system/lazy_names.py", "measure/column.py"}


def test_transformers_is_known_in_few_places():
    users = {
        name for name, path in _modules() if any(i.split(".")[0] == "transformers" for i in _imports(path))
    }
    assert users <= TRANSFORMERS


def test_theodolite_never_imports_the_papers():
    assert not [path for path in PACKAGE.rglob("*.py") if "theodolite_papers" in path.read_text()]


def _documented() -> set[str]:
    """What the reference names: modules and objects in whole, or the members that it picks of one, and their module."""
    names = set()
    for block in REFERENCE.read_text().split("\n::: ")[1:]:
        name = block.split(maxsplit=1)[0]
        picked = re.search(r"^ +members: \[(.*?)\]", block, re.MULTILINE | re.DOTALL)
        names |= {f"{name}.{member.strip()}" for member in picked[1].split(",")} if picked else {f"{name}.*"}
        names.add(name)
    return names


def _is_public(module: str, name: str, documented: set[str]) -> bool:
    if module in FACES:
        return name in importlib.import_module(module).__all__
    return not name.startswith("_") and bool({f"{module}.{name}", f"{module}.*"} & documented)


def _used(tree: ast.Module) -> list[tuple[str, str]]:
    """Module and name of all that a file has from theodolite: names, and the attributes of imported modules."""
    names: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "theodolite":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if (PACKAGE.parent / module.replace(".", "/")).with_suffix(
                    ".py"
                ).is_file() or module in FACES:
                    called = alias.asname or alias.name
                    names += [(module, name) for name in _attributes(tree, called)]
                else:
                    names.append((node.module or "", alias.name))
    return names


def _attributes(tree: ast.Module, called: str) -> set[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == called}


def test_the_papers_import_public_names_only():
    """Those that the reference documents, and those of `FACES`."""
    documented = _documented()
    private = []
    for path in PAPERS.rglob("*.py"):
        assert "import theodolite." not in path.read_text()  # by name alone
        used = _used(ast.parse(path.read_text()))
        private += [f"{path.name}: {of}.{name}" for of, name in used if not _is_public(of, name, documented)]
    assert not private


def test_importing_theodolite_loads_nothing_heavy():
    heavy = "('torch', 'transformers', 'numpy', 'pandas', 'plotly')"
    code = (
        f"import sys, theodolite.cli.app, theodolite_papers; print([m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_public_names_exist_and_are_few():
    assert len(theodolite.__all__) <= 18
    for name in theodolite.__all__:
        assert getattr(theodolite, name) is not None
