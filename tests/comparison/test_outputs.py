"""What heads write. Oracles: the input of W_O by a hook of PyTorch, losses by `transformers`, ratios by loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.comparison.conftest import CORPUS, IDS
from theodolite import compare
from theodolite.comparison import outputs, read_outputs
from theodolite.comparison.parts import head_outputs
from theodolite.judging import HOLDS, IN_PART
from theodolite.models import open_model


def written_by_hooks(model, ids: torch.Tensor) -> torch.Tensor:
    """(layers, heads, contexts, positions, width): the input of each c_proj, a head's entries times a head's rows."""
    found = []
    hooks = [
        block.attn.c_proj.register_forward_pre_hook(lambda module, inputs: found.append((module, inputs[0])))
        for block in model.hf.transformer.h
    ]
    with torch.no_grad():
        model.hf(ids)
    for hook in hooks:
        hook.remove()
    own = []
    for module, inputs in found:
        heads = inputs.double().unflatten(-1, (model.heads, -1))
        weights = module.weight.double().unflatten(0, (model.heads, -1))
        own.append(torch.stack([heads[:, :, h] @ weights[h] for h in range(model.heads)]))
    return torch.stack(own)


def test_outputs_and_losses_are_the_models_own(damaged):
    model = open_model(damaged("noisy"))
    run = read_outputs(model, CORPUS, batch=3)
    context, position = run.arrays["context"], run.arrays["position"]
    assert len(context) == outputs.TOKENS
    assert len({*zip(context.tolist(), position.tolist(), strict=True)}) == outputs.TOKENS
    assert position.min() >= 1
    expected = written_by_hooks(model, IDS)[:, :, context, position]
    torch.testing.assert_close(run.arrays["written"], expected.float(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        losses = [float(model.hf(ids[None], labels=ids[None]).loss) for ids in IDS]
    np.testing.assert_allclose(run.arrays["loss"].numpy(), losses, rtol=1e-6)


def test_a_head_that_is_cut_off_is_named(pair):
    """Its sinks, entropy and W_QK are as they were; only what it writes tells."""
    first, second = pair(), pair("cut off")
    runs = (first.run, second.run)
    audit = compare(*runs, outputs_of=(first.outputs, second.outputs), names=("planted", "cut"))
    part = audit.part("head outputs")
    row = part.table[(part.table["layer"] == 0) & (part.table["head"] == 2)].iloc[0]
    assert (row["status"], row["after"], row["norm_after"]) == ("lost", 0.0, 0.0)
    of_layer_0 = part.table[(part.table["layer"] == 0) & (part.table["head"] != 2)]
    assert (of_layer_0["status"] == "survived").all()
    assert (of_layer_0["difference"] == 0).all()
    for name in ("entropies", "spectra"):
        own = audit.part(name).table.query("layer == 0 and head == 2")
        assert own["status"].tolist() == ["survived"], name
    assert part.answer == audit.answer == IN_PART
    assert "L0H2 (1 → 0)" in part.sentence
    assert "L0H2 (" in audit.summary.partition("Hit hardest")[2]
    assert f"Next-token loss: {outputs.loss(first.outputs, first.outputs).before:.3g}" in audit.summary
    assert "perplexity times ∞" in str(outputs.Loss(2.0, 902.0, 900.0, 1.0, 8))


def test_the_share_that_is_kept_and_its_error_by_loops(pair):
    first, second = pair().outputs, pair("noisy").outputs
    table = head_outputs(first, second).table
    old, new = (run.arrays["written"].double().numpy() for run in (first, second))
    context = first.arrays["context"].numpy()
    for row in table.to_dict("records"):
        a, b = (each[row["layer"], row["head"]] for each in (old, new))
        changed = np.array([((b - a)[context == c] ** 2).sum() for c in range(len(IDS))])
        whole = np.array([(a[context == c] ** 2).sum() for c in range(len(IDS))])
        if not whole.any():  # it wrote nothing before
            assert (row["before"], row["status"]) == (0, "new")
            continue
        share = changed.sum() / whole.sum()
        assert row["after"] == pytest.approx(1 - share)
        assert row["norm_before"] == pytest.approx((whole.sum() / len(context)) ** 0.5)
        # The jackknife.
        left_out = [(changed.sum() - changed[c]) / (whole.sum() - whole[c]) for c in range(len(IDS))]
        count = len(IDS)
        jackknife = np.sqrt((count - 1) * np.var(left_out))
        assert row["se"] == pytest.approx(jackknife, rel=0.15)


@pytest.mark.parametrize(
    ("turned", "size", "status"),
    [
        (0.72, 1.0, "survived"),
        (0.73, 1.0, "lost"),
        (0.0, 0.3, "survived"),
        (0.0, 0.28, "lost"),
        (0.0, 1.7, "survived"),
        (0.0, 1.72, "lost"),
        (0.0, -1.0, "lost"),
    ],
)
def test_what_counts_as_written_still(pair, turned, size, status):
    """‖new − old‖² ≤ ½ ‖old‖²: of one vector turned by an angle 2 − 2 cos, of one scaled by s (1 − s)²."""
    run = pair().outputs
    written = run.arrays["written"].clone()
    old = written[0, 2].clone()
    across = torch.roll(old, 1, dims=1)
    across = across - (across * old).sum(1, keepdim=True) / old.square().sum(1, keepdim=True) * old
    across *= (old.norm(dim=1) / across.norm(dim=1))[:, None]
    written[0, 2] = size * (np.cos(turned) * old + np.sin(turned) * across)
    other = replace(run, arrays=run.arrays | {"written": written})
    part = head_outputs(run, other)
    row = part.table.query("layer == 0 and head == 2").iloc[0]
    assert row["status"] == status
    assert row["after"] == pytest.approx(1 - (1 - 2 * size * np.cos(turned) + size**2), abs=1e-5)
    assert (part.answer == HOLDS) == (status == "survived")


def test_wide_streams_are_seen_along_directions_that_keep_lengths():
    """Oracle: Var ‖xR‖²/‖x‖² = 2/128 of Gaussian directions."""
    assert torch.equal(outputs._directions(64), torch.eye(64, dtype=torch.float64))
    directions = outputs._directions(2048)
    assert directions.shape == (2048, 128)
    vectors = torch.randn(400, 2048, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ratio = (vectors @ directions).square().sum(1) / vectors.square().sum(1)
    assert float(ratio.mean()) == pytest.approx(1, abs=0.02)
    assert float(ratio.var()) == pytest.approx(2 / 128, rel=0.3)


def test_stopped_and_gone_on_with_gives_the_same_bytes(damaged, tmp_path):
    model = open_model(damaged("noisy"))
    whole = read_outputs(model, CORPUS, tmp_path / "whole", batch=4)
    calls, titles = [], []

    def show(what: str, done: int, total: int) -> None:
        titles.append(what)
        if what == "reading outputs":
            calls.append(done)

    def stop(what: str, done: int, total: int) -> None:
        show(what, done, total)
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_outputs(model, CORPUS, tmp_path / "parts", batch=4, show_progress=stop)
    again = read_outputs(model, CORPUS, tmp_path / "parts", batch=4, show_progress=show)
    assert calls == [0, 4, 8, 8, 12, 16]
    assert list(dict.fromkeys(titles)) == ["reading output weights", "reading outputs", "making tables"]
    names = ("whole", "parts")
    first, second = ((tmp_path / name / "arrays.safetensors").read_bytes() for name in names)
    assert first == second
    assert not head_outputs(whole, again).table["difference"].any()
