"""The parts of the mechanism that are compared: what each takes from two runs, and what counts as a unit of it.

One function a part. All of them read runs on the same text, and judge by the rules of `survival.py`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import theodolite.comparison.survival as rules
from theodolite.comparison.outputs import PLACE, SINK_PLACES
from theodolite.comparison.survival import ABOVE_NOISE, BY_HALVES, HALF, LOST, SIDES, Change, Survival, Units
from theodolite.corpus.groups import GROUPS
from theodolite.estimates import Estimate, Floats, sigmas
from theodolite.judging import Criterion, judge
from theodolite.measure.column import WITHOUT, declared
from theodolite.measure.head_roles import PATTERN_ROLES, SINK_ROLES, UNIFORM_ATTENTION
from theodolite.measure.position import DIRECTIONS
from theodolite.passes.run import Run
from theodolite.report.data import column, entropy_share, grid_of, need, value_of
from theodolite.report.findings import ENTROPY_COLLAPSE
from theodolite.sinks.exclusions import LEAST_SHARE
from theodolite.system.wording import number, percent
from theodolite.theory.outliers import Thresholds, outlier_features
from theodolite.theory.outliers import outlier_dimensions as large_dimensions
from theodolite.theory.unbiased import Jackknifed, combined, product, ratio, stacked

HEAD, SINK = ["layer", "head"], ["layer", "head", "kind", "token_id", "token"]  # what they are found again by
A_HALF = Criterion("at least", HALF, "ours")
ALONG = Criterion("at least", HALF**0.5, "half of the squared length (ours)")
TAGGED = 0.1  # a sink tags if its grouping explains so much of the variance of the head's output
TENTH = 0.1  # an entropy survives that changes by at most this share of the maximum (ours)
A_TENTH = Criterion("within", TENTH, "ours")
ROLES = (*PATTERN_ROLES, *SINK_ROLES)
OUTPUTS = "head outputs"
ALIKE = Criterion("at most", 0.1**0.5, "a tenth of the squared length (ours)")


def mean_of(table: str, name: str) -> str:
    """Name the mean of a column by its declared title and unit: `mean entropy in nats`."""
    declaration = declared(table)[name]
    return f"mean {declaration.title}" + (f" in {declaration.unit}" if declaration.unit else "")


def number_of(run: Run, table: str, name: str) -> Jackknifed:
    """Return a column with what it is without each group of contexts; NaN where the run lacks one or the other."""
    frame = getattr(run, table)
    values, groups = column(frame, name), run.arrays.get(f"{table}.{name}{WITHOUT}")
    unknown = torch.full((GROUPS, len(frame)), torch.nan, dtype=torch.float64)
    value = unknown[0] if values is None else torch.tensor(values)
    return Jackknifed(value, unknown if groups is None else groups.double())


def _or_zero(numbers: Jackknifed) -> Jackknifed:
    """Give 0 for numbers that are NaN."""
    unknown = numbers.value.isnan()
    return Jackknifed(numbers.value.masked_fill(unknown, 0), numbers.without.masked_fill(unknown, 0))


def _contexts(run: Run) -> int:
    return int(run.provenance["corpus"]["contexts"])


def sinks(reference: Run, other: Run, places: tuple[Run, Run] | None = None) -> Survival:
    """Compare sinks by layer, head, kind and token: share of contexts before and after.

    Args:
        places: of both, from `comparison.read_outputs`, which says where each context's sinks are: the whole family is
            then judged by the share of sinks that the other model has at the same place, paired by context.
    """
    joined = rules.join(SINK, _sinks_of(reference), _sinks_of(other))
    table, every = rules.by_halves(joined, LEAST_SHARE, _contexts(reference)), joined.table()
    rarer = " → ".join(number(every[side].sum() - table[side].sum()) for side in SIDES)
    details = [f"rarer ones {rarer} per context"] if len(table) < len(every) else []
    criterion = (
        f"a sink of a head in at least {percent(LEAST_SHARE)} of the contexts, {ABOVE_NOISE}; it {BY_HALVES}"
    )
    if paired := places and kept_places(*places):
        criterion += "; all of them together by the share that is at the same place of the same context"
        details.insert(0, f"at the same place of the same context: {paired}")
    return Survival(
        "sinks",
        "sink",
        criterion,
        _strongest_first(table, *SIDES),
        Change.of("sinks per context", torch.sum, *joined.numbers["value"]),
        details=tuple(details),
        weight="before",
        paired=paired,
        contexts=_contexts(reference),
    )


def _sinks_of(run: Run) -> Units:
    """List a survey's sinks; those at position 0 are one, whatever the token."""
    rows = run.sinks.assign(kind=np.where(run.sinks["first"].astype(bool), "first", "later"))
    rows.loc[rows["kind"] == "first", ["token_id", "token"]] = (-1, "")
    groups = rows.groupby(SINK, sort=False, dropna=False)
    place, units = torch.from_numpy(groups.ngroup().to_numpy(copy=True)), groups.ngroups

    def summed(shares: Tensor) -> Tensor:
        return shares.new_zeros(units).index_add_(0, place, shares)

    shares = combined(summed, number_of(run, "sinks", "share"))
    return rows.drop_duplicates(SINK)[SINK], {"value": shares}


def kept_places(reference: Run, other: Run) -> Estimate | None:
    """Estimate the share of the reference's sinks that the other has at the same place; None where it has no sinks.

    With the jackknife's error over contexts, a few of which may be alike by chance (`Estimate.floored`). Exact where
    every head writes the very same.
    """
    places, others = (
        pd.DataFrame(run.arrays[SINK_PLACES].numpy(), columns=PLACE) for run in (reference, other)
    )
    if not len(places):
        return None
    if torch.equal(reference.arrays["written"], other.arrays["written"]):
        return Estimate.exact(1.0)
    kept = places.merge(others, "left", PLACE, indicator=True)["_merge"] == "both"
    contexts = len(reference.arrays["loss"])
    counts = [np.bincount(places["context"], weights, contexts) for weights in (kept, np.ones(len(places)))]
    share = ratio(*map(torch.from_numpy, counts))
    return Estimate(float(share.value), float(share.error), contexts, "contexts").floored()


def _strongest_first(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    order = [*by, *SINK]
    return table.sort_values(order, ascending=[name in SINK for name in order], ignore_index=True)


def tags(reference: Run, other: Run) -> Survival:
    """Compare tags of the sinks of two traces: η² in the head's output, direction, and the largest η² after it."""
    runs = (reference, other)
    joined = rules.join(SINK, _tags_of(reference), _tags_of(other))
    units = [
        rules.established(tag, TAGGED) & rules.established(share, LEAST_SHARE)
        for tag, share in zip(joined.numbers["value"], joined.numbers["share"], strict=True)
    ]
    joined = joined.where(units[0] | units[1])
    directions, groups = (
        [_rows(run.arrays[name], joined.rows[f"row_{side}"]) for run, side in zip(runs, SIDES, strict=True)]
        for name in ("tag_direction", "tag_by_group")
    )
    cosine = directions_kept(groups[0], groups[1])
    plain = torch.cosine_similarity(directions[0], directions[1], dim=1, eps=0)
    kept, turned, _ = rules.decided(ALONG, cosine)
    table = joined.table().drop(columns=["row_before", "row_after"])
    table = table.fillna({"tagged_before": 0.0, "tagged_after": 0.0}).assign(
        cosine=torch.where(cosine.value.isfinite(), cosine.value, plain).numpy(),
        **rules.statuses(joined.numbers["value"], TAGGED, _contexts(reference)),
    )
    # Without a direction, a tag is lost only with its sink.
    sink_lost = rules.statuses(joined.numbers["share"], LEAST_SHARE)["status"] == LOST
    open_still = (table["status"] == LOST) & table["cosine"].isna() & ~sink_lost
    table["status"] = table["status"].mask(open_still, rules.UNDECIDED)
    table = _strongest_first(rules.with_directions(table, kept, turned), "tagged_before", "tagged_after")
    tagging = table[(table["before"] >= TAGGED) & (table["tagged_before"] > 0)]
    weights = tagging["tagged_before"]
    means = (float(np.average(tagging[side], weights=weights)) if len(tagging) else 0.0 for side in SIDES)
    return Survival(
        "tags",
        "tag",
        f"a sink in at least {percent(LEAST_SHARE)} of the contexts, {ABOVE_NOISE}, whose grouping explains at least "
        f"{percent(TAGGED)} of the variance of the head's output (η²); its tag survives where at least half of η² is "
        "left, and at least half of the new direction's squared length lies along the old one (cosine at least "
        f"{HALF**0.5:.2f}), and is lost where one of them is less, each with the whole 95 % interval; of a sink "
        "that is gone, if the sink is lost",
        table,
        Change("mean η² in the head's output", *means),
        weight="tagged_before",
        contexts=_contexts(reference),
    )


def _tags_of(run: Run) -> Units:
    """List a trace's sinks of tokens, with the rows of their arrays."""
    of_tokens = np.flatnonzero(run.traces["kind"] != "learned")
    rows = run.traces[[*SINK, "tagged"]].iloc[of_tokens].assign(row=of_tokens)
    # Where a tag has no number, all tokens of a context are caught or none: it tells none apart.
    value, released, share = (
        _or_zero(number_of(run, "traces", name)[torch.from_numpy(of_tokens)])
        for name in ("tag", "released", "share")
    )
    return rows, {"value": value, "released": released, "share": share}


def directions_kept(
    before: Float[Tensor, "tags groups width"], after: Float[Tensor, "tags groups width"]
) -> Jackknifed:
    """Estimate the cosine of each tag's directions in both models by products of different groups of contexts.

    NaN of a tag that has none, or of which nothing is seen above the noise.
    """
    u, v = (sums.double().transpose(0, 1) for sums in (before, after))
    square, other_square = product(u), product(v)
    cosine = combined(lambda uv, uu, vv: uv / (uu * vv).sqrt(), product(u, v), square, other_square)
    return cosine.where(square.above_noise() & other_square.above_noise())


def _rows(stored: Tensor, rows: pd.Series) -> Tensor:
    """Take rows of an array; NaN beyond its end, and where there is no row."""
    padded = torch.cat([stored.double(), stored.double().new_full((1, *stored.shape[1:]), torch.nan)])
    return padded[torch.tensor(rows.fillna(np.inf).clip(upper=len(stored)).to_numpy(np.int64))]


def outlier_dimensions(reference: Run, other: Run) -> Survival:
    """Compare outlier dimensions by residual layer: their typical size over that of the layer's median dimension."""
    level = Thresholds().level
    marked, sizes, published = [], [], []
    for run in (reference, other):
        size = torch.from_numpy(need(run, "typical_magnitude")).double()
        marked.append(large_dimensions(size, level)[1])
        parts = (size, run.arrays[f"typical_magnitude{WITHOUT}"].double())
        sizes.append(Jackknifed(*(part / part.median(dim=-1, keepdim=True).values for part in parts)))
        share = torch.from_numpy(need(run, "outlier_share"))
        published.append(int(outlier_features(share, Thresholds()).sum()))
    at = layer, dimension = torch.nonzero(marked[0] | marked[1], as_tuple=True)
    pair = sizes[0][at], sizes[1][at]
    # An outlier of one model is so many times the median there; in the other it may be as any dimension.
    least = np.where(marked[0][at], 0.0, np.inf)
    rows = pd.DataFrame({"layer": layer.numpy(), "dimension": dimension.numpy()})
    table = rules.Joined(rows, {"value": pair}).table()
    table = table.assign(**rules.statuses(pair, least, _contexts(reference)))
    return Survival(
        "outlier dimensions",
        "outlier dimension",
        "a dimension of a residual layer whose typical size, exp E ln |x| over the tokens past the first, stands out "
        f"from the layer's own dimensions ({percent(level)} of layers have one by chance); of its size over that of "
        f"the median dimension, it {BY_HALVES}",
        table,
        Change("outlier dimensions, summed over layers", *(int(of_run.sum()) for of_run in marked)),
        details=(f"by the published rule (|x| ≥ 6) {published[0]} → {published[1]}",),
        contexts=_contexts(reference),
    )


def massive_activations(reference: Run, other: Run) -> Survival:
    """Compare massive activations by residual layer, dimension, and place: their number before and after."""

    def units(run: Run) -> Units:
        dimensions = run.outliers[["layer", "dimension"]].astype(int)
        rows = pd.concat([dimensions.assign(position=position) for position in ("first", "later")])
        by_position = stacked([number_of(run, "outliers", name) for name in ("massive_first", "massive")])
        counts = Jackknifed(by_position.value.flatten(), by_position.without.flatten(1))
        some = counts.value > 0
        return rows[some.numpy()], {"value": counts[some]}

    joined = rules.join(["layer", "dimension", "position"], units(reference), units(other))
    return Survival(
        "massive activations",
        "massive dimension",
        "a dimension of a residual layer, at the first token or later, with values above 100 and 1000 times the "
        f"median, {ABOVE_NOISE}; it survives where it has at least half as many, and is lost where it has fewer, each "
        "with the whole 95 % interval",
        rules.by_halves(joined, 1, _contexts(reference)),
        Change.of("massive activations, summed over layers", torch.sum, *joined.numbers["value"]),
        contexts=_contexts(reference),
    )


def positions(reference: Run, other: Run) -> Survival:
    """Compare the positional basis by residual layer: rank, relative norm, and directions."""
    runs, columns = (reference, other), {"rank": "rank", "value": "relative_norm"}
    numbers = [{name: number_of(run, "layers", of) for name, of in columns.items()} for run in runs]
    joined = rules.join(
        ["layer"], *((run.layers[["layer"]], of) for run, of in zip(runs, numbers, strict=True))
    )
    floors = [np.nan_to_num(value_of(run, "relative_norm_floor")) for run in runs]
    overlaps = overlap(*runs, by_energy=True)
    kept, turned, _ = rules.decided(A_HALF, overlaps, bias=overlap_bias(*runs))
    table = joined.table().assign(
        overlap=overlaps.value.numpy(),
        **rules.statuses(joined.numbers["value"], floors[0], _contexts(reference)),
    )
    table = rules.with_directions(table, kept, turned)
    table = table[np.isfinite(table["least"]) | (table["after"] >= floors[1])].reset_index(drop=True)
    norm, rank = (
        Change.of(mean_of("layers", of), torch.nanmean, *joined.numbers[name])
        for name, of in (("value", "relative_norm"), ("rank", "rank"))
    )
    return Survival(
        "positional basis",
        "layer",
        "of a residual layer where it is above the noise: survives where at least half of the energy along its leading "
        "directions, as many as the rank, lies along the other's (overlap) and at least half of its relative norm is "
        "left, and is lost where less of one is, each with the whole 95 % interval",
        table.rename(columns={end: f"relative_norm_{end}" for end in rules.ENDS}),
        norm,
        verb=("keeps its positional basis", "keep their positional basis"),
        details=(
            rank,
            f"overlap of its leading directions {number(table['overlap'].mean(), 2)} (random: "
            f"{number(chance_overlap(reference), 2)})",
        ),
        contexts=_contexts(reference),
    )


def _basis(run: Run) -> Float[Tensor, "layers positions width"]:
    """Return the positional basis without position 0, or without the tokens before an image's patches."""
    grid = grid_of(run)
    first = 1 if grid is None else grid.leading
    return torch.from_numpy(need(run, "positional_basis")[:, first:]).double()


def overlap(first: Run, second: Run, *, by_energy: bool = False) -> Jackknifed:
    """Compute ‖VᵀV′‖_F²/k of both positional bases' k leading directions by layer, k the first one's rank.

    `by_energy`: each of the first one's directions counts by its squared singular value, so that those that sampling
    exchanges count little.
    """
    ranks = _ranks(first)
    (one, shares), (two, _) = (_leading(run, ranks, by_energy) for run in (first, second))
    return combined(lambda v, w: _overlaps(v, w, shares), one, two)


def overlap_bias(first: Run, second: Run) -> Floats:
    """Bound what `overlap` by energy owes to the contexts: how far sampling moves both runs' directions, in the mean.

    What both owe to the same contexts makes them more alike, and what only one does less alike.
    """
    moved = []
    for run in (first, second):
        directions, shares = _leading(run, _ranks(first), by_energy=True)
        # Without a group, directions move by a (G − 1)th of what they are off.
        apart = 1 - torch.stack([_overlaps(directions.value, one, shares) for one in directions.without])
        moved.append((len(apart) - 1) * apart.mean(dim=0))
    return ((moved[0] + moved[1]) / 2).numpy()


def _leading(run: Run, ranks: Tensor, by_energy: bool) -> tuple[Jackknifed, Float[Tensor, "layers most"]]:
    """Return a run's leading directions, (layers, ≤ 20, d), as many of each layer as `ranks` says and zeros behind.

    And how much each counts: evenly, or by its squared singular value; 1 in all.
    """
    without = run.arrays[DIRECTIONS].double()
    _, values, directions = torch.linalg.svd(_basis(run), full_matrices=False)
    most = without.shape[2]
    kept = torch.arange(values.shape[1]) < ranks[:, None]
    shares = (values.square() if by_energy else torch.ones_like(values)) * kept
    kept = kept[:, :most].unsqueeze(-1)
    numbers = Jackknifed(directions[:, :most] * kept, without * kept)
    return numbers, shares / shares.sum(dim=1, keepdim=True)


def _overlaps(
    one: Float[Tensor, "layers most width"],
    two: Float[Tensor, "layers most width"],
    shares: Float[Tensor, "layers more"],
) -> Float[Tensor, " layers"]:
    """Sum the squared lengths of the directions `one` along those of `two`, each by its share."""
    return ((one @ two.mT).square().sum(dim=2) * shares[:, : one.shape[1]]).sum(dim=1)


def chance_overlap(run: Run) -> float:
    """Compute the mean over layers of `overlap` with random directions, k/d."""
    return float(_ranks(run).double().mean()) / need(run, "positional_basis").shape[2]


def _ranks(run: Run) -> Tensor:
    """Return the rank of every layer's positional basis, 1 at least."""
    return torch.from_numpy(np.nan_to_num(value_of(run, "rank"))).long().clamp_min(1)


def head_outputs(reference: Run, other: Run) -> Survival:
    """Compare what each head writes to the stream: 1 − ‖new − old‖²/‖old‖² is kept on the same tokens."""
    # Squared lengths, summed over the tokens of each context: (contexts, heads of all layers).
    context = torch.unique(reference.arrays["context"], return_inverse=True)[1]
    layers, heads, tokens = reference.arrays["written"].shape[:3]
    contexts = int(context.max()) + 1
    squares = torch.zeros(3, contexts, layers, heads, dtype=torch.float64)
    written = zip(reference.arrays["written"], other.arrays["written"], strict=True)
    for layer, (one, two) in enumerate(written):
        for kind, values in enumerate((two.double() - one, one.double(), two.double())):
            squares[kind, :, layer].index_add_(0, context, values.square().sum(dim=2).T)
    changed, old, new = squares.flatten(2)
    before, after = ((sums.sum(dim=0) / tokens).sqrt().numpy() for sums in (old, new))
    writes = before > 0
    left = combined(lambda lost: 1 - lost, ratio(changed, old))
    # Of a head that wrote nothing, 1 if it writes now.
    kept = np.where(writes, left.value.numpy(), after > 0)
    survives, lost, _ = rules.decided(A_HALF, left, writes)
    table = pd.DataFrame(np.ndindex(layers, heads), columns=HEAD).assign(
        before=writes.astype(float),
        after=kept,
        difference=kept - writes,
        se=np.where(writes, left.error.numpy(), 0.0),
        norm_before=before,
        norm_after=after,
        status=np.where(writes, rules.status_of(survives, lost), rules.NEW),
    )
    # ‖new − old‖/‖old‖ over all tokens, mean over the heads that write.
    relative = combined(
        lambda lost: lost.clamp_min(0).sqrt().mean(), ratio(changed[:, writes], old[:, writes])
    )
    estimate = Estimate(float(relative.value), float(relative.error), contexts, "contexts")
    alike = judge("heads write nearly the same", "‖new − old‖/‖old‖, mean over heads", estimate, ALIKE)
    return Survival(
        OUTPUTS,
        "head",
        f"what a head adds to the stream, o W_O, at {tokens} tokens past the first: it survives where at least "
        "half of its squared norm is retained, 1 − ‖new − old‖²/‖old‖² ≥ ½, and is lost where less is, each with the "
        "whole 95 % interval (over contexts)",
        table[writes | (after > 0)].reset_index(drop=True),
        Change("mean norm of the outputs", before.mean(), after.mean()),
        verb=("keeps its output", "keep their output"),
        contexts=contexts,
        further=(alike,),
    )


def entropies(reference: Run, other: Run) -> Survival:
    """Compare the mean attention entropy of every head, and its share of the maximum."""

    def units(run: Run) -> Units:
        entropy, of_heads = number_of(run, "heads", "entropy"), entropy_share(run)
        assert of_heads is not None  # a survey of a text has entropies
        share = torch.from_numpy(of_heads)
        shares = Jackknifed(share, entropy.without / (entropy.value / share))
        return run.heads[HEAD], {"value": entropy, "share": shares}

    joined = rules.join(HEAD, units(reference), units(other))
    joined = joined.where(joined.table()["difference"].notna().to_numpy())
    sides = joined.numbers["share"]
    first, second = (side.value.numpy() for side in sides)
    similar, changed, _ = rules.decided(A_TENTH, combined(torch.sub, sides[1], sides[0]))
    # The ranges that both are in, at either end of their intervals.
    (low, high), (new_low, new_high) = (
        [range_of(side.value.numpy() + sign * sigmas(GROUPS) * side.error.numpy()) for sign in (-1, 1)]
        for side in sides
    )
    kept = similar & (low == new_high) & (high == new_low)
    lost = changed | (high < new_low) | (new_high < low)
    alike = A_TENTH.met(second - first[:, None]) & (range_of(first)[:, None] == range_of(second))
    table = joined.table().drop(columns=["share_difference", "share_se"])
    return Survival(
        "entropies",
        "head",
        f"of a head: survives where it changes by at most {percent(TENTH)} of the maximum, and the head neither "
        f"becomes nor ceases to be collapsed (below {percent(ENTROPY_COLLAPSE.limit)} of the maximum) or uniform "
        f"(above {percent(UNIFORM_ATTENTION.threshold)}), and is lost where not, each with whole 95 % intervals",
        table.assign(status=rules.status_of(kept, lost)),
        Change.of(mean_of("heads", "entropy"), torch.mean, *joined.numbers["value"]),
        verb=("keeps its entropy", "keep their entropy"),
        by_chance=rules.expected_by_chance(alike),
        contexts=_contexts(reference),
    )


def range_of(share: Floats) -> np.ndarray:
    """Classify entropies, as shares of the maximum: 0 collapsed, 2 uniform, 1 neither."""
    return np.digitize(share, [ENTROPY_COLLAPSE.limit, UNIFORM_ATTENTION.threshold])


def head_types(reference: Run, other: Run) -> Survival:
    """Compare the heads that follow a pattern or attend to sinks, by the report's thresholds."""
    runs, tables, units = (reference, other), [], np.zeros(2, dtype=int)
    for role in ROLES:
        if any(role.column in run.heads for run in runs):
            scores = ({"value": _or_zero(number_of(run, "heads", role.column))} for run in runs)
            joined = rules.join(HEAD, *((run.heads[HEAD], of) for run, of in zip(runs, scores, strict=True)))
            units += [int((score.value >= role.threshold).sum()) for score in joined.numbers["value"]]
            of_role = rules.by_halves(joined, role.threshold, _contexts(reference))
            of_role.insert(len(HEAD), "type", role.title)
            tables.append(of_role)
    thresholds = "; ".join(f"{role.title}: score of at least {role.threshold:g}" for role in ROLES)
    return Survival(
        "head types",
        "head role",
        f"{thresholds}; it {BY_HALVES}",
        pd.concat(tables, ignore_index=True),
        Change("roles of heads", *units),
        contexts=_contexts(reference),
    )


def spectra(reference: Run, other: Run) -> Survival:
    """Compare W_QK of every head: trace, Frobenius norm, r, and the regime that they put it in."""

    def units(run: Run) -> Units:
        norm = number_of(run, "heads", "frobenius_squared").value.sqrt()
        rows = run.heads[[*HEAD, "trace", "r", "regime"]]
        return rows, {"frobenius": Jackknifed.constant(norm, GROUPS)}

    table = rules.join(HEAD, units(reference), units(other)).table()
    table = table[table["frobenius_difference"].notna()].reset_index(drop=True)
    first, second = (table[f"frobenius_{side}"] for side in SIDES)
    before, after = first.to_numpy()[:, None], second.to_numpy()
    same_regime = table["regime_before"].to_numpy()[:, None] == table["regime_after"].to_numpy()
    holds: rules.Flags = same_regime & (after >= HALF * before) & (before >= HALF * after)
    return Survival(
        "spectra",
        "head",
        "W_QK of a head: survives where its Frobenius norm changes by at most a factor of two and its regime (from "
        "the weights alone) is the same",
        table.assign(status=np.where(np.diagonal(holds), rules.SURVIVED, LOST)),
        Change("mean Frobenius norm of W_QK", first.mean(), second.mean()),
        verb=("keeps the norm and regime of W_QK", "keep the norm and regime of W_QK"),
        by_chance=rules.expected_by_chance(holds),
    )
