"""Sparsity by block. Oracles: numpy, with the inputs of each matrix kept by hooks; and a table of sinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.prune.families import opened_anew
from tests.prune.test_checkpoint import contents, stop_after
from theodolite import open_model, trace_sinks
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.prune import prune_model
from theodolite.prune.by_block import DenseReading, falling

CORPUS = Corpus.random_tokens(300, 24, 10)


def opened_with_outliers(place):
    model = opened_anew("llama3", place)
    for layer, (dimension, size) in enumerate([(3, 40), (9, 15), (5, 1)]):
        model.structure.blocks[layer].input_layernorm.weight.data[dimension] *= size
    return model


def keeping(inputs: dict[int, np.ndarray]):
    def hook(module, args, _output):
        inputs[id(module)] = args[0].double().flatten(0, 1).numpy()

    return hook


def by_hand(model) -> np.ndarray:
    """D of each block."""
    shares = []
    for block in model.structure.blocks:
        layers = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
        inputs: dict[int, np.ndarray] = {}
        hooks = [layer.register_forward_hook(keeping(inputs)) for layer in layers]
        with torch.no_grad():
            model.hf(CORPUS.contexts)
        for hook in hooks:
            hook.remove()
        scores = np.concatenate(
            [
                (
                    np.abs(layer.weight.detach().double().numpy()) * np.linalg.norm(inputs[id(layer)], axis=0)
                ).ravel()
                for layer in layers
            ]
        )
        shares.append((scores > 5 * scores.mean()).mean())
    return np.array(shares)


def test_blocks_with_more_outliers_keep_more(tmp_path):
    model = opened_with_outliers(tmp_path)
    shares = by_hand(model)
    assert len(set(shares)) == 3
    kept = (shares - shares.min()) / (shares.max() - shares.min()) * 2 * 0.08  # as the released code has it
    expected = 1 - (kept - kept.mean() + (1 - 0.6))
    pruned = prune_model(model, CORPUS, "wanda", 0.6, sparsity_by="owl", batch=4)
    np.testing.assert_allclose(pruned.table.groupby("layer")["asked"].first(), expected, rtol=1e-9)
    assert pruned.provenance["pruning"]["sparsity_by"] == "owl"


def test_blocks_whose_sinks_tag_more_keep_more():
    """Oracle: a line drawn by hand through what the trace of the same text says of each block."""
    model = open_model()
    corpus = Corpus.python_docs(model.tokenizer, 64, 16)
    traces = trace_sinks(model, corpus).traces
    share = np.array([traces[traces["layer"] == layer]["tagged"].sum() / 4 for layer in range(model.layers)])
    assert share.argmax() in (3, 4)  # where the heads with a first-token sink are
    expected = 0.5 - 0.16 * (share - share.mean()) / (share.max() - share.min())
    pruned = prune_model(model, corpus, "wanda", 0.5, sparsity_by="tags")
    np.testing.assert_allclose(pruned.table.groupby("layer")["asked"].first(), expected, rtol=1e-9)


def test_what_the_dense_model_says_of_the_blocks_is_kept(tmp_path, monkeypatch):
    """Oracles: the files of a pruning that was not stopped; a reading that may not be made again."""

    def pruned(out, **options):
        how = {"sparsity_by": "owl", "batch": 4, "out": tmp_path / out, **options}
        return prune_model(opened_with_outliers(tmp_path), CORPUS, "wanda", 0.6, **how)

    whole = pruned("whole")
    with pytest.raises(KeyboardInterrupt):
        pruned("parts", show_progress=stop_after(8))
    monkeypatch.setattr(DenseReading, "sparsities", None)
    parts = pruned("parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert pruned("parts").table.equals(parts.table)
    assert parts.provenance["pruning"]["sparsity"] == 0.6
    asked = whole.table.groupby("layer")["asked"].first()
    assert parts.provenance["pruning"]["sparsities"] == list(asked)
    with pytest.raises(UsageError, match=r"--sparsity 0\.6 there, 0\.5 now"):
        prune_model(
            opened_with_outliers(tmp_path),
            *(CORPUS, "wanda", 0.5),
            **{"sparsity_by": "owl", "batch": 4, "out": tmp_path / "parts"},
        )


def test_blocks_alike_and_blocks_without_matrices_get_what_is_asked():
    assert falling([0.01, None, 0.01], 0.5) == [0.5, 0.5, 0.5]
    np.testing.assert_allclose(falling([0.0, None, 0.2], 0.5), [0.58, 0.5, 0.42])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity_by": "luck"}, "unknown --sparsity-by luck: use owl or tags"),
        ({"sparsity": [0.5, 0.5, 0.5]}, "--sparsity-by owl starts from one sparsity"),
        ({"sparsity": None, "pattern": "2:4"}, "--sparsity-by owl starts from one sparsity"),
        ({"sparsity": 0.97}, r"0.97 by block is 0\.\d+ to 1\.\d+: give one nearer to the middle"),
    ],
)
def test_what_leaves_no_choice_is_refused(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        prune_model(
            opened_with_outliers(tmp_path),
            CORPUS,
            method="wanda",
            **{"sparsity": 0.5, "sparsity_by": "owl", **options},
        )
