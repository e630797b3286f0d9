"""Recipes: settings by matrix from a small YAML file."""

from __future__ import annotations

import math

import pytest
import torch

from tests.prune.families import write
from theodolite import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.prune import prune_model
from theodolite.prune.recipe import Recipe


def corpus_of() -> Corpus:
    return Corpus.from_ids(torch.randint(3, 250, (4, 20), generator=torch.Generator().manual_seed(0)))


def pruned_by(text: str, tmp_path, **options):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    model = open_model(write("llama3", tmp_path / "llama3"))
    options = {"method": "oats", "sparsity": 0.5, "iterations": 2} | options
    return prune_model(model, corpus_of(), recipe=path, **options)


def test_the_last_name_that_fits_counts(tmp_path):
    """Oracle: the settings of each matrix by hand, in the table and in what decides the result."""
    recipe = """
    skip: ["0.*"]
    sparsity: {"mlp.*": 0.6, "2.mlp.up_proj": 0.25}
    rank_ratio: {q: 0.5}
    """
    pruned = pruned_by(recipe, tmp_path)
    asked = {(row.layer, row.matrix): row.asked for row in pruned.table.itertuples()}
    assert {layer for layer, _ in asked} == {1, 2}
    assert asked[1, "mlp.up_proj"] == asked[2, "mlp.down_proj"] == 0.6
    assert asked[2, "mlp.up_proj"] == 0.25
    assert asked[1, "q"] == asked[2, "self_attn.o_proj"] == 0.5
    pruning = pruned.provenance["pruning"]
    assert pruning["sparsity"]["2/mlp.up_proj"] == 0.25
    assert (pruning["rank_ratio"]["1/q"], pruning["rank_ratio"]["1/k"]) == (0.5, 0.25)
    assert pruning["skip"] == ["0.*"]


def test_it_is_what_functions_and_one_number_a_block_would_be(tmp_path):
    folder = write("llama3", tmp_path / "llama3")
    by_recipe = pruned_by("sparsity: {'1.*': 0.75}", tmp_path, method="wanda")
    by_block = prune_model(open_model(folder), corpus_of(), "wanda", [0.5, 0.75, 0.5])
    by_function = prune_model(
        open_model(folder), corpus_of(), "wanda", lambda layer, name: 0.75 if layer == 1 else 0.5
    )
    assert by_recipe.table.equals(by_block.table)
    assert by_function.table.equals(by_block.table)
    settings = [each.provenance["pruning"]["sparsity"] for each in (by_recipe, by_block, by_function)]
    assert settings == 3 * [[0.5, 0.75, 0.5]]
    assert math.isclose(by_block.table["sparsity"][by_block.table["layer"] == 1].mean(), 0.75, abs_tol=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no recipe: give skip, sparsity or rank_ratio"),
        ("skip: [q]\nsparsity: [0.5", r"recipe\.yaml: line 2: expected ',' or '\]'"),
        ("skip: [q]\n\nskip: [k]", r"recipe\.yaml, line 3: skip is there twice"),
        ("sparsity:\n  q: 0.5\n  'q': 0.6", r"recipe\.yaml, line 3: q is there twice"),
        ("sparsity: {q: 2020-13-45}", "cannot read the recipe .*month"),
        ("skip:\nsparsity: {}", r"recipe\.yaml is empty: give skip, .* or leave --recipe out"),
        ("sparsity: 0", "sparsity has a number for each name"),
        ("skip: [qq]", r"recipe\.yaml: skip qq: no matrix of .* is called so"),
        ("sparsities: {q: 0.5}", "a recipe has skip, sparsity and rank_ratio, and no sparsities"),
        ("skip: q", "skip is a list of names"),
        ("sparsity: {q: high}", "sparsity has a number for each name"),
        ("sparsity: {qq: 0.5}", "no matrix that is to be pruned is called qq"),
        ("skip: [q]\nsparsity: {q: 0.5}", "no matrix that is to be pruned is called q"),
        ("sparsity: {q: 1.5}", "sparsity"),
    ],
)
def test_what_is_no_recipe_is_one_line(text, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        pruned_by(text, tmp_path)


def test_it_has_no_sparsity_of_what_is_quantised(tmp_path):
    with pytest.raises(
        UsageError, match=r"recipe\.yaml: bits say how weights are stored, .*: leave out sparsity"
    ):
        pruned_by("sparsity: {q: 0.75}", tmp_path, method="round", sparsity=None, bits=4, group=0)


def test_names_are_those_of_skip(tmp_path):
    """Oracle: `skip` leaves dense what the recipe makes sparser: modules, and names in the model."""
    for name in ("mlp", "model.layers.1", "model.layers.2.self_attn.*", "1", "self_attn.?_proj"):
        by_recipe = pruned_by(f"sparsity: {{'{name}': 0.75}}", tmp_path, method="magnitude").table
        skipped = pruned_by(f"skip: ['{name}']", tmp_path, method="magnitude").table
        kept = set(zip(skipped["layer"], skipped["matrix"], strict=True))
        rest = by_recipe[by_recipe["asked"] == 0.5]
        assert set(zip(rest["layer"], rest["matrix"], strict=True)) == kept
        assert len(kept) < len(by_recipe)


def test_one_expert_may_be_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("sparsity: {'0.mlp.experts.down_proj.1': 0.75}", encoding="utf-8")
    model = open_model(write("mixtral", tmp_path / "mixtral"))
    table = prune_model(model, corpus_of(), "magnitude", 0.5, recipe=path).table
    changed = table[table["asked"] == 0.75]
    assert changed[["layer", "matrix", "expert"]].to_numpy().tolist() == [[0, "mlp.experts.down_proj", 1]]


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the recipe .*No such file"):
        Recipe.read(tmp_path / "none.yaml")


def test_ratios_for_a_method_without_low_rank_parts_are_refused(tmp_path):
    with pytest.raises(UsageError, match="wanda has no low-rank part: leave rank_ratio out"):
        pruned_by("rank_ratio: {q: 0.5}", tmp_path, method="wanda")
