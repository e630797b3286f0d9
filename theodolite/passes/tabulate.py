"""From the states of a survey's passes to a `Run`: every table and array. No model is seen here.

What a state is missing (a survey of heads alone, spectra from weights alone) leaves its tables empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from theodolite.accumulate.extra import Extra
from theodolite.accumulate.means import Sample, decomposed_means
from theodolite.accumulate.outliers import MASSIVE_COUNTS
from theodolite.accumulate.sums import State
from theodolite.corpus.patches import PatchGrid, grid_described
from theodolite.errors import WorkError
from theodolite.jobs.job import States
from theodolite.logits.attribution import PATTERNS, attribution_table
from theodolite.logits.shares import shares_tables
from theodolite.measure.geometry import COUNT_ERRORS, geometry, outlier_rows
from theodolite.measure.heads import examples_table, head_arrays, head_columns, heads_that_are, sinks_table
from theodolite.measure.localization import entropy_bound, localization_tables
from theodolite.measure.positional import COLUMNS as POSITIONAL
from theodolite.measure.uncertainty import array_errors, standard_errors
from theodolite.models.weights.head_weights import EXACT
from theodolite.passes.added_columns import added_columns
from theodolite.passes.run import Run

OUTLIER_COLUMNS = ["layer", "dimension", "share", "maximum", "maximum_first", *MASSIVE_COUNTS, *COUNT_ERRORS]


@dataclass(frozen=True)
class Facts:
    """What the tables say of the model and the text besides what was summed.

    Attributes:
        provenance: of the run; without an entry `corpus` no text was read, and the rest is empty.
        text: that of a token id.
        sample: contexts and tokens whose vectors were kept.
        labels: of all contexts.
        examples: token ids of the contexts that are shown.
        pictures: the array of their images, if they are images.
    """

    provenance: dict[str, Any]
    text: Callable[[int], str] = str
    sample: Sample | None = None
    labels: Tensor | None = None
    examples: Tensor | None = None
    pictures: State = field(default_factory=dict)

    @property
    def trailing(self) -> int:
        """How many special tokens stand behind the text of every context; they are told apart as position 0 is."""
        return int(self.provenance["corpus"].get("trailing_special_tokens", 0))

    @property
    def grid(self) -> PatchGrid | None:
        """How the tokens of the images lie that were read; None where it was text."""
        return grid_described(self.provenance["corpus"])

    @property
    def leading(self) -> int:
        """Tokens at the beginning that are told apart from the others."""
        return 1 if self.grid is None else self.grid.leading


def tabulate(states: States, facts: Facts, extra: Sequence[Extra] = ()) -> Run:
    """All tables and arrays of a survey, from what its stages, or some, have left; `extra`: its added accumulators."""
    provenance = facts.provenance
    tables: dict[str, pd.DataFrame] = dict.fromkeys(
        ("layers", "sinks", "outliers", "examples"), pd.DataFrame()
    )
    weights, notes = states.of("weights"), states.notes["weights"]
    exact = [kind == EXACT for kind in notes["spectrum_of"]]
    length = (provenance.get("corpus") or {}).get("length")
    heads, arrays = localization_tables(weights, exact, notes["scaling"], length)
    if states.of("corpus"):
        attention = states.of("corpus.attention")
        heads |= head_columns(attention)
        mean, pos, _ = survey_means(states, facts.trailing, facts.leading)
        end = pos.shape[1] - facts.trailing
        arrays |= {"mean": mean, "positional_basis": pos.float()[:, :end]}
        arrays |= {"positional_basis_last": pos.float()[:, end:]} if end < pos.shape[1] else {}
        arrays |= head_arrays(attention)
        provenance = provenance | {"wall_seconds": states.seconds}
    if states.of("corpus.residual"):
        heads["entropy_bound"] = _entropy_bounds(states)
    if states.of("patterns"):
        for name, of in (("induction", "scores"), ("induction_se", "errors")):
            scores = states.of("patterns")[of]
            heads[name] = scores[:, PATTERNS.index("induction")].flatten().tolist()
    heads |= {name: weights[name].flatten().tolist() for name in POSITIONAL if name in weights}
    if states.of("corpus.residual"):
        shares, columns = shares_tables(states.of("shares"), states.notes["shares"])
        heads |= columns
        text_tables, text_arrays = _text_tables(states, facts)
        arrays |= text_arrays
        attribution = attribution_table(states.of("attribution"))
        tables |= text_tables | {"constituents": shares, "attribution": attribution}
        refused = states.notes["attribution"]["refused"] | states.notes["shares"]["refused"]
        refused = {layer: refused[layer] for layer in sorted(refused, key=int)}  # why logits were not split
        provenance = provenance | {"constituents_refused": refused}
    added = added_columns(states, extra)
    tables["layers"] = tables["layers"].assign(**added["layers"])
    table = tables["heads"] = heads_that_are(heads | added["heads"], notes["heads"])
    table.insert(2, "spectrum_of", table["layer"].map(dict(enumerate(notes["spectrum_of"]))))
    return Run(**tables, arrays=arrays, provenance=provenance)


def survey_means(states: States, trailing: int, leading: int) -> tuple[Tensor, Tensor, Tensor]:
    """μ (N, d), pos (N, T, d) and ctx (N, S, d) of the text that was read; trailing special tokens have a pos."""
    return states.once("means", lambda: decomposed_means(states.of("corpus.means"), trailing, leading))


def _entropy_bounds(states: States) -> list[float]:
    attention = states.of("corpus.attention")
    norms = attention["gram_norm"].tolist(), states.of("weights")["spectral_norm"]
    layerwise = zip(*norms, attention["visible_keys"], attention["readers"], strict=True)
    return torch.cat([entropy_bound(*layer) for layer in layerwise]).tolist()


def _text_tables(states: States, facts: Facts) -> tuple[dict[str, pd.DataFrame], dict[str, Tensor]]:
    """The tables of layers, sinks, outliers and examples, and the arrays of the layers."""
    residual, outliers, attention = (
        states.of(f"corpus.{name}") for name in ("residual", "outliers", "attention")
    )
    _refuse_overflow(residual)
    _refuse_overflow(states.of("corpus.inputs"))
    sample, labels, examples = facts.sample, facts.labels, facts.examples
    assert sample is not None
    assert labels is not None
    assert examples is not None
    if len(labels[labels >= 0].unique()) < 2:  # the name of the only file, say: it tells nothing apart
        labels = torch.full_like(labels, -1)
    labels = labels[sample.kept]
    means = states.of("corpus.means")
    length = facts.provenance["corpus"]["length"] - facts.trailing
    means = means | {name: means[name][:, :, :length] for name in ("position_sum", "readers")}
    leading, shape = facts.leading, None if facts.grid is None else facts.grid.shape
    layers, arrays = geometry(means, residual, outliers, sample, labels, leading, shape)
    sketches, clusters = states.of("corpus.sketches"), arrays["context_cluster"]
    layers |= standard_errors(means, sketches, outliers, sample, labels, clusters, leading, shape)
    errors = array_errors(means, outliers, survey_means(states, facts.trailing, leading)[1], leading)
    arrays |= {name: errors[name] for name in errors if name not in COUNT_ERRORS}
    if facts.grid is not None:
        arrays |= facts.pictures
        arrays |= {"example_received": attention["example_received"].float()}
        arrays |= {"example_norm": states.of("corpus.examples")["norm"].float()}

    tables = {
        "layers": pd.DataFrame({"layer": range(len(arrays["mean"])), **layers}),
        "sinks": sinks_table(attention, facts.text),
        "outliers": pd.DataFrame(outlier_rows(outliers, means, errors, leading), columns=OUTLIER_COLUMNS),
        "examples": examples_table(attention, examples, facts.text),
    }
    return tables, arrays


def _refuse_overflow(moments: State) -> None:
    finite = moments["moment"].isfinite().all(dim=(1, 2))
    if not finite.all():
        layer = int((~finite).nonzero()[0])
        raise WorkError(f"the squares of layer {layer}'s vectors overflow: try --dtype float64")
