"""Read what each paper's `experiments.toml` declares of its experiments; no experiment is imported for it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from theodolite.system.wording import reading_order

PAPERS = {"geometry": "hidden_geometry", "localization": "localization", "sinks": "catch_tag_release"}
"""Group of experiments → the folder of its paper."""

CLAIMS = "Every claim that the other experiments judge, on one page"


@dataclass(frozen=True)
class Declaration:
    """What `experiments.toml` declares of an experiment; nothing is imported for it.

    needs: `layers.COLUMN`, `arrays.NAME`, `labels`, `model`; `prompt`: one, and no text; `nothing`: no model and no
    text; `theodolite train …`: a folder that it wrote. options: `other`, `prompt`, `layer`, `head`. scaled_down: what
    is smaller than in the paper, whatever the model. figures: key → caption: title, shows, look_for, source, wide.
    claims: key → claim, what, criterion, more; or claim and parts, by name, with what and criterion. criteria: of the
    paper, name → side, limit, source, negligible. elsewhere: published figures that are this one of another model or
    text. module: where the function is; empty: of the collected claims.
    """

    name: str
    module: str
    title: str
    paper: str
    needs: Sequence[str] = ()
    options: Sequence[str] = ()
    scaled_down: str = ""
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    criteria: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Alias:
    """A published figure that is another one drawn for another model or text."""

    name: str
    of: str
    published_on: str


@cache
def declarations() -> dict[str, Declaration]:
    """Read all declarations by name: of each paper the tables, the figures, the rest, the claims."""
    declared: dict[str, Declaration] = {}
    for group, folder in PAPERS.items():
        text = (files("theodolite_papers") / folder / "experiments.toml").read_text(encoding="utf-8")
        modules = tomllib.loads(text)
        paper, shared, criteria = modules.pop("paper"), modules.pop("claims", {}), modules.pop("criteria", {})
        entries = {name: entry for of_module in modules.values() for name, entry in of_module.items()}
        for module, of_module in modules.items():
            for name, entry in of_module.items():
                place = f"theodolite_papers.{folder}.{module}"
                whole = _like(entries, {"elsewhere": {}, **entry})
                claims = whole.get("claims", {}).items()
                whole["claims"] = {key: _like(shared, claim) for key, claim in claims}
                declared[f"{group}/{name}"] = Declaration(
                    f"{group}/{name}", place, criteria=criteria, **whole
                )
        options = sorted({option for entry in entries.values() for option in entry.get("options", [])})
        name = f"{group}/claims"
        declared[name] = Declaration(name, "", CLAIMS, paper, options=options, criteria=criteria)
    order = sorted(
        declared, key=lambda it: (it.partition("/")[0], not declared[it].module, *reading_order(it))
    )
    return {name: declared[name] for name in order}


def _like(others: Mapping[str, Mapping[str, Any]], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the keys that an entry lacks from the entry that its `like` names."""
    own = dict(entry)
    return {**others.get(own.pop("like", ""), {}), **own}


@cache
def aliases() -> dict[str, Alias]:
    """Read the published figures that are another experiment's, by name."""
    return {
        f"{one.name.partition('/')[0]}/{name}": Alias(f"{one.name.partition('/')[0]}/{name}", one.name, text)
        for one in declarations().values()
        for name, text in one.elsewhere.items()
    }
