"""The parts of the mechanism that are compared: what each takes from two runs, and what counts as a unit of it.

One function a part. All of them read runs on the same text, and judge by the rules of `survival.py`. Of models that
differ in shape or tokenizer only heads are compared, matched by what they do.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from torch import Tensor

from theodolite.comparison.outputs import PLACE, SINK_PLACES
from theodolite.comparison.survival import (
    BY_HALVES,
    ENDS,
    HALF,
    LEFT,
    LOST,
    SIDES,
    SURVIVED,
    UNDECIDED,
    Change,
    Flags,
    Survival,
    direction_margins,
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
from theodolite.errors import UsageError
from theodolite.estimates import Estimate, Floats, jackknife_error
from theodolite.judging import Criterion, judge
from theodolite.logits.attribution import scored_sequences
from theodolite.measure.catalogue import declared
from theodolite.measure.geometry import OUTLIER_SHARE
from theodolite.measure.head_roles import INDUCTION, PATTERN_ROLES, SINK_ROLES, UNIFORM_ATTENTION, HeadRole
from theodolite.measure.rank_correlation import rank_correlation
from theodolite.measure.ratios import ratio_by_context
from theodolite.measure.uncertainty import balanced_halves, half_sample_error
from theodolite.passes.run import Run
from theodolite.report.data import column, entropy_share, mean_over_layers, need, provenance, value_of
from theodolite.report.health import ENTROPY_COLLAPSE
from theodolite.sinks.exclusions import LEAST_SHARE
from theodolite.system.wording import counted, head_name, listed, number, percent

HEAD, SINK = ["layer", "head"], ["layer", "head", "kind", "token_id"]
"""What a head, and a sink, is found again by; which token comes first does not matter."""

A_HALF = Criterion("at least", HALF, "ours")
ALONG = Criterion("at least", HALF**0.5, "half of the squared length (ours)")
TAGGED = 0.1  # a sink tags if its grouping explains so much of the variance of the head's output
TENTH = 0.1  # an entropy survives that changes by at most this share of the maximum (ours)
A_TENTH = Criterion("within", TENTH, "ours")
RANGES = np.array(["collapsed", "", "uniform"])  # below `ENTROPY_COLLAPSE`, above `UNIFORM_ATTENTION`
ROLES = (*PATTERN_ROLES, *SINK_ROLES)
OUTPUTS, MATCHED = "head outputs", "matched heads"
ALIKE = Criterion("at most", 0.1**0.5, "a tenth of the squared length (ours)")
ENTROPY = "entropy_share"  # of a head: its entropy over the maximum
SHUFFLES = 20  # of what the other model's heads do, for what a matching finds by chance


def mean_of(table: str, name: str) -> str:
    """Name the mean of a column by its declared title and unit: `mean entropy in nats`."""
    declaration = declared(table)[name]
    return f"mean {declaration.title}" + (f" in {declaration.unit}" if declaration.unit else "")


def _contexts(run: Run) -> int:
    return int(run.provenance["corpus"]["contexts"])


def sinks(reference: Run, other: Run, places: tuple[Run, Run] | None = None) -> Survival:
    """Compare sinks by layer, head, kind and token: share of contexts before and after.

    Args:
        places: of both, from `comparison.read_outputs`, which says where each context's sinks are: the whole family is
            then judged by the share of sinks that the other model has at the same place, paired by context.
    """
    shares = []
    for run in (reference, other):
        rows = run.sinks.assign(kind=np.where(run.sinks["first"].astype(bool), "first", "later"))
        rows.loc[rows["kind"] == "first", ["token_id", "token"]] = (-1, "")
        shares.append(
            rows.groupby(SINK, as_index=False).agg(token=("token", "first"), value=("share", "sum"))
        )
    table = _joined_sinks(shares[0], shares[1], {"value": ""})
    table = table[(table[list(SIDES)] >= LEAST_SHARE).any(axis=1)]
    table = _strongest_first(_with_status(table, _contexts(reference)), *SIDES)
    paired = None if places is None else kept_places(*places)
    together = "; all of them together by the share that is at the same place of the same context"
    return Survival(
        "sinks",
        "sink",
        f"a sink of a head in at least {percent(LEAST_SHARE)} of the contexts; it {BY_HALVES} (contexts taken as "
        f"independent){'' if paired is None else together}",
        table,
        Change("sinks per context", table["before"].sum(), table["after"].sum()),
        lambda row: f"({percent(row['before'])} → {percent(row['after'])} of contexts)",
        details=() if paired is None else (f"at the same place of the same context: {paired}",),
        weight="before",
        least=LEAST_SHARE,
        paired=paired,
        contexts=_contexts(reference),
    )


def kept_places(reference: Run, other: Run, layer: int | None = None) -> Estimate | None:
    """Estimate the share of the reference's sinks (of a layer, or all) that the other has at the same place.

    With the standard error of a ratio of means over contexts, a few of which may be alike by chance
    (`Estimate.floored`). Exact where every head writes the very same. None: there are no sinks.
    """
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
    share, error = map(float, ratio_by_context(*map(torch.from_numpy, counts)))
    return Estimate(share, error if contexts > 1 else math.nan, contexts, "contexts").floored()


def _joined_sinks(before: pd.DataFrame, after: pd.DataFrame, values: dict[str, str]) -> pd.DataFrame:
    table = join(before, after, SINK, values, texts=["token"])
    table.insert(len(SINK), "token", table.pop("token_before").fillna(table.pop("token_after")))
    return table


def _with_status(table: pd.DataFrame, contexts: int) -> pd.DataFrame:
    """Add the error of the change of shares of contexts, and the status of each sink."""
    table = table.assign(se=np.hypot(*(share_error(table[side], contexts) for side in SIDES)))
    return table.assign(status=statuses(table, LEAST_SHARE, contexts))


def _strongest_first(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    order = [*by, *SINK]
    return table.sort_values(order, ascending=[name in SINK for name in order], ignore_index=True)


def tags(reference: Run, other: Run) -> Survival:
    """Compare tags of the sinks of two traces: η² in the head's output, direction, and the largest η² after it."""
    traces = []
    for run in (reference, other):
        rows = run.traces.assign(row=np.arange(1.0, len(run.traces) + 1))
        # A tag whose error is not known, as of one context, is not certain.
        rows["tag_se"] = rows["tag_se"].where(rows["tag"].isna() | rows["tag_se"].notna(), np.inf)
        rows["direction_se"] = rows["direction_se"].fillna(np.inf)
        # Where a tag has no number, all tokens of a context are caught or none: it tells none apart.
        absent = dict.fromkeys(("tag", "tag_se", "released", "released_se", "tagged"), 0.0)
        traces.append(rows[rows["kind"] != "learned"].fillna(absent).rename(columns={"tag": "value"}))
    values = {"value": "tag_se", "released": "released_se"}
    values |= dict.fromkeys(("share", "contexts", "row", "direction_se", "tagged"), "")
    table = _joined_sinks(traces[0], traces[1], values)
    is_unit = [table[side].ge(TAGGED) & table[f"share_{side}"].ge(LEAST_SHARE) for side in SIDES]
    table = table[is_unit[0] | is_unit[1]].reset_index(drop=True)
    directions, by_group = (
        [
            _rows(run.arrays[name], table[f"row_{side}"])
            for run, side in zip((reference, other), SIDES, strict=True)
        ]
        for name in ("tag_direction", "tag_by_group")
    )
    table["cosine"] = torch.cosine_similarity(directions[0], directions[1], dim=1, eps=0).numpy()
    table["cosine_margin"], kept, turned = kept_directions(table, by_group[0], by_group[1])
    contexts = table[["contexts_before", "contexts_after"]].replace(0, np.nan).min(axis=1)
    status = statuses(table, TAGGED, contexts)
    shares = pd.DataFrame({side: table[f"share_{side}"] for side in SIDES})
    is_gone = table["cosine"].notna() | (_with_status(shares, _contexts(reference))["status"] == LOST)
    table["status"] = np.where((status == SURVIVED) & ~kept | (status == LOST), UNDECIDED, status)
    table.loc[(status == LOST) & is_gone | turned & (table["before"] >= TAGGED), "status"] = LOST
    table = _strongest_first(table, "tagged_before", "tagged_after")
    own = table[(table["before"] >= TAGGED) & (table["tagged_before"] > 0)]

    def mean(name: str, value: str) -> Change:
        weights = own["tagged_before"]
        ends = (
            np.average(own[end], weights=weights) if len(own) else 0.0
            for end in (f"{value}before", f"{value}after")
        )
        return Change(name, *map(float, ends))

    def change(row: pd.Series) -> str:
        if row["status"] == LOST and row["after"] >= HALF * row["before"]:
            return f"(rotated, cosine {number(row['cosine'])})"
        return f"(η² {number(row['before'])} → {number(row['after'])})"

    cosine = own["cosine"].median()
    shown = [*SINK, "token", "share_before", "share_after", *ENDS, "cosine", "cosine_margin"]
    shown += [*(f"released_{end}" for end in ENDS), "tagged_before", "tagged_after", "status"]
    return Survival(
        "tags",
        "tag",
        f"a sink in at least {percent(LEAST_SHARE)} of the contexts whose grouping explains at least "
        f"{percent(TAGGED)} of the variance of the head's output (η²); its tag survives where at least half of η² is "
        "left, and at least half of the new direction's squared length lies along the old one (cosine at least "
        f"{HALF**0.5:.2f}), and is lost where one of them is less, each with the whole 95 % interval; of a sink "
        "that is gone, if the sink is lost",
        table[shown],
        mean("mean η² in the head's output", ""),
        change,
        details=(
            mean("largest η² in later layers", "released_"),
            *([f"median cosine of the directions {number(cosine)}"] if np.isfinite(cosine) else []),
        ),
        weight="tagged_before",
        directions="cosine",
        least=TAGGED,
        contexts=_contexts(reference),
    )


def kept_directions(
    table: pd.DataFrame, before: Float[Tensor, "tags groups width"], after: Float[Tensor, "tags groups width"]
) -> tuple[Floats, Flags, Flags]:
    """Compute half the 95 % interval's width of `cosine`; mark where half of its square is kept, or lost.

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


def outlier_dimensions(reference: Run, other: Run) -> Survival:
    """Compare outlier dimensions by residual layer: share of tokens with |x| ≥ 6, paired by context."""
    runs = (reference, other)
    shares = [need(run, "outlier_share").astype(np.float64) for run in runs]
    layer, dimension = np.nonzero(np.maximum(*shares) >= OUTLIER_SHARE)
    before, after = (share[layer, dimension] for share in shares)
    table = pd.DataFrame({"layer": layer, "dimension": dimension, "before": before, "after": after})
    old, new = (
        balanced_halves()
        @ torch.from_numpy(need(run, "outlier_share_by_group")[layer, :, dimension]).T.double()
        / (GROUPS // 2)
        for run in runs
    )
    halves = (new - old, new - HALF * old, old - HALF * new)
    error, of_left, of_new = (half_sample_error(of).numpy() for of in halves)
    table = table.assign(difference=after - before, se=error)
    table["status"] = statuses(table, OUTLIER_SHARE, GROUPS, (of_left, of_new))
    units = [int((table[side] >= OUTLIER_SHARE).sum()) for side in SIDES]
    return Survival(
        "outlier dimensions",
        "outlier dimension",
        f"a dimension of a residual layer with |x| of 6 or more in at least {percent(OUTLIER_SHARE)} of the tokens "
        f"past the first; it {BY_HALVES}",
        table,
        Change("outlier dimensions, summed over layers", *units),
        weight="before",
        least=OUTLIER_SHARE,
        contexts=_contexts(reference),
    )


def massive_activations(reference: Run, other: Run) -> Survival:
    """Compare massive activations by residual layer, dimension, and place: their number before and after."""
    sides = []
    for run in (reference, other):
        places = []
        for name, position in (("massive_first", "first"), ("massive", "later")):
            rows = run.outliers[["layer", "dimension"]].assign(position=position, value=run.outliers[name])
            # Infinite where it is not known: a missing row has none, in any half of the contexts.
            places.append(rows.assign(error=run.outliers[f"{name}_se"].fillna(np.inf)))
        side = pd.concat(places, ignore_index=True).query("value > 0")
        sides.append(side.astype({"layer": int, "dimension": int}))
    table = join(sides[0], sides[1], ["layer", "dimension", "position"], {"value": "error"})
    return Survival(
        "massive activations",
        "massive dimension",
        "a dimension of a residual layer, at the first token or later, with values above 100 and 1000 times the "
        "median; it survives where it has at least half as many, and is lost where it has fewer, each with the whole "
        "95 % interval",
        table.assign(status=statuses(table, 1, GROUPS)),
        Change("massive activations, summed over layers", table["before"].sum(), table["after"].sum()),
        least=1,
        contexts=_contexts(reference),
    )


def positions(reference: Run, other: Run) -> Survival:
    """Compare the positional basis by residual layer: rank, relative norm, directions, and curve in any directions."""
    names = ("rank", "relative_norm", "low_frequency_10")
    values = {name: "".join(declared("layers")[name].columns[1:]) for name in names}
    table = join(reference.layers, other.layers, ["layer"], values)
    cosines = squared_cosines(reference, other)
    table["overlap"] = [of_layer.mean() for of_layer in cosines]
    table["overlap_margin"] = overlap_margins(cosines, reference, other)
    table["curve"] = [linear_cka(p, q) for p, q in zip(*_bases(reference, other), strict=True)]
    norms = statuses(table.rename(columns=lambda name: name.removeprefix("relative_norm_")), 0.0, GROUPS)
    kept, turned = A_HALF.decided(table["overlap"], table["overlap_margin"])
    table["status"] = status_of(kept & (norms == SURVIVED), turned | (norms == LOST))
    # The layers share contexts, so errors add up.
    norm, rank = (
        Change(
            mean_of("layers", name), *(mean_over_layers(table[f"{name}_{end}"])[0] for end in (*SIDES, "se"))
        )
        for name in ("relative_norm", "rank")
    )
    return Survival(
        "positional basis",
        "layer",
        "of a residual layer: survives where at least half of its leading directions, as many as the rank, are left "
        "(overlap: mean squared cosine of the principal angles) and at least half of its relative norm, and is lost "
        "where less of one is, each with the whole 95 % interval; curve: similarity of the positions' Gram matrices "
        "(linear CKA), which is invariant to rotation",
        table,
        norm,
        verb=("keeps its positional basis", "keep their positional basis"),
        details=(
            rank,
            f"overlap of its leading directions {number(table['overlap'].mean(), 2)} (random: "
            f"{number(_chance(cosines, reference), 2)})",
            f"similarity of its Gram matrix (linear CKA) {number(table['curve'].mean(), 2)}",
        ),
        directions="overlap",
        contexts=_contexts(reference),
    )


def _bases(*runs: Run) -> list[Float[Tensor, "layers positions width"]]:
    """Return positional bases without position 0, or without the tokens before an image's patches."""
    grids = [grid_described(provenance(run, "corpus") or {}) for run in runs]
    return [
        torch.from_numpy(need(run, "positional_basis")[:, 1 if grid is None else grid.leading :]).double()
        for run, grid in zip(runs, grids, strict=True)
    ]


def linear_cka(p: Float[Tensor, "positions width"], q: Float[Tensor, "positions width"]) -> float:
    """Compute linear CKA, ⟨PPᵀ, QQᵀ⟩/(‖PPᵀ‖‖QQᵀ‖); NaN where a basis is zero."""
    crossed, own, others = (torch.linalg.matrix_norm(a.T @ b) for a, b in ((p, q), (p, p), (q, q)))
    return float(crossed.square() / (own * others))


def overlap(first: Run, second: Run) -> tuple[Floats, float]:
    """Compute ‖VᵀV′‖_F²/k of both positional bases' k leading directions by layer, k the first one's rank.

    And its mean for random directions, k/d.
    """
    cosines = squared_cosines(first, second)
    return np.array([of_layer.mean() for of_layer in cosines]), _chance(cosines, first)


def _chance(cosines: list[Floats], run: Run) -> float:
    return float(np.mean([len(of_layer) for of_layer in cosines])) / need(run, "positional_basis").shape[2]


def squared_cosines(first: Run, second: Run) -> list[Floats]:
    """Square the cosines of the principal angles between the leading directions of `overlap`, k per layer."""
    ranks = np.maximum(np.nan_to_num(value_of(first, "rank")).astype(int), 1)
    bases = [torch.linalg.svd(basis, full_matrices=False).Vh for basis in _bases(first, second)]
    return [
        torch.linalg.svdvals(before[:k] @ after[:k].T).square().numpy()
        for before, after, k in zip(*bases, ranks, strict=True)
    ]


def overlap_margins(cosines: list[Floats], *runs: Run) -> Floats:
    """Compute `direction_margins` of `overlap` by layer; its sampling error is the `subspace_error` of the bases."""
    halves, owed = [], []
    for layer, k in enumerate(map(len, cosines)):
        one, two = (run.arrays["subspace_of_half"][layer, :, :k].double() for run in runs)
        halves.append((one @ two.mT).square().sum(dim=(1, 2)) / k)
        owed.append(sum(float(run.arrays["subspace_error"][layer, k - 1]) for run in runs) / 2)
    return direction_margins(torch.stack(halves, dim=1), np.array(owed))


def head_outputs(reference: Run, other: Run) -> Survival:
    """Compare what each head writes to the stream: 1 − ‖new − old‖²/‖old‖² is kept on the same tokens."""
    # Squared lengths, summed over the tokens of each context: (heads of all layers, contexts).
    context = torch.unique(reference.arrays["context"], return_inverse=True)[1]
    layers, heads, tokens = reference.arrays["written"].shape[:3]
    contexts = int(context.max()) + 1
    squares = torch.zeros(3, layers, heads, contexts, dtype=torch.float64)
    for layer, (one, two) in enumerate(
        zip(reference.arrays["written"], other.arrays["written"], strict=True)
    ):
        for kind, values in enumerate((two.double() - one, one.double(), two.double())):
            squares[kind, layer].index_add_(1, context, values.square().sum(dim=2))
    changed, old, new = squares.flatten(1, 2)
    lost, error = (values.numpy() for values in ratio_by_context(changed, old))
    difference, before, after = ((sums.sum(dim=1) / tokens).sqrt().numpy() for sums in (changed, old, new))
    writes = before > 0
    kept = np.where(writes, 1 - lost, after > 0)  # of a head that wrote nothing, 1 if it writes now
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

    def change(row: pd.Series) -> str:
        if row["norm_after"] == 0:
            return "(no longer writes anything)"
        retained = percent(row["after"]) if row["after"] > 0 else "nothing"
        return f"(retains {retained}; norm {number(row['norm_before'])} → {number(row['norm_after'])})"

    what = "‖new − old‖/‖old‖, mean over heads"
    relative = _relative_difference(changed[writes], old[writes])
    return Survival(
        OUTPUTS,
        "head",
        f"what a head adds to the stream, o W_O, at {tokens} tokens past the first: it survives where at least "
        "half of its squared norm is retained, 1 − ‖new − old‖²/‖old‖² ≥ ½, and is lost where less is, each with the "
        "whole 95 % interval (over contexts)",
        table.assign(status=statuses(table, 1.0, contexts)),
        Change("mean norm of the outputs", before.mean(), after.mean()),
        change,
        verb=("keeps its output", "keep their output"),
        details=(f"median relative difference {number(table['relative_difference'].median())}",),
        least=1.0,
        contexts=contexts,
        further=(judge("heads write nearly the same", what, relative, ALIKE),),
    )


def _relative_difference(
    changed: Float[Tensor, "heads contexts"], old: Float[Tensor, "heads contexts"]
) -> Estimate:
    """Compute ‖new − old‖/‖old‖ over all tokens, mean over the heads that write, with the jackknife's error."""
    if not len(old):
        return Estimate(math.nan)
    contexts, error = old.shape[1], math.nan
    if contexts > 1:
        changed_without, old_without = (sums.sum(dim=1, keepdim=True) - sums for sums in (changed, old))
        left_out = (changed_without.clamp_min(0) / old_without).sqrt().nan_to_num().mean(dim=0)
        error = float(jackknife_error(left_out))
    value = (changed.sum(dim=1) / old.sum(dim=1)).sqrt().mean()
    return Estimate(float(value), error, contexts, "contexts")


def entropies(reference: Run, other: Run) -> Survival:
    """Compare mean attention entropy of every head, its share of the maximum, and propagation."""
    runs, contexts = (reference, other), _contexts(reference)
    heads = [run.heads.assign(share=_share(run)).rename(columns={"entropy": "value"}) for run in runs]
    table = join(heads[0], heads[1], HEAD, {"value": "entropy_se", "share": "", "propagation": ""})
    first, second = (table[f"share_{side}"].to_numpy() for side in SIDES)
    known = table["difference"].notna()
    looks = looks_of(int(known.sum()))
    errors = [margins(entropy_share_error(run), contexts, looks) for run in runs]
    kept, lost = similar_entropies(first, second, *errors)
    left = np.where(range_of(first) != range_of(second), RANGES[range_of(second)], "")
    table = table.drop(columns="share_difference").assign(left_range=left, status=status_of(kept, lost))
    table = table[known].reset_index(drop=True)

    def change(row: pd.Series) -> str:
        entered = f", now {row['left_range']}" if row["left_range"] else ""
        return f"({number(row['before'])} → {number(row['after'])}{entered})"

    return Survival(
        "entropies",
        "head",
        f"of a head: survives where it changes by at most {percent(TENTH)} of the maximum, and the head neither "
        f"becomes nor ceases to be collapsed (below {percent(ENTROPY_COLLAPSE.limit)} of the maximum) or uniform "
        f"(above {percent(UNIFORM_ATTENTION.threshold)}), and is lost where not, each with whole 95 % intervals",
        table,
        Change(mean_of("heads", "entropy"), table["before"].mean(), table["after"].mean()),
        change,
        verb=("keeps its entropy", "keep their entropy"),
        by_chance=expected_by_chance(similar_entropies(first[known, None], second[known], 0.0, 0.0)[0]),
        contexts=contexts,
    )


def similar_entropies(
    before: Floats, after: Floats, error: Floats | float, error_after: Floats | float
) -> tuple[Flags, Flags]:
    """Decide whether entropies survive or are lost: by their change, and their place in `RANGES`.

    `error`, `error_after`: half the widths of the 95 % intervals of both; whole intervals decide.
    """
    kept, lost = A_TENTH.decided(after - before, np.hypot(error, error_after))
    (low, high), (new_low, new_high) = (
        (range_of(share - margin), range_of(share + margin))
        for share, margin in ((before, error), (after, error_after))
    )
    return kept & (low == new_high) & (high == new_low), lost | (high < new_low) | (new_high < low)


def range_of(share: Floats) -> np.ndarray:
    """Find the place in `RANGES` of each entropy, as a share of the maximum."""
    return np.digitize(share, [ENTROPY_COLLAPSE.limit, UNIFORM_ATTENTION.threshold])


def entropy_share_error(run: Run) -> Floats:
    """Return the standard error of each head's entropy as a share of the maximum."""
    entropy, error = _values(run, "entropy"), _values(run, "entropy_se")
    with np.errstate(divide="ignore", invalid="ignore"):
        maximum = entropy / _share(run)
    # A head whose entropy is 0 in every context has no error either, and no maximum that could be seen.
    return np.where(entropy > 0, error / maximum, error)


def _share(run: Run) -> Floats:
    shares = entropy_share(run)
    return np.full(len(run.heads), np.nan) if shares is None else shares


def _values(run: Run, name: str) -> Floats:
    values = column(run.heads, name)
    return np.full(len(run.heads), np.nan) if values is None else values


def head_types(reference: Run, other: Run) -> Survival:
    """Compare the heads that follow a pattern or attend to sinks, by the report's thresholds."""
    runs, tables = (reference, other), []
    for role in ROLES:
        if not any(role.column in run.heads for run in runs):
            continue
        one, two = (
            run.heads[HEAD].assign(
                value=np.nan_to_num(_values(run, role.column)), error=score_error(run, role)
            )
            for run in runs
        )
        table = join(one, two, HEAD, {"value": "error"})
        table.insert(len(HEAD), "type", role.title)
        table.insert(len(HEAD) + 1, "least", role.threshold)
        table["n"] = independent_scores(reference, role)
        tables.append(table[(table[list(SIDES)] >= role.threshold).any(axis=1)])
    table = pd.concat(tables, ignore_index=True)
    table["status"] = statuses(table, table["least"].to_numpy(), table.pop("n"))
    units = [int((table[side] >= table["least"]).sum()) for side in SIDES]

    def change(row: pd.Series) -> str:
        scores = f"{number(row['before'], 2)} → {number(row['after'], 2)}"
        return f"as {row['type'].removesuffix(' head')} ({scores})"

    thresholds = "; ".join(f"{role.title}: score of at least {role.threshold:g}" for role in ROLES)
    return Survival(
        "head types",
        "head role",
        f"{thresholds}; it {BY_HALVES}",
        table,
        Change("heads with a role", *units),
        change,
        contexts=_contexts(reference),
    )


def score_error(run: Run, role: HeadRole) -> Floats:
    """Return the standard error of each head's score in a role: the survey's, or at most that of a share."""
    if role in PATTERN_ROLES:
        return _values(run, f"{role.column}_se")
    return share_error(_values(run, role.column), _contexts(run))


def independent_scores(run: Run, role: HeadRole) -> int:
    """Return the number of contexts, or of random sequences, that a score is the mean of."""
    return scored_sequences(run.provenance["corpus"]["length"]) if role == INDUCTION else _contexts(run)


def spectra(reference: Run, other: Run) -> Survival:
    """Compare W_QK of every head: trace, Frobenius norm, r, and the regime that they put it in."""
    one, two = (
        run.heads.assign(frobenius=np.sqrt(_values(run, "frobenius_squared"))) for run in (reference, other)
    )
    titles = {"regime": "regime", "regime_data": "regime with the covariance of what the head reads"}
    regimes = [name for name in titles if name in one and name in two]
    table = join(one, two, HEAD, dict.fromkeys(("frobenius", "trace", "r"), ""), texts=regimes)
    table = table[table["frobenius_difference"].notna()].reset_index(drop=True)
    first, second = (table[f"frobenius_{side}"] for side in SIDES)
    before, after = first.to_numpy()[:, None], second.to_numpy()
    same_regime = table["regime_before"].to_numpy()[:, None] == table["regime_after"].to_numpy()
    holds: Flags = same_regime & (after >= HALF * before) & (before >= HALF * after)
    table["status"] = np.where(np.diagonal(holds), SURVIVED, LOST)
    zero = int((first == 0).sum())
    median = round((second / first.where(first > 0)).median() - 1, 4) + 0.0  # no −0 %
    same = {name: int((table[f"{name}_before"] == table[f"{name}_after"]).sum()) for name in regimes}

    def change(row: pd.Series) -> str:
        old, new = row["regime_before"], row["regime_after"]
        norms = f"{number(row['frobenius_before'])} → {number(row['frobenius_after'])}"
        return f"({norms})" if old == new else f"({norms}, {old} → {new})"

    return Survival(
        "spectra",
        "head",
        "W_QK of a head: survives where its Frobenius norm changes by at most a factor of two and its regime (from "
        "the weights alone) is the same",
        table,
        Change("mean Frobenius norm of W_QK", first.mean(), second.mean()),
        change,
        verb=("keeps the norm and regime of W_QK", "keep the norm and regime of W_QK"),
        details=(
            f"median change of the norm {percent(median)}"
            + (f" (without {counted(zero, 'head')} of norm 0 before)" if zero else ""),
            *(f"same {titles[name]} in {count}" for name, count in same.items()),
        ),
        by_chance=expected_by_chance(holds),
        certain=True,
    )


def matched_heads(reference: Run, other: Run) -> Survival:
    """Match each head of the reference with the head of the other model that does the most similar things.

    Heads are described by shares between 0 and 1: their score in each role, their entropy over its maximum, and the
    share of keys that propagate. The pairs, min(N, M) of them, are those with the least sum of squared distances
    (`scipy.optimize.linear_sum_assignment`). A head without a partner is lost. By chance: as many as survive, in the
    mean, where each of these shares is shuffled among the other model's heads and they are matched in the same way.

    Args:
        reference, other: surveys with N and M heads.

    Raises:
        UsageError: a run that lacks entropies.
    """
    runs = (reference, other)
    first, second = _described(*runs)
    places, partners = matches(first.to_numpy(), second.to_numpy())
    before, after = (of_run.reset_index(drop=True) for of_run in (first.iloc[places], second.iloc[partners]))
    # The runs may be of other tokens of the text, so that the fewer contexts count.
    roles, looks = [role for role in ROLES if role.column in first], looks_of(len(first))
    independent = {role: min(independent_scores(run, role) for run in runs) for role in roles}
    errors = [
        pd.DataFrame(
            {ENTROPY: margins(entropy_share_error(run), min(map(_contexts, runs)), looks)}
            | {role.column: margins(score_error(run, role), n, looks) for role, n in independent.items()}
        ).iloc[of_run]
        for run, of_run in zip(runs, (places, partners), strict=True)
    ]
    table = reference.heads[HEAD].reset_index(drop=True)
    depths = [_depth(run) for run in runs]
    table.loc[places, "match"] = [head_name(*of) for of in other.heads[HEAD].iloc[partners].to_numpy()]
    table = table.fillna({"match": ""}).assign(depth_before=depths[0])
    table.loc[places, "depth_after"] = depths[1][partners]
    table.loc[places, "difference"] = np.linalg.norm(before - after, axis=1)
    for name in first:
        table[f"{name}_before"] = first[name]
        table.loc[places, f"{name}_after"] = after[name].to_numpy()
    table["status"] = LOST
    table.loc[places, "status"] = status_of(*_do_the_same(before, after, *errors))
    details = []
    blocks = [run.heads["layer"].to_numpy(np.float64) for run in runs]
    if np.isfinite(rank := float(rank_correlation(blocks[0][places], blocks[1][partners]))):
        details.append(f"rank correlation of the blocks of partners {number(rank)}")
    if unmatched := len(second) - len(partners):
        details.append(f"{counted(unmatched, 'head')} of the other model without a partner")
    details += [
        f"{role.plural}: {listed(pairs, 4)}" for role in roles if (pairs := _partners_in(table, role))
    ]
    return Survival(
        MATCHED,
        "head",
        "a head and its partner in the other model, matched by their roles, entropy and propagation: survives where at "
        f"least half of the score is left in each role that the head has, and the entropy differs by at most "
        f"{percent(TENTH)} of the maximum, and is lost where one of these is not so, each with the whole 95 % interval",
        table,
        Change("mean entropy over its maximum", first[ENTROPY].mean(), second[ENTROPY].mean()),
        verb=("has a partner that does the same", "have a partner that does the same"),
        details=tuple(details),
        by_chance=_matched_by_chance(first, second),
        contexts=_contexts(reference),
    )


def _described(*runs: Run) -> list[pd.DataFrame]:
    """Return what the heads of each run do, by name: the shares that all of the runs have."""
    measured = (*(role.column for role in ROLES), "propagation")
    described = [
        pd.DataFrame({ENTROPY: entropy_share(run)} | {name: column(run.heads, name) for name in measured})
        for run in runs
    ]
    names = [name for name in described[0] if all(of_run[name].notna().any() for of_run in described)]
    if ENTROPY not in names:
        raise UsageError("heads are matched by entropy too, which one of these runs lacks: survey it again")
    return [of_run[names].astype(np.float64) for of_run in described]


def _depth(run: Run) -> np.ndarray:
    """Return each head's depth: 0 before the first head of the first block, 1 after the last head of the last."""
    layer, head = run.heads["layer"], run.heads["head"]
    return ((layer + (head + 0.5) / (head.max() + 1)) / (layer.max() + 1)).to_numpy(np.float64)


def _matched_by_chance(first: pd.DataFrame, second: pd.DataFrame) -> float:
    """Return how many heads survive, in the mean, with each share shuffled among the heads of `second`."""
    survivors, generator = [], np.random.default_rng(0)
    for _ in range(SHUFFLES):
        shuffled = generator.permuted(second.to_numpy(), axis=0)
        rows, others = matches(first.to_numpy(), shuffled)
        old, new = (
            first.iloc[rows].reset_index(drop=True),
            pd.DataFrame(shuffled[others], columns=first.columns),
        )
        survivors.append(_do_the_same(old, new, 0 * old.fillna(0), 0 * old.fillna(0))[0].sum())
    return float(np.mean(survivors))


def _partners_in(table: pd.DataFrame, role: HeadRole) -> list[str]:
    """Describe the heads that have a role, the strongest first, and what their partners do of it."""
    before, after = f"{role.column}_before", f"{role.column}_after"
    heads = table[table[before] >= role.threshold].sort_values(before, ascending=False, kind="stable")
    return [
        f"{head_name(row['layer'], row['head'])} → {row['match'] or 'none'} "
        f"({number(row[before], 2)} → {number(row[after], 2)})"
        for _, row in heads.iterrows()
    ]


def matches(first: Floats, second: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `first`, ascending, and those of their partners in `second`; NaN counts as 0."""
    places, partners = linear_sum_assignment(
        cdist(np.nan_to_num(first), np.nan_to_num(second), "sqeuclidean")
    )
    return places, partners


def _do_the_same(before: pd.DataFrame, after: pd.DataFrame, *errors: pd.DataFrame) -> tuple[Flags, Flags]:
    """Decide whether heads do what their partners do, and whether not: by entropy and every role that the first has.

    `errors`: half the widths of the intervals of both.
    """
    kept, lost = similar_entropies(*(frame[ENTROPY].to_numpy() for frame in (before, after, *errors)))
    for role in (role for role in ROLES if role.column in before):
        old, new, *margins_of = (frame[role.column].to_numpy() for frame in (before, after, *errors))
        enough, too_little = LEFT.decided(new - HALF * old, np.hypot(*margins_of))
        has = old >= role.threshold
        kept, lost = kept & (enough | ~has), lost | (too_little & has)
    return kept, lost
