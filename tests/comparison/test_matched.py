"""Heads matched by what they do; oracles: permutations of one run's heads, and all ways to pair a few."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import transformers

from tests import checkpoints
from tests.calls import call
from tests.comparison.conftest import TEXT
from theodolite.comparison import compare, matched_heads
from theodolite.comparison.parts import ROLES, matches
from theodolite.comparison.survival import LOST, SURVIVED
from theodolite.errors import UsageError
from theodolite.judging import HOLDS, UNDECIDED


def permuted(run, order):
    """The run with its heads' numbers in another order; the places stay."""
    heads = run.heads.iloc[order].reset_index(drop=True)
    heads[["layer", "head"]] = run.heads[["layer", "head"]]
    return replace(run, heads=heads)


def test_permuted_heads_find_each_other(pair):
    run = pair("noisy").run
    order = np.random.default_rng(0).permutation(len(run.heads))
    # The highest entropy is the same in all blocks of this model, so that shares do not change with the place.
    part = matched_heads(run, permuted(run, order))
    assert part.answer == HOLDS
    places = run.heads.iloc[np.argsort(order)]
    expected = [f"L{layer}H{head}" for layer, head in zip(places["layer"], places["head"], strict=True)]
    assert part.table["match"].tolist() == expected
    assert part.table["difference"].tolist() == pytest.approx([0.0] * len(order), abs=1e-12)
    assert part.by_chance < len(order) - 1


@pytest.mark.parametrize(("heads", "others"), [(4, 4), (3, 5), (5, 3)])
def test_pairs_have_the_least_sum_of_squares(heads, others):
    """Oracle: all ways to pair them."""
    generator = np.random.default_rng(heads)
    first, second = generator.random((heads, 3)), generator.random((others, 3))
    few = min(heads, others)
    least = min(
        sum(((first[i] - second[j]) ** 2).sum() for i, j in zip(rows, columns, strict=True))
        for rows in itertools.permutations(range(heads), few)
        for columns in itertools.permutations(range(others), few)
    )
    places, partners = matches(first, second)
    assert len(set(places)) == len(set(partners)) == few
    assert ((first[places] - second[partners]) ** 2).sum() == pytest.approx(least)


def test_a_head_without_a_partner_is_lost(pair):
    run = pair().run
    fewer = replace(run, heads=run.heads.iloc[:-2].reset_index(drop=True))
    part = matched_heads(run, fewer)
    alone = part.table[part.table["match"] == ""]
    assert alone["status"].tolist() == [LOST, LOST]
    assert alone["depth_after"].isna().all()
    back = matched_heads(fewer, run)
    assert (back.table["status"] == SURVIVED).all()
    assert "2 heads of the other model without a partner" in back.sentence


def test_a_head_whose_entropy_or_its_error_is_not_known_does_not_survive(pair):
    """Nor is it taken for a collapsed one, whose entropy is 0."""
    run = pair().run
    unknown = run.heads.assign(entropy=run.heads["entropy"].where(run.heads.index > 0))
    part = matched_heads(replace(run, heads=unknown), run)
    assert part.table.loc[0, "status"] == "undecided"
    assert np.isnan(part.table.loc[0, "entropy_share_before"])
    assert (part.table.loc[1:, "status"] == SURVIVED).sum() >= len(run.heads) - 2
    older = replace(run, heads=run.heads.assign(entropy_se=np.nan))
    part = matched_heads(older, older)
    assert part.answer == UNDECIDED
    assert part.count("undecided") == len(run.heads)


def test_a_role_that_is_gone_is_lost(pair):
    """The planted model has a first-token sink and later ones by construction."""
    run = pair().run
    gone = [
        role
        for role in ROLES
        if role.column in run.heads and (run.heads[role.column] >= role.threshold).any()
    ]
    assert gone
    for role in gone:
        part = matched_heads(run, replace(run, heads=run.heads.assign(**{role.column: 0.0})))
        has_role = run.heads[role.column] >= role.threshold
        assert (part.table.loc[has_role, "status"] == LOST).all()
        assert f"{role.plural}: " in part.sentence


def test_models_of_different_shapes_are_matched(tmp_path):
    """Without --length each would read as many tokens as it has positions for: refused before any is read."""
    first, second = checkpoints.write("gpt2", tmp_path / "first"), tmp_path / "second"
    config = transformers.GPT2Config.from_pretrained(first, n_layer=2, n_head=8, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(second)
    checkpoints.byte_tokenizer().save_pretrained(second)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)

    own = ("compare", first, second, "--corpus", text, "--contexts", 8, "--out", out)
    for options, said in (
        ((), "first 128 and second 32"),
        (("--length", 32, "--prompt", "a b c d"), "leave out --prompt, --layer and --head"),
    ):
        status, _, stderr = call(*own, *options)
        assert (status, said in stderr.replace("\n", " ")) == (2, True), stderr
        assert not list(out.glob("*/run.json"))
    status, stdout, stderr = call(*own, "--length", 32)
    assert status == 0, stderr
    assert "matched heads" in stdout
    assert "only their heads are matched" in stdout
    table = pd.read_parquet(out / "sinks-compare" / "table-matched_heads.parquet")
    assert table["match"].str.fullmatch(r"L\d+H\d+|").all()


def test_runs_of_different_widths_are_matched_if_contexts_are_as_long(pair):
    """Sinks, roles and entropies depend on it, and no hash of tokens tells models of two shapes apart by it."""
    run = pair().run
    other = replace(run, provenance=run.provenance | {"model": run.provenance["model"] | {"width": 7}})
    audit = compare(run, other)
    assert [part.name for part in audit.parts] == ["matched heads"]
    assert audit.answer == HOLDS
    corpus = run.provenance["corpus"] | {"length": 2 * run.provenance["corpus"]["length"]}
    with pytest.raises(UsageError, match="give all the same --length"):
        compare(run, replace(run, provenance=other.provenance | {"corpus": corpus}), names=("one", "other"))
