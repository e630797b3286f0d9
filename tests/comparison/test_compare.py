"""Two runs compared. Oracles: what was planted and destroyed, and every number again from the files, by loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.linalg
import torch
from safetensors.numpy import load_file

from tests import planted
from tests.comparison.conftest import CORPUS
from tests.report.synthetic import make_survey, weights_only, with_groups
from theodolite import compare
from theodolite.comparison import read_outputs
from theodolite.comparison.parts import overlap
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, IN_PART, UNDECIDED, UNTESTABLE
from theodolite.models import open_model
from theodolite.passes.survey import survey
from theodolite.sinks.trace import trace_sinks
from theodolite.system.wording import with_error

DESTROYED = (0, 2)


def of(damaged, reference, **names):
    outputs = (reference.outputs, damaged.outputs)
    return compare(reference.run, damaged.run, reference.trace, damaged.trace, outputs_of=outputs, **names)


def places(table: pd.DataFrame, status: str) -> set[tuple[int, int]]:
    rows = table[table["status"] == status]
    return set(zip(rows["layer"], rows["head"], strict=True))


def test_a_model_compared_with_itself_loses_nothing(pair):
    audit = of(pair(), pair())
    assert audit.loss.difference == audit.loss.se == 0
    for part in audit.parts:
        assert set(part.table["status"]) <= {"survived", "undecided"}
        assert part.table.filter(regex="difference$").fillna(0).eq(0).all(axis=None)
    assert "at the same place of the same context: 1 (exact)" in audit.part("sinks").sentence
    assert audit.part("tags").table["cosine"].to_numpy() == pytest.approx(1.0)
    assert audit.part("positional basis").table["overlap"].to_numpy() == pytest.approx(1.0)
    assert audit.part("entropies").sentence.startswith("16 of 16 heads keep their entropy")


def test_a_destroyed_head_is_named_with_exactly_its_sinks(pair):
    audit = of(pair("destroyed"), pair(), names=("planted", "destroyed"))
    sinks = audit.part("sinks").table
    lost = sinks[sinks["status"] == "lost"]
    assert {tuple(row) for row in lost[["layer", "head", "kind", "token_id"]].itertuples(index=False)} == {
        (*DESTROYED, "later", planted.S1),
        (*DESTROYED, "later", planted.S2),
    }
    assert (lost["before"] == 1).all()
    assert (lost["after"] == 0).all()
    others = sinks[sinks["status"] != "lost"]
    assert set(others["status"]) == {"survived"}
    assert len(others) == len(planted.SINKS) - 2
    assert places(audit.part("tags").table, "lost") == {DESTROYED}
    assert places(audit.part("spectra").table, "lost") == {DESTROYED}
    assert places(audit.part("entropies").table, "lost") == {DESTROYED}
    assert places(audit.part("head outputs").table, "lost") >= {DESTROYED}
    assert "Hit hardest: L0H2 (sinks, tags, head outputs, entropies, head types and spectra)" in audit.summary
    assert audit.answer == audit.part("sinks").answer == IN_PART
    assert "lost: L0H2" in audit.part("sinks").sentence
    assert audit.part("sinks").sentence.startswith(
        "3 of 5 sinks survive (60\u00a0% by weight); sinks per context 5 → 3; at the same place"
    )


def test_of_a_random_model_nothing_survives(pair):
    audit = of(pair("random"), pair())
    for part in audit.parts:
        low = part.family.value - part.family.margin
        assert not low > 0.1, part.name
        if part.name != "sinks":
            assert part.answer in (FAILS, UNTESTABLE, UNDECIDED), part.name
    # No sink in any of 16 contexts: of all, 1 − 0.025^{1/16} = 0.206 of them may still have theirs.
    assert audit.part("sinks").answer == audit.answer == UNDECIDED
    assert "ot decided: sinks (0\u00a0% at the same places)" in audit.summary
    assert compare(pair().run, pair("random").run).part("sinks").answer == UNDECIDED


def test_tags_from_the_files_by_loops(pair):
    first, second = pair(), pair("noisy")
    table = of(second, first).part("tags").table
    found = []
    for one in (first, second):
        arrays = load_file(one.trace.folder / "arrays.safetensors")
        rows = pd.read_parquet(one.trace.folder / "traces.parquet").to_dict("records")
        found.append(
            {
                (row["layer"], row["head"], row["kind"], row["token_id"]): (row, direction)
                for row, direction in zip(rows, arrays["tag_direction"].astype(np.float64), strict=True)
            }
        )
    assert len(table) == len(planted.SINKS)
    for row in table.to_dict("records"):
        key = (row["layer"], row["head"], row["kind"], row["token_id"])
        (before, u), (after, v) = found[0][key], found[1][key]
        cosine = u @ v / np.linalg.norm(u) / np.linalg.norm(v)
        assert row["cosine"] == pytest.approx(cosine, abs=0.02)  # which noise makes smaller
        assert (row["before"], row["after"]) == pytest.approx((before["tag"], after["tag"]))
        assert row["released_difference"] == pytest.approx(after["released"] - before["released"])
        half = after["tag"] >= before["tag"] / 2
        assert row["status"] == ("survived" if half and cosine >= 0.5**0.5 else "lost")
    assert (table["cosine"] < 1 - 1e-6).all()


@pytest.mark.parametrize(
    ("cosine", "noise", "status"),
    [
        (-1.0, 0.01, "lost"),
        (0.69, 0.001, "lost"),
        (0.69, 0.3, "undecided"),
        (0.73, 0.001, "survived"),
        (0.95, np.nan, "undecided"),
    ],
)
def test_a_tag_that_turned_too_far_is_lost(pair, cosine, noise, status):
    """The same η² in another direction, of whose square half is along the old one or not."""
    first = pair()
    groups = [first.trace.arrays["tag_by_group"].double().clone() for _ in range(2)]
    old, across = torch.eye(groups[0].shape[2], dtype=torch.float64)[:2]
    groups[0][0] = old
    signs = torch.tensor([1.0, -1] * 4)[:, None]
    groups[1][0] = 3 * (cosine * old + (1 - cosine**2) ** 0.5 * across + noise * signs * (old - across))
    traces = []
    for by_group, turned in zip(groups, (old, cosine * old + (1 - cosine**2) ** 0.5 * across), strict=True):
        directions = first.trace.arrays["tag_direction"].double().clone()
        directions[0] = turned
        arrays = {"tag_by_group": by_group, "tag_direction": directions}
        traces.append(replace(first.trace, arrays=first.trace.arrays | arrays))
    part = compare(first.run, first.run, *traces).part("tags")
    strongest = first.trace.traces.iloc[0]
    assert places(part.table, "lost") == (
        {(strongest["layer"], strongest["head"])} if status == "lost" else set()
    )
    assert (", cosine " in part.sentence) == (status == "lost")
    row = (part.table["layer"] == strongest["layer"]) & (part.table["head"] == strongest["head"])
    assert status in set(part.table.loc[row, "status"])
    if noise <= 0.01:
        assert part.table["cosine"].min() == pytest.approx(cosine, abs=1e-3)


def test_a_rare_sink_that_is_gone_is_no_loss(pair):
    """One context in sixteen says nothing of either model: it is no unit, and is told among the rarer ones."""
    run, trace, _ = pair()
    keys = ["layer", "head", "token_id"]
    strongest = run.sinks[~run.sinks["first"]].iloc[0]
    of_run, of_trace = ((frame[keys] == strongest[keys]).all(axis=1) for frame in (run.sinks, trace.traces))

    def rare(frame: pd.DataFrame, own: pd.Series) -> pd.DataFrame:
        counts = {"contexts": frame["contexts"].where(~own, 1), "share": frame["share"].where(~own, 1 / 16)}
        return frame.assign(**counts)

    def gone(frame: pd.DataFrame, own: pd.Series) -> pd.DataFrame:
        return frame[~own].reset_index(drop=True)

    in_one_group = torch.full((8,), 1 / 14)
    in_one_group[0] = 0.0
    arrays = []
    for one, table, own in ((run, "sinks", of_run), (trace, "traces", of_trace)):
        places_of = torch.tensor(own.tolist())
        rows = {name: values for name, values in one.arrays.items() if name.startswith(f"{table}.")}
        shares = {name: values.clone() for name, values in rows.items()}
        shares[f"{table}.share.without"][:, places_of] = in_one_group[:, None]
        arrays += [shares, {name: values[:, ~places_of] for name, values in rows.items()}]
    kept = torch.tensor((~of_trace).tolist())
    arrays[3] |= {name: trace.arrays[name][kept] for name in ("tag_direction", "tag_by_group")}
    audit = compare(
        replace(run, sinks=rare(run.sinks, of_run), arrays=run.arrays | arrays[0]),
        replace(run, sinks=gone(run.sinks, of_run), arrays=run.arrays | arrays[1]),
        replace(trace, traces=rare(trace.traces, of_trace), arrays=trace.arrays | arrays[2]),
        replace(trace, traces=gone(trace.traces, of_trace), arrays=trace.arrays | arrays[3]),
    )
    for name in ("sinks", "tags"):
        part = audit.part(name)
        assert (part.count("lost"), part.count("undecided")) == (0, 0), name
    assert "rarer ones 0.0625 → 0 per context" in audit.part("sinks").sentence


def test_outlier_dimensions_by_hand():
    """Sizes over that of the layer's median dimension, by layer and dimension; elsewhere there are none."""
    planted_there = {
        (1, 3): (10.0, 6.0, "survived"),
        (2, 3): (10.0, 4.0, "lost"),
        (3, 5): (5.0, 20.0, "survived"),
        (0, 7): (1.0, 8.0, "new"),
        (0, 8): (5.0, 6.0, "survived"),
        (2, 8): (2.9, 5.0, "undecided"),  # there all the time, and never clearly
        (1, 9): (2.0, 2.0, ""),  # in neither model one
    }
    first, runs = make_survey(), []
    width = first.arrays["typical_magnitude"].shape[1]
    for side, scale in enumerate((1.0, 100.0)):  # the second model's stream is a hundred times as large
        sizes = (1 + 0.05 * torch.linspace(-1, 1, width)).expand(4, -1).clone()
        median = sizes[0].sort().values[(width - 1) // 2]
        for place, values in planted_there.items():
            sizes[place] = values[side] * median
        arrays = {
            "typical_magnitude": scale * sizes,
            "typical_magnitude.without": scale * sizes.expand(8, -1, -1),
            "outlier_share": torch.full_like(sizes, float(side)),
        }
        runs.append(replace(first, arrays=first.arrays | arrays))
    part = compare(*runs).part("outlier dimensions")
    found = {(row["layer"], row["dimension"]): row["status"] for row in part.table.to_dict("records")}
    assert found == {place: status for place, (_, _, status) in planted_there.items() if status}
    assert f"by the published rule (|x| ≥ 6) 0 → {4 * width}" in part.sentence


def test_massive_activations_are_counted_by_place():
    first = make_survey()
    other = with_groups(
        replace(
            first, outliers=first.outliers.assign(massive_first=[4, 1, 0][: len(first.outliers)], massive=2)
        )
    )
    table = compare(first, other).part("massive activations").table
    found = {(row["layer"], row["position"]): row["status"] for row in table.to_dict("records")}
    assert found == {
        (1, "first"): "survived",
        (2, "first"): "lost",
        (3, "first"): "lost",
        **{(layer, "later"): "new" for layer in (1, 2, 3)},
    }
    arrays = {name: of for name, of in first.arrays.items() if not name.startswith("outliers.")}
    no_rows = first.outliers.iloc[:0].astype(object)  # as read back from a file
    none = replace(first, outliers=no_rows, arrays=arrays)
    assert set(compare(first, none).part("massive activations").table["status"]) == {"lost"}


def test_positions_against_angles():
    """Oracle: scipy's principal angles."""
    first, second = make_survey(seed=0), make_survey(seed=3)
    moved = first.arrays["positional_basis"] + 0.4 * second.arrays["positional_basis"]
    other = with_groups(replace(first, arrays=first.arrays | {"positional_basis": moved}))
    table = compare(first, other).part("positional basis").table
    for layer, row in enumerate(table.to_dict("records")):
        p, q = (basis[layer, 1:].double().numpy() for basis in (first.arrays["positional_basis"], moved))
        rank = int(first.layers["rank"][layer])
        leading = [np.linalg.svd(matrix)[2][:rank].T for matrix in (p, q)]
        angles = scipy.linalg.subspace_angles(*leading)
        assert overlap(first, other).value[layer] == pytest.approx(np.mean(np.cos(angles) ** 2), rel=1e-3)
        energies = np.linalg.svd(p)[1][:rank] ** 2
        along = np.array(
            [(leading[1].T @ leading[0][:, k]) @ (leading[1].T @ leading[0][:, k]) for k in range(rank)]
        )
        assert row["overlap"] == pytest.approx((energies * along).sum() / energies.sum(), rel=1e-3)
        assert row["status"] == ("survived" if row["overlap"] >= 0.5 else "lost")


def test_entropies_by_hand():
    """A tenth of the highest entropy is the limit, and so are collapse and the plain average."""
    first = make_survey(blocks=1, heads=6)
    highest = np.log(np.arange(1, 25)).mean()
    before = np.array([0.5, 0.5, 0.06, 0.04, 0.99, 0.999])
    after = np.array([0.59, 0.61, 0.04, 0.06, 0.997, 0.97])
    statuses = ["survived", "lost", "lost", "lost", "lost", "lost"]
    runs = [
        with_groups(
            replace(first, heads=first.heads.assign(entropy=share * highest)), entropy=0.0005 * highest
        )
        for share in (before, after)
    ]
    part = compare(*runs).part("entropies")
    assert part.table["status"].tolist() == statuses

    def survives(i: int, j: int) -> bool:
        between = [0.05 <= x < 0.995 for x in (before[i], after[j])]
        return abs(before[i] - after[j]) <= 0.1 and between[0] == between[1]

    assert part.by_chance == pytest.approx(sum(survives(i, j) for i in range(6) for j in range(6)) / 6)
    assert f"1 of 6 heads keeps its entropy ({part.by_chance:.1f} by chance); mean" in part.sentence
    assert "L0H2 (0.137 → 0.0913)" in part.sentence


def test_spectra_by_hand():
    first = make_survey(blocks=1, heads=4)
    regime = ["uniform", "uniform", "late-site", "vanishing"]
    before = first.heads.assign(frobenius_squared=[4.0, 4.0, 4.0, 4.0], regime=regime)
    after = before.assign(
        frobenius_squared=[1.0, 0.9, 4.0, 17.0], regime=["uniform", "uniform", "uniform", "vanishing"]
    )
    part = compare(replace(first, heads=before), replace(first, heads=after)).part("spectra")
    assert part.table["status"].tolist() == ["survived", "lost", "lost", "lost"]
    # Either uniform head with the first or the third after.
    assert part.by_chance == pytest.approx((2 * 2) / 4)
    assert "lost: L0H1, L0H2 and L0H3" in part.sentence


def test_head_types_by_their_thresholds():
    first = make_survey()
    heads = first.heads.assign(
        previous_token=0.1, induction=0.1, same_token=0.1, sink_first=0.0, sink_later=0.0
    )
    before, after = heads.copy(), heads.copy()
    before.loc[[1, 2], "previous_token"] = (0.8, 0.41)
    after.loc[[1, 2, 3], "previous_token"] = (0.3, 0.39, 0.7)
    before.loc[5, "induction"] = 0.29
    runs = [with_groups(replace(first, heads=heads)) for heads in (before, after)]
    table = compare(*runs).part("head types").table
    found = {(row["layer"] * 4 + row["head"], row["type"]): row["status"] for row in table.to_dict("records")}
    assert found == {
        (1, "previous-token head"): "lost",
        (2, "previous-token head"): "survived",
        (3, "previous-token head"): "new",
    }


@pytest.mark.parametrize(("more", "said"), [(0.5, "12 (within the 95 % interval)"), (2, "13.5")])
def test_differences_within_two_standard_errors_are_called_so(more, said):
    """The error of what is after is 0.5."""
    first = make_survey()
    other = with_groups(
        replace(first, layers=first.layers.assign(rank=first.layers["rank"] + more)), rank=0.5
    )
    sentence = compare(first, other).part("positional basis").sentence
    assert f"mean positional rank 11.5 → {said}; overlap" in sentence


@pytest.mark.parametrize("family", ["bert", "gpt_oss"])
def test_other_families(family, opened):
    """Undefined regimes, learned sinks, no causal mask: a model is itself, whatever it lacks."""
    model = opened(family)
    ids = torch.randint(0, 250, (4, 24), generator=torch.Generator().manual_seed(0))
    corpus = replace(CORPUS, contexts=ids, labels=torch.full((4,), -1))
    run, trace = survey(model, corpus), trace_sinks(model, corpus)
    written = read_outputs(model, corpus)
    audit = compare(run, run, trace, trace, outputs_of=(written, written))
    assert not sum(part.count("lost") + part.count("new") for part in audit.parts)
    assert (audit.loss is None) == (family == "bert")


def test_refusals(pair):
    run, trace, written = pair()
    noisy = pair("noisy")

    def of_text(**changes):
        corpus = run.provenance["corpus"] | changes
        return replace(run, provenance=run.provenance | {"corpus": corpus})

    deeper = replace(run, provenance=run.provenance | {"model": run.provenance["model"] | {"layers": 7}})
    its_trace, its_outputs = (
        f"its {noun} must be of the model and text of the survey"
        for noun in ("trace of sinks", "outputs of heads")
    )
    cases = [
        (
            (run, deeper),
            {},
            "has 7 layers, .* 4: only models of one shape and one tokenizer can be compared$",
        ),
        ((run, of_text(sha256="another")), {}, "did not read the same tokens: only models of one shape and"),
        ((run, trace), {}, "this is no survey of a text"),
        ((run, weights_only(run)), {}, "this is no survey of a text"),
        ((run, run, trace), {}, "give both or neither"),
        ((run, run, trace, run), {}, its_trace),
        ((run, run, trace, noisy.trace), {}, its_trace),
        ((run, run), {"outputs_of": (written, run)}, its_outputs),
        ((run, run), {"outputs_of": (written, noisy.outputs)}, its_outputs),
    ]
    for arguments, options, words in cases:
        with pytest.raises(UsageError, match=words):
            compare(*arguments, **options)
    with pytest.raises(UsageError, match="no part 'heads': there are sinks"):
        compare(run, run).part("heads")


def test_the_overview_has_each_part_in_one_number(pair):
    """Oracle: sums and means of the runs' own tables; what was planted and destroyed."""
    first, second = pair(), pair("destroyed")
    table = of(second, first).overview.set_index("part")
    assert table.index[0] == "loss"
    for side, one in (("before", first), ("after", second)):
        assert table.loc["loss", side] == pytest.approx(float(one.outputs.arrays["loss"].mean()))
        assert table.loc["sinks", side] == pytest.approx(one.run.sinks["share"].sum())
        assert table.loc["entropies", side] == pytest.approx(one.run.heads["entropy"].mean())
        assert table.loc["localization", side] == pytest.approx(one.run.heads["propagation"].mean())
        norms = one.run.heads["frobenius_squared"] ** 0.5
        assert table.loc["spectra", side] == pytest.approx(norms.mean())
        assert table.loc["positional basis", side] == pytest.approx(one.run.layers["relative_norm"].mean())
    assert table.loc[["loss", "sinks", "spectra"], "verdict"].tolist() == ["fails", "in part", "in part"]
    losses = [one.outputs.arrays["loss"] for one in (first, second)]
    change = losses[1] - losses[0]
    error = float(change.std() / len(change) ** 0.5)
    assert table.loc["loss", "change"] == with_error(float(change.mean()), error)
    assert table.loc["sinks", ["survived", "left"]].tolist() == ["3 of 5", pytest.approx(3 / 5)]
    assert table.loc["massive activations", "verdict"] == "not testable here"
    assert "context" not in table.index  # these contexts have no labels


def test_what_an_audit_says_and_gives(pair):
    audit = of(pair("destroyed"), pair(), names=("a", "b"))
    assert repr(audit).startswith(
        "Audit of b against a: In part: sinks (60\u00a0% at the same places), tags (3 of 5)"
    )
    assert str(audit).splitlines()[1].startswith("sinks: 3 of 5")
    counts = audit.tables["parts"].set_index("part")
    assert counts.loc["sinks", ["survived", "lost", "new", "undecided"]].tolist() == [3, 2, 0, 0]
    assert counts.loc["sinks", "left"] == pytest.approx(3 / 5)
    assert set(audit.tables) == {
        "overview",
        "parts",
        "loss",
        *(part.name.replace(" ", "_") for part in audit.parts),
    }
    assert audit.runs["b"]["model"]["sha256"] == pair("destroyed").run.provenance["model"]["sha256"]
    named = compare(pair().run, pair("destroyed").run)
    assert named.reference == pair().run.provenance["model"]["id"]


def test_an_intervention_is_named(damaged, pair):
    from theodolite.sinks.interventions import attention_knockout

    model = open_model(damaged())
    with attention_knockout(model, 0, 2, [1, 2, 3, 4, 5]):
        run = survey(model, CORPUS)
    audit = compare(pair().run, run)
    assert "under attention_knockout(layer=0, head=2" in audit.other
    assert places(audit.part("sinks").table, "lost") == {DESTROYED}
    assert audit.part("spectra").answer == HOLDS
    with pytest.raises(UsageError, match="its trace of sinks must be of the model"):
        compare(pair().run, run, pair().trace, pair().trace)  # this trace is without the intervention
