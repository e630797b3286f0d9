"""Sinks and outlier dimensions of a run, as a small JSON file of what other analyses should exclude.

For those who train sparse autoencoders, quantise or prune. A rule says where (layer, and head or dimension) and of
which tokens: those that are sinks nearly wherever they stand. Of other tokens single occurrences are remembered. The
file needs no theodolite to be read; `docs/sinks.md` has its fields.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from theodolite.accumulate.sums import MARKED_COLUMNS, context_key
from theodolite.corpus.cutting import contexts_in_rows, positions_in_rows
from theodolite.errors import UsageError
from theodolite.measure.tags import NAMED
from theodolite.passes.run import Run
from theodolite.sinks.outliers import Outliers, position_0_as_one
from theodolite.system.files import disk_errors, write_text
from theodolite.system.run_folders import TRACE

SCHEMA_VERSION = 2
# Of contexts that have a sink or massive activation, or of tokens that have an outlier, for a rule.
LEAST_SHARE = 0.01
NEARLY_ALL = 0.9  # a token has a rule where at least this share of its occurrences are sinks, or massive


@dataclass(frozen=True)
class Rule:
    """One sink, outlier dimension or massive activation to exclude.

    Attributes:
        kind: sink, outlier dimension, or massive activation.
        layer: the block of a head; or the residual layer of a dimension, 0 entering the first block.
        first: only at position 0 (True), only later (False), wherever it stands (None).
        token_id, token: only of this token; None: of every token, and of a sink without `first` the learned column.
        share: of contexts that have this sink or massive activation, or of tokens that have this outlier.
        occurrences, of_occurrences: how often the token stands after position 0, and the share of these that are such.
    """

    kind: str
    layer: int
    head: int | None = None
    dimension: int | None = None
    first: bool | None = None
    token_id: int | None = None
    token: str | None = None
    share: float | None = None
    occurrences: int | None = None
    of_occurrences: float | None = None


@dataclass(frozen=True)
class Exclusions:
    """Rules and single occurrences, and the model and text that they are from.

    Attributes:
        rules: in the order of layers.
        occurrences: that no rule flags: layer, key of the context (`context_key`) and position.
        accuracy: of `tokens` and of `mask` on that text, by these names: `precision`, the share of flagged tokens that
            are sinks or massive in any layer, and `recall`, of these the share flagged. Empty for a survey.
        model: id, revision and hash of the checkpoint.
        corpus: name and hash of the text.
    """

    rules: tuple[Rule, ...]
    occurrences: tuple[tuple[int, int, int], ...] = ()
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run | Outliers, least_share: float = LEAST_SHARE) -> Exclusions:
        """Derive the rules of a survey, of a trace, or of outliers.

        Args:
            run: from `survey`, `trace_sinks` or `find_outliers`. A trace knows of no outliers, `find_outliers` of no
                sinks, but of the tokens that carry massive activations and of outliers by rules from data. A survey
                names no token after position 0: it does not know at which occurrences one is a sink.
            least_share: of contexts or tokens below which there is no rule, but for outliers by rules from data.

        Raises:
            UsageError: a run of weights alone, or a share that is none.
        """
        if not 0 <= least_share <= 1:
            raise UsageError(f"least share {least_share} is not a share: give one from 0 to 1")
        if not isinstance(run, Run | Outliers):
            raise UsageError(f"exclusions are made of a run or of outliers, not of {type(run).__name__}")
        source = run.numbers if isinstance(run, Outliers) else run.provenance
        if not source.get("corpus"):
            raise UsageError(
                "these are spectra of weights, and no text was read: give the folder of a survey"
            )
        contexts = source["contexts"] if isinstance(run, Outliers) else source["corpus"]["contexts"]
        places = pd.DataFrame(columns=list(MARKED_COLUMNS), dtype=int)
        if isinstance(run, Outliers):
            places = pd.DataFrame(run.places.numpy(), columns=list(MARKED_COLUMNS))
            rules = [
                *_found_rules(run, contexts, least_share),
                *_token_rules("massive activation", run.massive, places, contexts, least_share),
            ]
        elif run.kind == TRACE:
            places = pd.DataFrame(run.arrays["sink_places"].numpy(), columns=list(MARKED_COLUMNS))
            rules = [
                _rule("sink", row, row.share, first=True if row.kind == "first" else None)
                for row in run.traces[run.traces["share"] >= least_share].itertuples()
                if row.kind not in NAMED
            ]
            rules += _token_rules("sink", run.traces, places, contexts, least_share)
        else:
            rules = list(_surveyed_rules(run, contexts, least_share))
        rules.sort(key=lambda rule: (rule.layer, rule.kind, rule.head or 0, rule.dimension or 0))
        return cls(
            tuple(rules),
            *_remembered(places, rules, contexts),
            {name: source["model"][name] for name in ("id", "revision", "sha256")},
            {name: source["corpus"][name] for name in ("name", "sha256")},
        )

    def tokens(
        self,
        ids: Int[Tensor, "*contexts positions"],
        layer: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Bool[Tensor, ...]:
        """Flag the tokens to leave out (True): those that a rule names by id, or as the first of their context.

        Args:
            layer: only rules of this layer; None: of all.
            attention_mask, position_ids: of padded or packed rows, as `Corpus.from_ids` takes them; padding is never
                flagged.
        """
        rows = ids.reshape(-1, ids.shape[-1])
        position = positions_in_rows(rows, attention_mask, position_ids).to(ids.device).view_as(ids)
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        for rule in self.rules:
            of_some_tokens = rule.first is True or rule.token_id is not None
            if of_some_tokens and layer in (None, rule.layer):
                named = position >= 0 if rule.token_id is None else (ids == rule.token_id) & (position >= 0)
                chosen |= named if rule.first is None else named & ((position == 0) == rule.first)
        return chosen

    def mask(
        self,
        ids: Int[Tensor, "*contexts positions"],
        layer: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Bool[Tensor, ...]:
        """Flag what `tokens` flags, and in contexts that were read the single occurrences that no rule covers.

        A context is known by all of its tokens: cut as they were, of the same length. Arguments are those of `tokens`.
        """
        rows = ids.reshape(-1, ids.shape[-1])
        chosen = self.tokens(rows, layer, attention_mask=attention_mask, position_ids=position_ids)
        remembered: dict[int, list[int]] = defaultdict(list)
        for of_layer, key, position in self.occurrences:
            if layer in (None, of_layer):
                remembered[key].append(position)
        for row, places in contexts_in_rows(rows, attention_mask, position_ids) if remembered else ():
            positions = remembered.get(context_key(rows[row, places]), [])
            chosen[row, places[positions]] = True
        return chosen.view_as(ids)

    def dimensions(self, layer: int) -> list[int]:
        """List the outlier dimensions of a residual layer, massive activations included, in ascending order."""
        return sorted({r.dimension for r in self.rules if r.layer == layer and r.dimension is not None})

    def save(self, path: str | Path) -> None:
        """Write the JSON file, at once or not at all, and the folders above it; `WorkError` if the disk refuses."""
        values = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        values["rules"] = [{k: v for k, v in rule.items() if v is not None} for rule in values["rules"]]
        with disk_errors(Path(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(path), json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Exclusions:
        """Load a file that `save` wrote; `UsageError` where it is not there, damaged, or of a newer schema."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            version = values["schema_version"]
            if version != SCHEMA_VERSION:
                do = "upgrade theodolite" if version > SCHEMA_VERSION else "make it anew"
                raise UsageError(f"{path} has schema {version}, this theodolite reads {SCHEMA_VERSION}: {do}")
            rules = tuple(Rule(**rule) for rule in values["rules"])
            occurrences = tuple((layer, key, position) for layer, key, position in values["occurrences"])
            return cls(rules, occurrences, values["accuracy"], values["model"], values["corpus"])
        except FileNotFoundError:
            raise UsageError(f"no file at {path}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no file of exclusions that theodolite wrote ({error})") from error


def _rule(kind: str, row: Any, share: float, **more: Any) -> Rule:
    """Make a rule about the head or dimension of a row."""
    part = "head" if kind == "sink" else "dimension"
    more[part] = int(getattr(row, part))
    return Rule(kind, int(row.layer), share=float(share), **more)


def _token_rules(
    kind: str, table: pd.DataFrame, places: pd.DataFrame, contexts: int, least_share: float
) -> Iterator[Rule]:
    """Make a rule of each token that is a sink of a head, or massive in a dimension, nearly wherever it stands."""
    texts = dict(zip(table["token_id"], table["token"], strict=True))
    part = "head" if kind == "sink" else "dimension"
    later = places[places["position"] > 0].rename(columns={"part": part})
    counts = later.groupby(["layer", part, "token_id"], as_index=False).agg(
        contexts=("context", "nunique"), places=("position", "size"), occurrences=("occurrences", "first")
    )
    for row in counts.itertuples():
        share, of_occurrences = row.contexts / contexts, row.places / row.occurrences
        if share >= least_share and of_occurrences >= NEARLY_ALL:
            token = {"token_id": int(row.token_id), "token": str(texts[row.token_id])}
            seen = {"occurrences": int(row.occurrences), "of_occurrences": float(of_occurrences)}
            yield _rule(kind, row, share, first=False, **token, **seen)


def _surveyed_rules(run: Run, contexts: int, least_share: float) -> Iterator[Rule]:
    of_heads = run.sinks[run.sinks["first"]].groupby(["layer", "head"], as_index=False)["share"].sum()
    for row in of_heads[of_heads["share"] >= least_share].itertuples():
        yield _rule("sink", row, row.share, first=True)
    for row in run.outliers.itertuples():
        if row.share >= least_share:
            yield _rule("outlier dimension", row, row.share)
        for first, carriers in ((True, row.massive_first), (False, row.massive_contexts)):
            if carriers and carriers / contexts >= least_share:
                yield _rule("massive activation", row, carriers / contexts, first=first)


def _found_rules(outliers: Outliers, contexts: int, least_share: float) -> Iterator[Rule]:
    for row in outliers.dimensions.itertuples():
        if row.adaptive or (row.published and row.share >= least_share):
            yield _rule("outlier dimension", row, row.share)
    for row in position_0_as_one(outliers.massive).itertuples():
        if row.first and row.contexts / contexts >= least_share:
            yield _rule("massive activation", row, row.contexts / contexts, first=True)


def _remembered(
    places: pd.DataFrame, rules: Iterable[Rule], contexts: int
) -> tuple[tuple[tuple[int, int, int], ...], dict[str, dict[str, float]]]:
    """Return the places that no rule of their layer flags, and the accuracy of rules alone and with these."""
    if not len(places):
        return (), {}
    of_first = {rule.layer for rule in rules if rule.first is True}
    of_tokens = {(rule.layer, rule.token_id) for rule in rules if rule.token_id is not None}
    first = places["position"] == 0
    named = pd.Series(list(zip(places["layer"], places["token_id"], strict=True)), index=places.index)
    left = places[~((first & places["layer"].isin(of_first)) | (~first & named.isin(of_tokens)))]
    remembered = sorted(set(left[["layer", "key", "position"]].itertuples(index=False, name=None)))

    true = places.drop_duplicates(["context", "position"])
    later = true[true["token_id"].isin({token for _, token in of_tokens}) & (true["position"] > 0)]
    flagged = later.drop_duplicates("token_id")["occurrences"].sum() + (contexts if of_first else 0)
    right = len(later) + ((true["position"] == 0).sum() if of_first else 0)
    accuracy = {
        "tokens": {
            "precision": float(right / flagged) if flagged else 1.0,
            "recall": float(right / len(true)),
        },
        "mask": {"precision": float(len(true) / (flagged + len(true) - right)), "recall": 1.0},
    }
    return tuple(remembered), accuracy
