"""Oracles: hidden states of transformers' own forward pass, plain numpy, and weights that plant what must be found."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from tests import checkpoints
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.sinks.outliers import Outliers, find_outliers, position_0_as_one
from theodolite.theory.outliers import Thresholds

LENGTH = 24
TOKEN, MARKER, DIMENSION, LAYER = 77, 3, 19, 1
"""The token's embedding alone has something in dimension MARKER; block LAYER then writes into DIMENSION."""


def plant(family: str, scale: float = 1.0) -> torch.nn.Module:
    """A random model in which one token alone gets a value of about 1000 in one dimension from one block on.

    Everything that is written into the stream is multiplied by `scale`; the norms undo it where they read.
    """
    model = checkpoints.build(family)
    state = model.state_dict()
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, MARKER] = 0
        embeddings[TOKEN, MARKER] = 1.5
        for name, weight in state.items():
            # What writes into the stream, a tenth as large, so that the marker is read in every block alike.
            if name.endswith(("c_proj.weight", "c_proj.bias", "o_proj.weight", "down_proj.weight")):
                weight *= 0.1
                writes = weight if family == "gpt2" else weight.T  # Conv1D: (in, out)
                writes[..., MARKER] = 0
        if family == "gpt2":
            state["transformer.wpe.weight"][:, MARKER] = 0
            mlp, norm = f"transformer.h.{LAYER}.mlp", f"transformer.h.{LAYER}.ln_2"
            state[f"{mlp}.c_fc.weight"][:, 0] = 0
            state[f"{mlp}.c_fc.weight"][MARKER, 0] = 1.0
            # The marker is about 3 behind the norm, 0 ± 0.3 for all others.
            state[f"{mlp}.c_fc.bias"][0] = -1.5
            state[f"{mlp}.c_proj.weight"][0] = 0
            state[f"{mlp}.c_proj.weight"][0, DIMENSION] = 1000.0
            state[f"{norm}.weight"][MARKER], state[f"{norm}.bias"][MARKER] = 1.0, 0.0
            # GELU of −1.5 is −0.1 and not 0: with 10 instead of 1 nothing is left of it.
            for part in ("weight", "bias"):
                state[f"{mlp}.c_fc.{part}"][..., 0] *= 10
            state[f"{mlp}.c_proj.weight"][0] /= 10
        else:
            mlp = f"model.layers.{LAYER}.mlp"
            for part in ("gate_proj", "up_proj"):
                state[f"{mlp}.{part}.weight"][0] = 0
                state[f"{mlp}.{part}.weight"][0, MARKER] = 3.0
            state[f"{mlp}.down_proj.weight"][:, 0] = 0
            state[f"{mlp}.down_proj.weight"][DIMENSION, 0] = 20.0
        for name, weight in state.items():
            if name.endswith(("wte.weight", "wpe.weight", "embed_tokens.weight")) or (
                name.endswith(("c_proj.weight", "c_proj.bias", "o_proj.weight", "down_proj.weight"))
            ):
                weight *= scale
    return model


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory):
    """planted(family, scale) → that model, opened."""
    cache: dict[tuple[str, float], OpenModel] = {}

    def opened(family: str, scale: float = 1.0) -> OpenModel:
        if (family, scale) not in cache:
            folder = tmp_path_factory.mktemp(f"{family}")
            plant(family, scale).save_pretrained(folder)
            checkpoints.byte_tokenizer().save_pretrained(folder)
            cache[family, scale] = open_model(folder)
        return cache[family, scale]

    return opened


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Random tokens; the planted one is at position 0 of contexts 2 and 9, and 17 times later, twice in context 5."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 256, size=(40, LENGTH))
    ids[ids == TOKEN] += 1
    ids[[2, 9], 0] = TOKEN
    ids[np.arange(4, 20), generator.integers(1, 12, size=16)] = TOKEN
    ids[5, 20] = TOKEN
    return Corpus("planted", torch.from_numpy(ids), torch.full((40,), -1), [], 0)


@pytest.fixture(scope="module")
def found(planted, corpus):
    """found(family, scale) → what is found in that model."""
    cache: dict[tuple[str, float], Outliers] = {}

    def outliers(family: str, scale: float = 1.0) -> Outliers:
        if (family, scale) not in cache:
            cache[family, scale] = find_outliers(planted(family, scale), corpus)
        return cache[family, scale]

    return outliers


def hidden_states(model: OpenModel, corpus: Corpus) -> np.ndarray:
    """Residual layers 0 … L, (layers, contexts, positions, width), from transformers' own outputs.

    The last of `output_hidden_states` is behind the final norm: in its place stands what enters that norm.
    """
    base = model.hf.base_model
    kept = []
    norm = base.ln_f if hasattr(base, "ln_f") else base.norm
    hook = norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.inference_mode():
        states = base(input_ids=corpus.contexts, output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*states[:-1], kept[0]]).double().numpy()


@pytest.mark.parametrize("family", ["gpt2", "llama2"])
def test_what_is_planted_is_found_and_nothing_else(planted, found, corpus, family):
    """By both rules, in every layer after the block that writes it, with its values; in no head."""
    found, x = found(family), hidden_states(planted(family), corpus)
    rows = [(row.layer, row.dimension, row.token_id, row.first) for row in found.massive.itertuples()]
    assert rows == [(layer, DIMENSION, TOKEN, first) for layer in (2, 3) for first in (False, True)]
    here = corpus.contexts.numpy() == TOKEN
    for row in found.massive.itertuples():
        own = here.copy()
        own[:, 1 if row.first else 0 : None if row.first else 1] = False
        values = x[row.layer][own][:, DIMENSION]
        assert (np.abs(values) > 200).all()
        assert (row.contexts, row.places) == (own.any(1).sum(), own.sum())
        assert row.places == row.published == row.adaptive
        assert row.mean == pytest.approx(values.mean(), rel=1e-4)
        assert row.extreme == pytest.approx(values[np.abs(values).argmax()], rel=1e-4)
        assert row.position == pytest.approx(np.nonzero(own)[1].mean())
    assert found.head_massive.empty
    assert (
        found.layers["massive_published"].tolist()
        == found.layers["massive_adaptive"].tolist()
        == [0, 0, 1, 1]
    )
    assert found.layers["adaptive"].sum() == 0  # 17 tokens make no outlier dimension
    np.testing.assert_allclose(found.layers["tokens"], np.array([0, 0, 17, 17]) / (40 * (LENGTH - 1)))
    np.testing.assert_allclose(found.layers["tokens_first"], np.array([0, 0, 2, 2]) / 40)


def test_a_model_of_another_scale_has_the_same_outliers_by_its_own_measure(planted, found, corpus):
    """At a hundredth of the size the published rule finds nothing, the rule from data the same; the caller's own
    thresholds find it again."""
    whole, small = found("llama2"), found("llama2", 0.01)
    assert whole.massive["published"].sum() > 0
    assert small.massive["published"].sum() == 0
    columns = ["layer", "dimension", "token_id", "first", "places", "adaptive"]
    assert small.massive[columns].to_numpy().tolist() == whole.massive[columns].to_numpy().tolist()
    ours = find_outliers(planted("llama2", 0.01), corpus, thresholds=Thresholds(massive=1.0))
    assert ours.massive["published"].tolist() == whole.massive["published"].tolist()


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_dimensions_are_those_of_all_hidden_states(opened, family):
    """Oracle: numpy on transformers' hidden states; thresholds that random models reach."""
    model = opened(family)
    corpus = Corpus.random_tokens(model.tokenizer, LENGTH, 10, seed=3)
    thresholds = Thresholds(outlier=1.5, massive=3.0, massive_ratio=4.0)
    found = find_outliers(model, corpus, thresholds=thresholds)
    x = hidden_states(model, corpus)
    table = found.dimensions
    later = np.abs(x[:, :, 1:])
    rms = np.sqrt((later**2).mean((1, 2)))
    typical = np.exp(np.log(later).mean((1, 2)))
    share = (later >= 1.5).mean((1, 2))
    grids = {name: table[name].to_numpy().reshape(rms.shape) for name in table.columns}
    np.testing.assert_allclose(grids["rms"], rms, rtol=1e-4)
    np.testing.assert_allclose(grids["share"], share, atol=2e-3)
    np.testing.assert_allclose(grids["consistency"], typical / rms, rtol=1e-4)
    np.testing.assert_allclose(grids["maximum_first"], np.abs(x[:, :, 0]).max(1), rtol=1e-4)
    enough = grids["share"] >= 0.06
    np.testing.assert_array_equal(grids["published"], enough & (enough.mean(0) >= 0.25))
    massive = (np.abs(x) > 3) & (
        np.abs(x) > 4 * np.quantile(np.abs(x), 0.5, axis=(2, 3), keepdims=True, method="lower")
    )
    assert found.massive["published"].sum() == pytest.approx(massive.sum(), abs=2)
    assert massive.sum() > 10


def test_heads_outputs_are_those_before_the_output_projection(opened):
    """Oracle: what enters GPT-2's c_proj, cut into heads."""
    model = opened("gpt2")
    corpus = Corpus.random_tokens(model.tokenizer, LENGTH, 10, seed=3)
    kept: list[torch.Tensor] = []
    hooks = [
        block.attn.c_proj.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        for block in model.hf.base_model.h
    ]
    with torch.inference_mode():
        model.hf.base_model(input_ids=corpus.contexts)
    for hook in hooks:
        hook.remove()
    heads = torch.stack(kept)[:, :, 1:].double().numpy().reshape(3, 10 * (LENGTH - 1), 4, 8)
    table = find_outliers(model, corpus, thresholds=Thresholds(outlier=0.5)).head_dimensions
    np.testing.assert_allclose(table["rms"], np.sqrt((heads**2).mean(1)).ravel(), rtol=1e-4)
    np.testing.assert_allclose(table["share"], (np.abs(heads) >= 0.5).mean(1).ravel(), atol=5e-3)
    np.testing.assert_array_equal(table["published"], table["share"] >= 0.06)
    assert table[["layer", "head", "dimension"]].to_numpy().tolist() == [
        list(place) for place in np.ndindex(3, 4, 8)
    ]


@pytest.mark.parametrize("family", ["bert", "gpt_oss"])
def test_other_families_are_read_too(opened, family):
    """A mask without order, ALiBi, learned sinks, values wider than d/H: every table has its rows and no NaN."""
    model = opened(family)
    found: Outliers = find_outliers(model, Corpus.random_tokens(model.tokenizer, LENGTH, 4))
    assert len(found.dimensions) == (model.layers + 1) * model.width
    assert set(found.head_dimensions["head"]) == set(range(model.heads))
    for table in (found.layers, found.dimensions, found.head_dimensions):
        assert np.isfinite(table.to_numpy(dtype=float)).all()


def test_position_0_is_one_row_a_dimension():
    """By hand: two tokens at position 0 of layer 1, dimension 4, with 2 and 1 places."""
    columns = ["layer", "dimension", "token_id", "token", "first", "contexts", "places", "published"]
    columns += ["adaptive", "mean", "extreme", "position"]
    later = (1, 4, 9, "x", False, 1, 5, 5, 0, 7.0, 8.0, 3.0)
    rows = [
        later,
        (1, 4, 6, "y", True, 2, 2, 2, 1, 4.0, 6.0, 0.0),
        (1, 4, 7, "z", True, 1, 1, 0, 1, -5.0, -8.0, 0.0),
    ]
    table = position_0_as_one(pd.DataFrame(rows, columns=columns))
    assert table.to_numpy().tolist() == [[1, 4, -1, "any", True, 3, 3, 2, 2, 1.0, -8.0, 0.0], list(later)]
    for some in (rows[:1], []):
        unchanged = pd.DataFrame(some, columns=columns).astype({"first": bool})
        pd.testing.assert_frame_equal(position_0_as_one(unchanged), unchanged)
