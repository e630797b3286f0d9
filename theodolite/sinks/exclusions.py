"""Sinks and outlier dimensions of a run, as a small JSON file of what other analyses should exclude.

For those who train sparse autoencoders, quantise or prune, and want tokens and dimensions of the mechanism apart. A
rule says where (layer, and head or dimension) and of which tokens. The file needs no theodolite to be read;
`docs/sinks.md` has its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from theodolite.corpus.cutting import positions_in_rows
from theodolite.errors import UsageError
from theodolite.measure.tags import NAMED
from theodolite.passes.run import Run
from theodolite.sinks.outliers import Outliers, position_0_as_one
from theodolite.system.files import disk_errors, write_text
from theodolite.system.run_folders import TRACE

SCHEMA_VERSION = 1
LEAST_SHARE = 0.01
"""A sink or massive activation that fewer contexts have, or an outlier that fewer tokens have, is no rule."""

Kind = Literal["sink", "outlier dimension", "massive activation"]


@dataclass(frozen=True)
class Rule:
    """One sink, outlier dimension or massive activation to exclude.

    Attributes:
        kind: an attention sink, an outlier dimension, or a massive activation.
        layer: the block of a head, counted from 0; or the residual layer of a dimension, 0 entering the first block.
        head: of a sink.
        dimension: of an outlier or a massive activation.
        first: only at position 0 (True), only later (False), wherever it stands (None).
        token_id, token: only of this token; None: of every token, and for a sink with neither a position nor a token,
            the head's learned column.
        share: of contexts that have this sink or massive activation, or of tokens that have this outlier.
    """

    kind: Kind
    layer: int
    head: int | None = None
    dimension: int | None = None
    first: bool | None = None
    token_id: int | None = None
    token: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class Exclusions:
    """Rules, and the model and text that they are from.

    Attributes:
        rules: in the order of layers.
        model: id and hash of the checkpoint.
        corpus: name and hash of the text.
    """

    rules: tuple[Rule, ...]
    model: dict[str, Any] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run | Outliers, least_share: float = LEAST_SHARE) -> Exclusions:
        """Derive the rules of a survey, of a trace, or of outliers.

        Args:
            run: from `survey`, `trace_sinks` or `find_outliers`. A trace knows of no outliers, `find_outliers` of no
                sinks, but of the tokens that carry massive activations and of outliers by rules from data.
            least_share: of contexts or tokens below which there is no rule. Outlier dimensions by rules from data have
                none: they are large in most tokens, by whatever size is typical of their layer.

        Raises:
            UsageError: a run of weights alone, or a share that is none.
        """
        if not 0 <= least_share <= 1:
            raise UsageError(f"least share {least_share} is not a share: give one from 0 to 1")
        if not isinstance(run, Run | Outliers):
            raise UsageError(f"exclusions are made of a run or of outliers, not of {type(run).__name__}")
        provenance = run.numbers if isinstance(run, Outliers) else run.provenance
        if not provenance.get("corpus"):
            raise UsageError(
                "these are spectra of weights, and no text was read: give the folder of a survey"
            )
        if isinstance(run, Outliers):
            rules = [*_found_rules(run, least_share)]
        else:
            rules = [*_sink_rules(run, least_share), *_outlier_rules(run, least_share)]
        rules.sort(key=lambda rule: (rule.layer, rule.kind, rule.head or 0, rule.dimension or 0))
        model, corpus = provenance["model"], provenance["corpus"]
        return cls(
            tuple(rules),
            {name: model[name] for name in ("id", "revision", "sha256")},
            {name: corpus[name] for name in ("name", "sha256")},
        )

    def tokens(
        self,
        ids: Int[Tensor, "*contexts positions"],
        layer: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Bool[Tensor, ...]:
        """Flag the tokens that a rule about tokens names: True is to be left out. Rules of every token, or of
        every later one, name none.

        Args:
            ids: token ids, position 0 first.
            layer: only rules of this layer; None: of all.
            attention_mask, position_ids: of padded or packed rows, as `Corpus.from_ids` takes them; padding is never
                flagged.
        """
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        rows = ids.reshape(-1, ids.shape[-1])
        position = positions_in_rows(rows, attention_mask, position_ids).to(ids.device).view_as(ids)
        for rule in self.rules:
            of_some_tokens = rule.first is True or rule.token_id is not None
            if of_some_tokens and layer in (None, rule.layer):
                named = position >= 0 if rule.token_id is None else (ids == rule.token_id) & (position >= 0)
                chosen |= named if rule.first is None else named & ((position == 0) == rule.first)
        return chosen

    def dimensions(self, layer: int) -> list[int]:
        """List the outlier dimensions of a residual layer, massive activations included, in ascending order."""
        return sorted({r.dimension for r in self.rules if r.layer == layer and r.dimension is not None})

    def save(self, path: str | Path) -> None:
        """Write the JSON file, at once or not at all, and the folders above it.

        Raises:
            WorkError: it cannot be written.
        """
        rules = [{name: v for name, v in asdict(rule).items() if v is not None} for rule in self.rules]
        values = {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "corpus": self.corpus,
            "rules": rules,
        }
        with disk_errors(Path(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(path), json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Exclusions:
        """Load a file that `save` wrote.

        Raises:
            UsageError: it is not there, damaged, or of a newer schema.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            version = values["schema_version"]
            if version > SCHEMA_VERSION:
                raise UsageError(
                    f"{path} has schema {version}, this theodolite reads {SCHEMA_VERSION}: upgrade theodolite"
                )
            return cls(tuple(Rule(**rule) for rule in values["rules"]), values["model"], values["corpus"])
        except FileNotFoundError:
            raise UsageError(f"no file at {path}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no file of exclusions that theodolite wrote ({error})") from error


def _rule(kind: Kind, row: Any, share: float, *, first: bool | None = None, named: bool = False) -> Rule:
    """Make a rule about the head or dimension of a row; `named`: only of its token."""
    place = {"head": int(row.head)} if kind == "sink" else {"dimension": int(row.dimension)}
    token = {"token_id": int(row.token_id), "token": str(row.token)} if named else {}
    return Rule(kind, int(row.layer), **place, **token, first=first, share=float(share))  # type: ignore[arg-type]


def _sink_rules(run: Run, least_share: float) -> Iterable[Rule]:
    if run.kind == TRACE:
        # A token that is a sink of a whole context here and a local one there is one rule, by its larger share.
        sinks = run.traces.sort_values("share", ascending=False, kind="stable")
        sinks = sinks.assign(named=sinks["kind"].isin(NAMED), first=sinks["kind"].eq("first"))
        sinks = sinks.drop_duplicates(["layer", "head", "named", "first", "token_id"]).sort_index()
        for row in sinks[sinks["share"] >= least_share].itertuples():
            first = {"first": True, "learned": None}.get(row.kind, False)
            yield _rule("sink", row, row.share, first=first, named=row.named)
        return
    of_heads = run.sinks[run.sinks["first"]].groupby(["layer", "head"], as_index=False)["share"].sum()
    for first, sinks in ((True, of_heads), (False, run.sinks[~run.sinks["first"]])):
        for row in sinks[sinks["share"] >= least_share].itertuples():
            yield _rule("sink", row, row.share, first=first, named=not first)


def _outlier_rules(run: Run, least_share: float) -> Iterable[Rule]:
    contexts = run.provenance["corpus"]["contexts"]
    for row in run.outliers.itertuples():
        if row.share >= least_share:
            yield _rule("outlier dimension", row, row.share)
        for first, carriers in ((True, row.massive_first), (False, row.massive_contexts)):
            if carriers and carriers / contexts >= least_share:
                yield _rule("massive activation", row, carriers / contexts, first=first)


def _found_rules(outliers: Outliers, least_share: float) -> Iterable[Rule]:
    for row in outliers.dimensions.itertuples():
        if row.adaptive or (row.published and row.share >= least_share):
            yield _rule("outlier dimension", row, row.share)
    for row in position_0_as_one(outliers.massive).itertuples():
        share = row.contexts / outliers.numbers["contexts"]
        if share >= least_share:
            yield _rule("massive activation", row, share, first=bool(row.first), named=not row.first)
