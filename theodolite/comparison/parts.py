"""The parts of the mechanism that are compared: what each takes from two runs, and what counts as a unit of it.

One function a part. All of them read runs on the same text, and judge by the rules of `survival.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.comparison.outputs import PLACE, SINK_PLACES
from theodolite.comparison.survival import (
    BY_HALVES,
    HALF,
    LOST,
    SURVIVED,
    UNDECIDED,
    Change,
    Flags,
    Survival,
    direction_margins,
    each,
    expected_by_chance,
    join,
    looks_of,
    margins,
    share_error,
    status_of,
    statuses,
)
from theodolite.corpus.groups import GROUPS
from theodolite.corpus.patches import grid_described
from theodolite.estimates import jackknife_error
from theodolite.judging import Criterion, Estimate, judge
from theodolite.logits.attribution import scored_sequences
from theodolite.measure.catalogue import declared
from theodolite.measure.geometry import OUTLIER_SHARE
from theodolite.measure.head_roles import INDUCTION, PATTERN_ROLES, SINK_ROLES, UNIFORM_ATTENTION, HeadRole
from theodolite.measure.ratios import ratio_by_context
from theodolite.measure.uncertainty import balanced_halves, half_sample_error
from theodolite.passes.run import Run
from theodolite.report.data import (
    Floats,
    column,
    entropy_share,
    mean_over_layers,
    need,
    provenance,
    value_of,
)
from theodolite.report.drawing.sinks import sink_name
from theodolite.report.health import ENTROPY_COLLAPSE
from theodolite.sinks.exclusions import LEAST_SHARE
from theodolite.system.wording import counted, head_name, number, percent

HEAD, SINK = ["layer", "head"], ["layer", "head", "kind", "token_id"]
"""What a head, and a sink, is found again by; which token comes first does not matter."""

SIDES = ("before", "after")
A_HALF = Criterion("at least", HALF, "ours")
ALONG = Criterion("at least", HALF**0.5, "half of the squared length (ours)")
TAGGED = 0.1  # a sink tags if its grouping explains so much of the variance of the head's output
NO_GROUPS = torch.empty(0, GROUPS, 1)
TENTH = 0.1  # an entropy survives that changes by at most this share of the maximum (ours)
A_TENTH = Criterion("within", TENTH, "ours")
RANGES = np.array(["collapsed", "", "uniform"])  # below `ENTROPY_COLLAPSE`, above `UNIFORM_ATTENTION`
ROLES = (*PATTERN_ROLES, *SINK_ROLES)
OUTPUTS = "head outputs"
ALIKE_CLAIM, DIFFERENCE = "heads write nearly the same", "‖new − old‖/‖old‖, mean over heads"
ALIKE = Criterion("at most", 0.1**0.5, "a tenth of the squared length (ours)")


def mean_of(table: str, name: str) -> str:
    """Name the mean of a column by its declared title and unit: `mean entropy in nats`."""
    declaration = declared(table)[name]
    return f"mean {declaration.title}" + (f" in {declaration.unit}" if declaration.unit else "")


def _contexts(run: Run) -> int:
    return int(run.provenance["corpus"]["contexts"])


def sinks(reference: Run, other: Run, places: tuple[Run, Run] | None = None) -> Survival:
    """Sinks by layer, head, kind and token: share of contexts before and after.

    Args:
        places: of both, from `comparison.read_outputs`, which says where each context's sinks are: the whole family is
            then judged by the share of sinks that the other model has at the same place, paired by context.
    """
    table = _joined_sinks(_shares(reference), _shares(other), {"value": ""})
    table = table[(table[list(SIDES)] >= LEAST_SHARE).any(axis=1)]
    table = _strongest_first(_with_status(table, _contexts(reference)), "before", "after")
    paired = None if places is None else kept_places(*places)
    together = "; all of them together by the share that is at the same place of the same context"
    return Survival(
        "sinks",
        "sink",
        f"a sink of a head in at least {percent(LEAST_SHARE)} of the contexts; it {BY_HALVES} (contexts taken as "
        f"independent){'' if paired is None else together}",
        table,
        Change("sinks per context", table["before"].sum(), table["after"].sum()),
        each(
            lambda row: f"{sink_name(row)} ({percent(row['before'])} → {percent(row['after'])} of contexts)"
        ),
        details=() if paired is None else (f"at the same place of the same context: {paired}",),
        weight="before",
        least=LEAST_SHARE,
        paired=paired,
        contexts=_contexts(reference),
    )


def kept_places(reference: Run, other: Run, layer: int | None = None) -> Estimate | None:
    """The share of the reference's sinks (of one layer, or all) that the other has at the same place of a context.

    With the standard error of a ratio of means over contexts, a few of which may be alike by chance
    (`Estimate.floored`). Exact where every head writes the very same. None: not known of both, or no sinks.
    """
    if SINK_PLACES not in reference.arrays or SINK_PLACES not in other.arrays:
        return None
    places, others = (
        pd.DataFrame(run.arrays[SINK_PLACES].numpy(), columns=PLACE) for run in (reference, other)
    )
    if layer is not None:
        places = places[places["layer"] == layer].reset_index(drop=True)
    if not len(places):
        return None
    if torch.equal(reference.arrays["written"], other.arrays["written"]):
        return Estimate.exact(1.0)
    kept = places.merge(others, "left", PLACE, indicator=True)["_merge"] == "both"
    contexts = len(reference.arrays["loss"])
    counts = [np.bincount(places["context"], weights, contexts) for weights in (kept, np.ones(len(places)))]
    share, error = ratio_by_context(*map(torch.from_numpy, counts))
    if contexts == 1:
        return Estimate(float(share), n=1, of="contexts")
    return Estimate(float(share), float(error), contexts, "contexts").floored()


def _shares(run: Run) -> pd.DataFrame:
    """How often each sink occurs, per context."""
    rows = run.sinks.assign(kind=np.where(run.sinks["first"].astype(bool), "first", "later"))
    rows.loc[rows["kind"] == "first", ["token_id", "token"]] = (-1, "")
    return rows.groupby(SINK, as_index=False).agg(token=("token", "first"), value=("share", "sum"))


def _joined_sinks(before: pd.DataFrame, after: pd.DataFrame, values: dict[str, str]) -> pd.DataFrame:
    table = join(before, after, SINK, values, texts=["token"])
    token = table["token_before"].fillna(table["token_after"])
    table.insert(len(SINK), "token", token)
    return table.drop(columns=["token_before", "token_after"])


def _with_status(table: pd.DataFrame, contexts: int) -> pd.DataFrame:
    """Add the error of the change of shares of contexts, and the status of each sink."""
    table = table.assign(se=np.hypot(*(share_error(table[side], contexts) for side in SIDES)))
    return table.assign(status=statuses(table, LEAST_SHARE, contexts))


def _strongest_first(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    order = [*by, *SINK]
    return table.sort_values(order, ascending=[name in SINK for name in order], ignore_index=True)


def tags(reference: Run, other: Run) -> Survival:
    """Tags of the sinks of two traces: η² in the head's output, direction, and the largest η² after the head."""
    values = {"value": "tag_se", "released": "released_se"}
    values |= dict.fromkeys(("share", "contexts", "row", "direction_se", "tagged"), "")
    table = _joined_sinks(_tagging(reference), _tagging(other), values)
    is_unit = [table[side].ge(TAGGED) & table[f"share_{side}"].ge(LEAST_SHARE) for side in SIDES]
    table = table[is_unit[0] | is_unit[1]].reset_index(drop=True)
    rows = [(run, table[f"row_{side}"]) for run, side in zip((reference, other), SIDES, strict=True)]
    directions = [_rows(run.arrays["tag_direction"], numbers) for run, numbers in rows]
    table["cosine"] = torch.cosine_similarity(directions[0], directions[1], dim=1, eps=0).numpy()
    by_group = [_rows(run.arrays.get("tag_by_group", NO_GROUPS), numbers) for run, numbers in rows]
    table["cosine_margin"], kept, turned = kept_directions(table, by_group[0], by_group[1])
    contexts = table[["contexts_before", "contexts_after"]].replace(0, np.nan).min(axis=1)
    status = statuses(table, TAGGED, contexts)
    shares = pd.DataFrame({side: table[f"share_{side}"] for side in SIDES})
    is_gone = table["cosine"].notna() | (_with_status(shares, _contexts(reference))["status"] == LOST)
    table["status"] = np.where((status == SURVIVED) & ~kept | (status == LOST), UNDECIDED, status)
    table.loc[(status == LOST) & is_gone | turned & (table["before"] >= TAGGED), "status"] = LOST
    table = _strongest_first(table, "tagged_before", "tagged_after")
    own = table[(table["before"] >= TAGGED) & (table["tagged_before"] > 0)]

    def mean(name: str) -> float:
        return float(np.average(own[name], weights=own["tagged_before"])) if len(own) else 0.0

    ends, cosine = (*SIDES, "difference", "se"), own["cosine"].median()
    return Survival(
        "tags",
        "tag",
        f"a sink in at least {percent(LEAST_SHARE)} of the contexts whose grouping explains at least "
        f"{percent(TAGGED)} of the variance of the head's output (η²); its tag survives where at least half of η² is "
        "left, and at least half of the new direction's squared length lies along the old one (cosine at least "
        f"{HALF**0.5:.2f}), and is lost where one of them is less, each with the whole 95 % interval; of a sink "
        "that is gone, if the sink is lost",
        table[
            [*SINK, "token", "share_before", "share_after", *ends, "cosine", "cosine_margin"]
            + [f"released_{end}" for end in ends]
            + ["tagged_before", "tagged_after", "status"]
        ],
        Change("mean η² in the head's output", mean("before"), mean("after")),
        each(_tag_change),
        details=(
            Change("largest η² in later layers", mean("released_before"), mean("released_after")),
            *([f"median cosine of the directions {number(cosine)}"] if np.isfinite(cosine) else []),
        ),
        weight="tagged_before",
        directions="cosine",
        least=TAGGED,
        contexts=_contexts(reference),
    )


def _tagging(run: Run) -> pd.DataFrame:
    """Sinks that write something, with their row in the arrays counted from 1; `value`: the strength of the tag."""
    rows = run.traces.assign(row=np.arange(1.0, len(run.traces) + 1))
    # Where a tag has no number, all tokens of a context are caught or none: it tells none apart.
    absent = dict.fromkeys(("tag", "tag_se", "released", "released_se", "tagged"), 0.0)
    # A tag whose error is not known, as of one context or in an older trace, is not certain.
    rows["tag_se"] = rows["tag_se"].where(rows["tag"].isna() | rows["tag_se"].notna(), np.inf)
    rows["direction_se"] = rows["direction_se"].fillna(np.inf) if "direction_se" in rows else np.inf
    return rows[rows["kind"] != "learned"].fillna(absent).rename(columns={"tag": "value"})


def kept_directions(
    table: pd.DataFrame, before: Float[Tensor, "tags groups width"], after: Float[Tensor, "tags groups width"]
) -> tuple[Floats, Flags, Flags]:
    """Half the width of the 95 % interval of `cosine`, and whether at least half of its square is kept, or lost.

    `before` and `after` are sums along the directions by group of contexts; NaN of a tag that has none.
    """
    halves = balanced_halves() @ before, balanced_halves() @ after
    owed = (table["direction_se_before"] ** 2 + table["direction_se_after"] ** 2) / 2
    cosines = torch.cosine_similarity(halves[0], halves[1], dim=2, eps=0)
    margin = direction_margins(cosines.T, owed.replace(np.inf, np.nan).to_numpy())
    return margin, *ALONG.decided(table["cosine"].to_numpy(), margin)


def _rows(stored: Tensor, rows: pd.Series) -> Tensor:
    """Take rows of an array, counted from 1; NaN for row 0, and beyond the end."""
    padded = torch.cat([stored.double().new_full((1, *stored.shape[1:]), torch.nan), stored.double()])
    numbers = torch.from_numpy(rows.to_numpy().astype(np.int64))
    return padded[torch.where(numbers < len(padded), numbers, 0)]


def _tag_change(row: pd.Series) -> str:
    if row["status"] == LOST and row["after"] >= HALF * row["before"]:
        return f"{sink_name(row)} (rotated, cosine {number(row['cosine'])})"
    return f"{sink_name(row)} (η² {number(row['before'])} → {number(row['after'])})"


def outlier_dimensions(reference: Run, other: Run) -> Survival:
    """Outlier dimensions by residual layer: share of tokens with |x| ≥ 6 before and after."""
    shares = [need(run, "outlier_share").astype(np.float64) for run in (reference, other)]
    layer, dimension = np.nonzero(np.maximum(*shares) >= OUTLIER_SHARE)
    places = pd.DataFrame({"layer": layer, "dimension": dimension})
    values = [places.assign(value=of_run[layer, dimension]) for of_run in shares]
    table = join(values[0], values[1], list(places), {"value": ""})
    old, new = (_in_halves(run, layer, dimension) for run in (reference, other))
    table["se"] = half_sample_error(new - old).numpy()
    errors = [half_sample_error(a - HALF * b).numpy() for a, b in ((new, old), (old, new))]
    table["status"] = statuses(table, OUTLIER_SHARE, GROUPS, (errors[0], errors[1]))
    units = [int((table[side] >= OUTLIER_SHARE).sum()) for side in SIDES]
    return Survival(
        "outlier dimensions",
        "outlier dimension",
        f"a dimension of a residual layer with |x| of 6 or more in at least {percent(OUTLIER_SHARE)} of the tokens "
        f"past the first; it {BY_HALVES}",
        table,
        Change("outlier dimensions, summed over layers", *units),
        _dimension_names,
        weight="before",
        least=OUTLIER_SHARE,
        contexts=_contexts(reference),
    )


def _in_halves(
    run: Run, layer: Int[np.ndarray, " units"], dimension: Int[np.ndarray, " units"]
) -> Float[Tensor, "halves units"]:
    """Shares of tokens in balanced halves of the contexts; NaN where a run of an older schema, or of few, has none."""
    by_group = run.arrays.get("outlier_share_by_group")
    if by_group is None:
        return torch.full((1, len(layer)), torch.nan, dtype=torch.float64)
    return balanced_halves() @ by_group[layer, :, dimension].T.double() / (GROUPS // 2)


def massive_activations(reference: Run, other: Run) -> Survival:
    """Massive activations by residual layer, dimension, and place: their number before and after."""
    # A dimension that has none in one model has none in any of its halves.
    key = ["layer", "dimension", "position"]
    table = join(_massive(reference), _massive(other), key, {"value": "error"})
    return Survival(
        "massive activations",
        "massive dimension",
        "a dimension of a residual layer, at the first token or later, with values above 100 and 1000 times the "
        "median; it survives where it has at least half as many, and is lost where it has fewer, each with the whole "
        "95 % interval",
        table.assign(status=statuses(table, 1, GROUPS)),
        Change("massive activations, summed over layers", table["before"].sum(), table["after"].sum()),
        _dimension_names,
        least=1,
        contexts=_contexts(reference),
    )


def _massive(run: Run) -> pd.DataFrame:
    """How many massive activations each dimension of a layer has at the first and at later tokens, and their errors."""
    table = run.outliers
    parts = []
    for name, position in (("massive_first", "first"), ("massive", "later")):
        # Infinite where it is not known: a missing row has none.
        error = table[f"{name}_se"].fillna(np.inf) if f"{name}_se" in table else np.inf
        parts.append(table[["layer", "dimension"]].assign(position=position, value=table[name], error=error))
    return pd.concat(parts, ignore_index=True).query("value > 0").astype({"layer": int, "dimension": int})


def _dimension_names(rows: pd.DataFrame) -> list[str]:
    layers = rows.groupby("dimension")["layer"].nunique().sort_values(ascending=False, kind="stable")
    return [f"dimension {dimension} in {counted(many, 'layer')}" for dimension, many in layers.items()]


def positions(reference: Run, other: Run) -> Survival:
    """The positional basis by residual layer: rank, relative norm, directions, and the curve in any directions."""
    names = ("rank", "relative_norm", "low_frequency_10")
    values = {name: "".join(declared("layers")[name].columns[1:]) for name in names}
    table = join(reference.layers, other.layers, ["layer"], values)
    cosines = squared_cosines(reference, other)
    table["overlap"] = [c.mean() for c in cosines]
    table["overlap_margin"] = overlap_margins(cosines, reference, other)
    table["curve"] = _curves(reference, other)
    norms = statuses(table.rename(columns=lambda name: name.removeprefix("relative_norm_")), 0.0, GROUPS)
    kept, turned = A_HALF.decided(table["overlap"], table["overlap_margin"])
    table["status"] = np.where(kept & (norms == SURVIVED), SURVIVED, UNDECIDED)
    table.loc[turned | (norms == LOST), "status"] = LOST
    overlap_mean, curve_mean = (float(table[name].mean()) for name in ("overlap", "curve"))
    return Survival(
        "positional basis",
        "layer",
        "of a residual layer: survives where at least half of its leading directions, as many as the rank, are left "
        "(overlap: mean squared cosine of the principal angles) and at least half of its relative norm, and is lost "
        "where less of one is, each with the whole 95 % interval; curve: similarity of the positions' Gram matrices "
        "(linear CKA), which is invariant to rotation",
        table,
        _mean_change(table, "relative_norm"),
        each(lambda row: f"layer {row['layer']}"),
        verb=("keeps its positional basis", "keep their positional basis"),
        details=(
            _mean_change(table, "rank"),
            f"overlap of its leading directions {number(overlap_mean, 2)} (random: "
            f"{number(_chance(cosines, reference), 2)})",
            f"similarity of its Gram matrix (linear CKA) {number(curve_mean, 2)}",
        ),
        directions="overlap",
        contexts=_contexts(reference),
    )


def _mean_change(table: pd.DataFrame, name: str) -> Change:
    """Compare the means over layers. The layers share contexts, so errors add up."""
    before, after, error = (mean_over_layers(table[f"{name}_{end}"])[0] for end in (*SIDES, "se"))
    return Change(mean_of("layers", name), before, after, error)


def _curves(reference: Run, other: Run) -> Floats:
    """Linear CKA of both positional bases by layer, ⟨PPᵀ, P′P′ᵀ⟩/(‖PPᵀ‖‖P′P′ᵀ‖); NaN where a basis is zero."""
    similarities = []
    for p, q in zip(*_bases(reference, other), strict=True):
        norms = torch.linalg.matrix_norm(p.T @ p) * torch.linalg.matrix_norm(q.T @ q)
        product = torch.linalg.matrix_norm(p.T @ q).square()
        similarities.append(float(product / norms) if norms > 0 else math.nan)
    return np.array(similarities)


def _bases(*runs: Run) -> list[Float[Tensor, "layers positions width"]]:
    """Positional bases without position 0, or without the tokens before an image's patches."""
    grids = [grid_described(provenance(run, "corpus") or {}) for run in runs]
    return [
        torch.from_numpy(need(run, "positional_basis")[:, 1 if grid is None else grid.leading :]).double()
        for run, grid in zip(runs, grids, strict=True)
    ]


def overlap(first: Run, second: Run) -> tuple[Floats, float]:
    """Overlap ‖VᵀV′‖_F²/k of both positional bases' k leading directions by layer, k the first one's rank.

    And its mean for random directions, k/d.
    """
    cosines = squared_cosines(first, second)
    return np.array([c.mean() for c in cosines]), _chance(cosines, first)


def _chance(cosines: list[Floats], run: Run) -> float:
    return float(np.mean([len(c) for c in cosines])) / need(run, "positional_basis").shape[2]


def squared_cosines(first: Run, second: Run) -> list[Floats]:
    """Squared cosines of the principal angles between the leading directions that `overlap` compares, k per layer."""
    ranks = np.maximum(np.nan_to_num(value_of(first, "rank")).astype(int), 1)
    bases = [torch.linalg.svd(basis, full_matrices=False).Vh for basis in _bases(first, second)]
    return [
        torch.linalg.svdvals(before[:k] @ after[:k].T).square().numpy()
        for before, after, k in zip(*bases, ranks, strict=True)
    ]


def overlap_margins(cosines: list[Floats], *runs: Run) -> Floats:
    """The `direction_margins` of `overlap` by layer; what directions owe to the contexts is their `subspace_error`.

    NaN where a run of an older schema, or of few contexts, has neither.
    """
    if not all("subspace_of_half" in run.arrays for run in runs):
        return np.full(len(cosines), np.nan)
    halves, owed = [], []
    for layer, k in enumerate(len(c) for c in cosines):
        one, two = (run.arrays["subspace_of_half"][layer, :, :k].double() for run in runs)
        halves.append((one @ two.mT).square().sum(dim=(1, 2)) / k)
        owed.append(sum(float(run.arrays["subspace_error"][layer, k - 1]) for run in runs) / 2)
    return direction_margins(torch.stack(halves, dim=1), np.array(owed))


def head_outputs(reference: Run, other: Run) -> Survival:
    """What each head adds to the stream before and after, on the same tokens: 1 − ‖new − old‖²/‖old‖² is kept."""
    changed, old, new = _squares(reference, other)
    contexts, tokens = changed.shape[1], len(reference.arrays["context"])
    lost, error = (values.numpy() for values in ratio_by_context(changed, old))
    difference, before, after = ((sums.sum(dim=1) / tokens).sqrt().numpy() for sums in (changed, old, new))
    writes = before > 0
    kept = np.where(
        writes, 1 - lost, after > 0
    )  # a head that wrote nothing has 0 before, and 1 if it writes now
    layers, heads = reference.arrays["written"].shape[:2]
    table = pd.DataFrame(np.ndindex(layers, heads), columns=HEAD).assign(
        before=writes.astype(float),
        after=kept,
        difference=kept - writes,
        se=np.where(writes, error, 0.0),
        relative_difference=np.divide(difference, before, out=np.full(len(before), np.nan), where=writes),
        norm_before=before,
        norm_after=after,
        norm_difference=after - before,
    )
    table = table[writes | (after > 0)].reset_index(drop=True)
    return Survival(
        OUTPUTS,
        "head",
        f"what a head adds to the stream, o W_O, at {tokens} tokens past the first: it survives where at least "
        "half of its squared norm is retained, 1 − ‖new − old‖²/‖old‖² ≥ ½, and is lost where less is, each with the "
        "whole 95 % interval (over contexts)",
        table.assign(status=statuses(table, 1.0, contexts)),
        Change("mean norm of the outputs", before.mean(), after.mean()),
        each(_output_change),
        verb=("keeps its output", "keep their output"),
        details=(f"median relative difference {number(table['relative_difference'].median())}",),
        least=1.0,
        contexts=contexts,
        further=(judge(ALIKE_CLAIM, DIFFERENCE, _difference(changed[writes], old[writes]), ALIKE),),
    )


def _squares(reference: Run, other: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Squared lengths of new − old, old and new, summed over the tokens of each context, (layers · heads, contexts)."""
    _, context = torch.unique(reference.arrays["context"], return_inverse=True)
    sums: list[list[Tensor]] = [[], [], []]
    for old, new in zip(reference.arrays["written"], other.arrays["written"], strict=True):
        for of_layers, values in zip(sums, (new.double() - old, old.double(), new.double()), strict=True):
            by_context = torch.zeros(len(values), int(context.max()) + 1, dtype=torch.float64)
            of_layers.append(by_context.index_add_(1, context, values.square().sum(dim=2)))
    changed, old, new = (torch.cat(of_layers) for of_layers in sums)
    return changed, old, new


def _difference(changed: Float[Tensor, "heads contexts"], old: Float[Tensor, "heads contexts"]) -> Estimate:
    """‖new − old‖/‖old‖ over all tokens, mean over the heads that write, with the jackknife's error over contexts."""
    if not len(old):
        return Estimate(math.nan)
    value, contexts = float((changed.sum(dim=1) / old.sum(dim=1)).sqrt().mean()), old.shape[1]
    if contexts == 1:
        return Estimate(value, n=1, of="contexts")
    changed_without, old_without = (sums.sum(dim=1, keepdim=True) - sums for sums in (changed, old))
    left_out = (changed_without.clamp_min(0) / old_without).sqrt().nan_to_num().mean(dim=0)
    return Estimate(value, float(jackknife_error(left_out)), contexts, "contexts")


def _output_change(row: pd.Series) -> str:
    if row["norm_after"] == 0:
        return f"{head_name(row['layer'], row['head'])} (no longer writes anything)"
    retained = percent(row["after"]) if row["after"] > 0 else "nothing"
    norms = f"{number(row['norm_before'])} → {number(row['norm_after'])}"
    return f"{head_name(row['layer'], row['head'])} (retains {retained}; norm {norms})"


def entropies(reference: Run, other: Run) -> Survival:
    """Mean attention entropy of every head, its share of the maximum, and propagation."""
    heads = [
        run.heads.assign(share=_or_unknown(entropy_share(run), run)).rename(columns={"entropy": "value"})
        for run in (reference, other)
    ]
    table = join(heads[0], heads[1], HEAD, {"value": "entropy_se", "share": "", "propagation": ""})
    shares = table["share_before"].to_numpy(), table["share_after"].to_numpy()
    before, after = map(range_of, shares)
    errors, contexts = (entropy_share_error(reference), entropy_share_error(other)), _contexts(reference)
    looks = looks_of(int(table["difference"].notna().sum()))
    table = table.drop(columns="share_difference").assign(
        left_range=np.where(before != after, RANGES[after], ""),
        status=status_of(*similar_entropies(shares, errors, contexts, looks)),
    )
    table = table[table["difference"].notna()].reset_index(drop=True)
    first, second = table["share_before"].to_numpy()[:, None], table["share_after"].to_numpy()
    holds: Flags = (np.abs(first - second) <= TENTH) & (range_of(first) == range_of(second))
    return Survival(
        "entropies",
        "head",
        f"of a head: survives where it changes by at most {percent(TENTH)} of the maximum, and the head neither "
        f"becomes nor ceases to be collapsed (below {percent(ENTROPY_COLLAPSE.limit)} of the maximum) or uniform "
        f"(above {percent(UNIFORM_ATTENTION.threshold)}), and is lost where not, each with whole 95 % intervals",
        table,
        Change(mean_of("heads", "entropy"), table["before"].mean(), table["after"].mean()),
        each(_entropy_change),
        verb=("keeps its entropy", "keep their entropy"),
        by_chance=expected_by_chance(holds),
        contexts=contexts,
    )


def similar_entropies(
    shares: tuple[Floats, Floats], errors: tuple[Floats, Floats], contexts: int, looks: int
) -> tuple[Flags, Flags]:
    """Decide by whole intervals whether entropies survive or are lost: by their change, and their place in `RANGES`."""
    kept, lost = A_TENTH.decided(shares[1] - shares[0], margins(np.hypot(*errors), contexts, looks))
    ends = [
        [range_of(share + sign * margins(error, contexts, looks)) for sign in (-1, 1)]
        for share, error in zip(shares, errors, strict=True)
    ]
    (low, high), (new_low, new_high) = ends
    return kept & (low == new_high) & (high == new_low), lost | (high < new_low) | (new_high < low)


def entropy_share_error(run: Run) -> Floats:
    """The standard error of each head's entropy as a share of the maximum."""
    entropy, error = _values(run, "entropy"), _values(run, "entropy_se")
    with np.errstate(divide="ignore", invalid="ignore"):
        maximum = entropy / _or_unknown(entropy_share(run), run)
    # A head whose entropy is 0 in every context has no error either, and no maximum that could be seen.
    return np.where(entropy > 0, error / maximum, error)


def _values(run: Run, name: str) -> Floats:
    return _or_unknown(column(run.heads, name), run)


def _or_unknown(values: Floats | None, run: Run) -> Floats:
    return np.full(len(run.heads), np.nan) if values is None else values


def range_of(share: Floats | pd.Series) -> np.ndarray:
    """The place in `RANGES` of each entropy, as a share of the maximum."""
    return np.digitize(np.asarray(share), [ENTROPY_COLLAPSE.limit, UNIFORM_ATTENTION.threshold])


def _entropy_change(row: pd.Series) -> str:
    entered = f", now {row['left_range']}" if row["left_range"] else ""
    change = f"{number(row['before'])} → {number(row['after'])}{entered}"
    return f"{head_name(row['layer'], row['head'])} ({change})"


def head_types(reference: Run, other: Run) -> Survival:
    """Heads that follow a pattern or attend to sinks, by the report's thresholds."""
    tables = []
    for role in ROLES:
        if role.column not in reference.heads and role.column not in other.heads:
            continue
        scores = [
            run.heads[HEAD].assign(
                value=np.nan_to_num(_values(run, role.column)), error=score_error(run, role)
            )
            for run in (reference, other)
        ]
        table = join(scores[0], scores[1], HEAD, {"value": "error"})
        table.insert(len(HEAD), "type", role.title)
        table.insert(len(HEAD) + 1, "least", role.threshold)
        table["n"] = independent_scores(reference, role)
        tables.append(table[(table[list(SIDES)] >= role.threshold).any(axis=1)])
    table = pd.concat(tables, ignore_index=True)
    table["status"] = statuses(table, table["least"].to_numpy(), table.pop("n"))
    units = [int((table[side] >= table["least"]).sum()) for side in SIDES]
    return Survival(
        "head types",
        "head role",
        "; ".join(f"{role.title}: score of at least {role.threshold:g}" for role in ROLES)
        + f"; it {BY_HALVES}",
        table,
        Change("heads with a role", *units),
        each(_role_change),
        contexts=_contexts(reference),
    )


def score_error(run: Run, role: HeadRole) -> Floats:
    """The standard error of each head's score in a role: the survey's own, or at most that of a share of contexts."""
    if role in PATTERN_ROLES:
        return _values(run, f"{role.column}_se")
    return share_error(_values(run, role.column), _contexts(run))


def independent_scores(run: Run, role: HeadRole) -> int:
    """The number of contexts, or of random sequences, that a score is the mean of."""
    return scored_sequences(run.provenance["corpus"]["length"]) if role == INDUCTION else _contexts(run)


def _role_change(row: pd.Series) -> str:
    change = f"{number(row['before'], 2)} → {number(row['after'], 2)}"
    return f"{head_name(row['layer'], row['head'])} as {row['type'].removesuffix(' head')} ({change})"


def spectra(reference: Run, other: Run) -> Survival:
    """W_QK of every head: trace, Frobenius norm, r, and the regime that they put it in."""
    heads = [
        run.heads.assign(frobenius=np.sqrt(_values(run, "frobenius_squared"))) for run in (reference, other)
    ]
    regimes = [name for name in ("regime", "regime_data") if all(name in table for table in heads)]
    table = join(heads[0], heads[1], HEAD, dict.fromkeys(("frobenius", "trace", "r"), ""), texts=regimes)
    table = table[table["frobenius_difference"].notna()].reset_index(drop=True)
    first, second = (table[f"frobenius_{side}"] for side in SIDES)
    one, two = first.to_numpy()[:, None], second.to_numpy()
    same_regime = table["regime_before"].to_numpy()[:, None] == table["regime_after"].to_numpy()
    holds: Flags = same_regime & (two >= HALF * one) & (one >= HALF * two)
    table["status"] = np.where(np.diagonal(holds), SURVIVED, LOST)
    zero = int((first == 0).sum())
    median = round((second / first.where(first > 0)).median() - 1, 4) + 0.0  # no −0 %
    same = [int((table[f"{name}_before"] == table[f"{name}_after"]).sum()) for name in regimes]
    titles = ("regime", "regime with the covariance of what the head reads")
    return Survival(
        "spectra",
        "head",
        "W_QK of a head: survives where its Frobenius norm changes by at most a factor of two and its regime (from "
        "the weights alone) is the same",
        table,
        Change("mean Frobenius norm of W_QK", first.mean(), second.mean()),
        each(_spectrum_change),
        verb=("keeps the norm and regime of W_QK", "keep the norm and regime of W_QK"),
        details=(
            f"median change of the norm {percent(median)}"
            + (f" (without {counted(zero, 'head')} of norm 0 before)" if zero else ""),
            *(f"same {title} in {count}" for title, count in zip(titles, same, strict=False)),
        ),
        by_chance=expected_by_chance(holds),
        certain=True,
    )


def _spectrum_change(row: pd.Series) -> str:
    change = f"{number(row['frobenius_before'])} → {number(row['frobenius_after'])}"
    if row["regime_before"] != row["regime_after"]:
        change += f", {row['regime_before']} → {row['regime_after']}"
    return f"{head_name(row['layer'], row['head'])} ({change})"
