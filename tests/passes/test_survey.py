"""The whole survey against an independent one that keeps every matrix, on several families."""

from __future__ import annotations

import json
import shutil
from itertools import permutations

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.fft import dctn

from tests import checkpoints, dense
from tests.calls import same_bytes
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.passes.run import TABLES_TITLE
from theodolite.passes.survey import survey
from theodolite.theory import regime_margins

LENGTH = 40
STAGES = [
    "reading contexts",
    "splitting logits",
    "reading weights",
    "scoring head types",
]


def kept_whole(model: OpenModel, corpus: Corpus) -> dense.Dense:
    structure = model.structure
    return dense.run(model.hf, corpus.contexts, list(structure.attention), list(structure.blocks))


@pytest.mark.parametrize("family", checkpoints.TEXT_FAMILIES)
def test_every_measured_column_equals_the_dense_computation(family, checkpoint, opened, corpus):
    model = opened(family)
    run = survey(model, corpus, batch=5)
    reference = open_model(checkpoint(family))
    kept = kept_whole(reference, corpus)
    tolerance = 2e-3 if family == "gpt_oss" else 2e-5
    for name, expected in dense.layer_columns(kept, corpus.labels.numpy()).items():
        # What the largest eigenvalue of all tokens is without a group is from a sketch of their moments.
        close = 2e-2 if name == "relative_norm" else tolerance
        np.testing.assert_allclose(run.layers[name], expected, rtol=close, atol=1e-6, err_msg=name)
    for name, expected in dense.outlier_table(kept).items():
        np.testing.assert_allclose(run.outliers[name].astype(float), expected, rtol=tolerance, err_msg=name)
    for name, expected in dense.head_columns(kept, corpus.contexts.numpy(), model.causal).items():
        np.testing.assert_allclose(run.heads[name], expected, rtol=tolerance, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_of_chosen_layers_the_heads_are_those_of_all(family, opened, corpus, tmp_path) -> None:
    """Oracle: the survey of all layers, byte for byte; the fingerprint tells them apart."""
    model = opened(family)
    whole, last = survey(model, corpus, tmp_path / "whole"), model.layers - 1
    some = survey(model.only([last]), corpus, tmp_path / "some")
    of_last = whole.heads[whole.heads["layer"] == last].reset_index(drop=True)
    pd.testing.assert_frame_equal(some.heads, of_last)
    pd.testing.assert_frame_equal(some.layers, whole.layers)
    assert some.provenance["model"]["chosen_layers"] == [last]
    with pytest.raises(UsageError, match="chosen_layers"):
        survey(model, corpus, tmp_path / "some")
    with pytest.raises(UsageError, match="share one attention module"):
        opened("albert").only([0])
    for layers, says in (([], "no layer is chosen"), ([model.layers], "does not exist")):
        with pytest.raises(UsageError, match=says):
            model.only(layers)


def kept_with_weights(checkpoint, corpus):
    reference = open_model(checkpoint("gpt2"))
    return kept_whole(reference, corpus), reference.hf.state_dict()


def gpt2_weights(state: dict[str, torch.Tensor], layer: int, head: int) -> list[np.ndarray]:
    fused = state[f"transformer.h.{layer}.attn.c_attn.weight"].double().numpy()  # Conv1D: (in, out)
    width = fused.shape[0]
    return [fused[:, part * width + 8 * head : part * width + 8 * head + 8] for part in range(3)]


def test_localization_columns_equal_dense_matrices(checkpoint, opened, corpus):
    """Oracle: d×d matrices, numpy's eigenvalues, weights by parameter name, covariance by np.cov."""
    run = survey(opened("gpt2"), corpus)
    kept, state = kept_with_weights(checkpoint, corpus)
    for row in run.heads.itertuples():
        w_q, w_k, _ = gpt2_weights(state, row.layer, row.head)
        sigma = np.cov(kept.inputs[row.layer][:, 1:].reshape(-1, 32).T, bias=True)
        for suffix, w in (("", w_q @ w_k.T), ("_data", w_q @ w_k.T @ sigma)):
            got = {
                name: getattr(row, name + suffix) for name in ("trace", "trace_of_square", "r", "variance")
            }
            square = np.trace(w @ w)
            expected = {"trace": np.trace(w), "trace_of_square": square, "r": np.trace(w) / 8**0.5}
            expected |= {"variance": square / 32 - (np.trace(w) / 32) ** 2}
            for name, value in expected.items():
                assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
            assert getattr(row, "frobenius_squared" + suffix) == pytest.approx((w**2).sum(), rel=1e-5)
            assert np.isnan(getattr(row, "xi" + suffix)) == (square <= 0)
            ours = torch.view_as_complex(run.arrays["spectrum" + suffix])[row.layer, row.head].numpy()
            theirs = sorted(np.linalg.eigvals(w), key=abs)[-8:]
            np.testing.assert_allclose(sorted(np.abs(ours)), np.sort(np.abs(theirs)), rtol=1e-4)


def _frequencies(matrix: np.ndarray) -> list[float]:
    energy = dctn(matrix, type=2, norm="ortho") ** 2
    return [energy[:k, :k].sum() / energy.sum() for k in (1, 3, 5, 10)]


def _mean_of_different(rows: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The mean of X_a W X_bᵀ over contexts a ≠ b."""
    return np.mean([a @ w @ b.T for a, b in permutations(rows, 2)], axis=0)


def test_positional_columns_of_heads_equal_dense_matrices(checkpoint, opened, corpus):
    """Oracle: P̃WP̃ᵀ, PWPᵀ and QKᵀ written out in numpy from weights by parameter name, those of the mean by products
    of different contexts, which are groups of their own here; scipy's transform.
    """
    few = Corpus("few", corpus.contexts[:8], corpus.labels[:8], corpus.label_names, 0)
    run = survey(opened("gpt2"), few)
    kept, state = kept_with_weights(checkpoint, few)
    for row in run.heads.itertuples():
        w_q, w_k, _ = gpt2_weights(state, row.layer, row.head)
        w = w_q @ w_k.T
        x = kept.hidden[row.layer][:, 1:]
        matrix = _mean_of_different(x, w)
        local = [np.argmax(matrix[t, : t + 1]) == t for t in range(len(matrix))]
        assert row.argmax_property == pytest.approx(np.mean(local))
        smooth = dense.shares_of_frequencies(
            (x - x.mean(1, keepdims=True)) @ w_q, (x - x.mean(1, keepdims=True)) @ w_k
        )
        bias = state[f"transformer.h.{row.layer}.attn.c_attn.bias"].double().numpy().reshape(3, -1, 8)
        read = kept.inputs[row.layer][:, 1:]
        logits = (read @ w_q + bias[0, row.head]) @ (read @ w_k + bias[1, row.head]).transpose(0, 2, 1)
        expected = np.mean([_frequencies(context) for context in logits], axis=0)
        for index, k in enumerate((1, 3, 5, 10)):
            name = f"pwp_low_frequency_{k}"
            assert getattr(row, name) == pytest.approx(smooth[k], rel=1e-4, abs=1e-6, nan_ok=True)
            assert getattr(row, f"qk_low_frequency_{k}") == pytest.approx(expected[index], rel=1e-4)


def test_propagation_and_induction_follow_their_definitions(checkpoint, opened, corpus):
    """Oracle: logits from parameter names; attention on repeated tokens from eager attention."""
    run = survey(opened("gpt2"), corpus)
    reference = open_model(checkpoint("gpt2"))
    kept, state = kept_whole(reference, corpus), reference.hf.state_dict()
    for layer in range(3):
        bias = state[f"transformer.h.{layer}.attn.c_attn.bias"].double().numpy()
        for head in range(4):
            w_q, w_k, _ = gpt2_weights(state, layer, head)
            query = kept.inputs[layer] @ w_q + bias[8 * head : 8 * head + 8]
            key = kept.inputs[layer] @ w_k + bias[32 + 8 * head : 32 + 8 * head + 8]
            logits = np.einsum("cd,ctd->ct", query[:, -1], key) / 8**0.5
            expected = dense.propagation(logits)
            np.testing.assert_allclose(run.arrays["propagation_by_position"][layer, head], expected)
    half = LENGTH // 2
    # The byte tokenizer has 256 tokens that are not special, and puts nothing around a context.
    drawn = np.random.default_rng(0).choice(np.arange(256), size=(16, half))
    ids = torch.from_numpy(np.tile(drawn, (1, 2)))
    with torch.no_grad():
        attentions = reference.hf(input_ids=ids, output_attentions=True).attentions
    scores = [
        [a[:, h, half:, 1 : half + 1].diagonal(dim1=1, dim2=2).mean() for h in range(4)] for a in attentions
    ]
    np.testing.assert_allclose(run.heads.induction, np.array(scores, dtype=float).reshape(-1), rtol=1e-5)


def test_entropy_bound_is_near_and_below_nearly_even_attention(checkpoint, corpus, tmp_path):
    """Oracle: Zhai et al.'s bound, written out here, with ν from dense matrices and the keys in a query's window.

    Queries and keys are tiny: attention is nearly even, and the bound is near what it bounds.
    """
    folder = shutil.copytree(checkpoint("mistral"), tmp_path / "weak")
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        value *= 0.01 if "q_proj" in name or "k_proj" in name else 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = open_model(folder)
    run = survey(model, corpus)
    kept = kept_whole(model, corpus)
    for row in run.heads.itertuples():
        weights = model.head_weights(row.layer)
        w = weights.w_q[row.head] @ weights.w_k[row.head].T * weights.scaling
        x = kept.inputs[row.layer]
        nu = max(np.linalg.norm(c, 2) ** 2 for c in x) * float(torch.linalg.matrix_norm(w, 2))
        bounds = []
        for query in range(LENGTH):
            keys = min(query + 1, 7)
            beta = np.exp(-nu * np.sqrt(keys / (keys - 1))) if keys > 1 else 0.0
            top = nu * np.sqrt(keys * (keys - 1)) * beta
            bounds.append(np.log(1 + (keys - 1) * beta) + top / (1 + (keys - 1) * beta))
        assert row.entropy_bound == pytest.approx(np.mean(bounds), rel=1e-4)
        assert 0.1 < row.entropy_bound <= row.entropy


def test_regimes_are_read_off_the_symmetric_moments(opened, corpus):
    """Oracle: `theory.regime_margins` (its own tests scan the curve) of the table's ξ and η."""
    heads = survey(opened("llama2"), corpus).heads
    for suffix in ("", "_data"):
        xi, eta = (heads[f"{name}_symmetric{suffix}"].to_numpy() for name in ("xi", "eta"))
        margins = regime_margins(xi, eta)
        assert heads[f"regime{suffix}"].tolist() == margins.name.tolist()
        np.testing.assert_allclose(heads[f"regime_margin{suffix}"], margins.margin)


def test_what_follows_from_logits_is_left_open_where_no_matrix_gives_them(opened, corpus):
    """Qwen 3 normalises queries and keys: scaling W_q would change the spectrum and not the attention."""
    run = survey(opened("qwen3"), corpus)
    assert set(run.heads.spectrum_of) == {"projection before norm"}
    assert run.heads.trace.notna().all()
    assert run.heads.entropy_bound.isna().all()
    assert set(run.heads.regime) == {"undefined"}
    assert run.heads.regime_margin.isna().all()
    assert run.arrays["propagation_predicted"].isnan().all()


def test_a_changed_config_is_another_model(checkpoint, corpus, tmp_path):
    folder = shutil.copytree(checkpoint("llama2"), tmp_path / "model")
    survey(open_model(folder), corpus, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 50.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="holds a run of another model"):
        survey(open_model(folder), corpus, tmp_path / "run")


def test_every_pass_can_be_interrupted_and_resumed(tmp_path, opened, corpus):
    """At a first or a later step of each; a pass that was finished is not made again."""
    model, seen = opened("gpt2"), []
    survey(model, corpus, tmp_path / "whole", show_progress=lambda *step: seen.append(step))
    names = list(dict.fromkeys(what for what, _, _ in seen))
    assert names == [*STAGES, TABLES_TITLE]
    assert all((what, total, total) in seen for what, _, total in seen)
    for number, name in enumerate(names):
        step, begun = number % 2, []

        def stop(what, done, total, name=name, step=step, begun=begun):
            begun.append(what)
            if what == name and done >= step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            survey(model, corpus, tmp_path / "parts", show_progress=stop)
        assert set(begun) <= set(names[max(0, number - 1) :])
    survey(model, corpus, tmp_path / "parts")
    same_bytes(tmp_path / "whole", tmp_path / "parts")
    seen.clear()
    survey(model, corpus, tmp_path / "parts", show_progress=lambda *step: seen.append(step))
    assert not seen
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", "whole"]
