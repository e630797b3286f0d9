"""A module whose own forward switches autocast on. Oracle: sums over what its modules are given, in plain float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models.modules import GPT, HEADS, VOCABULARY, WIDTH, named_weights, seeded, token_ids
from theodolite import Corpus, constituents, open_module, survey
from theodolite.train.monitor import GeometryMonitor


class MixedGPT(GPT):
    """Attends in bfloat16; its stream is in float32."""

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids)


def _entering(model: nn.Module, module: nn.Module) -> Tensor:
    given: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().double()))
    with torch.no_grad():
        model(token_ids())
    hook.remove()
    return given[0]


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_measures_is_not_cast(by_hand):
    gpt = seeded(MixedGPT(by_hand)).eval()
    block = gpt.transformer["h"][0]
    read, stream = _entering(gpt, block.attention), _entering(gpt, block)
    model = open_module(gpt, vocabulary=VOCABULARY)
    run = survey(model, Corpus.from_ids(token_ids()))
    rows = read[:, 1:].flatten(0, 1)
    covariance = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
    w_q, w_k, _ = named_weights(block.attention)
    product = w_q @ w_k.mT @ covariance
    heads, layer = run.heads[run.heads["layer"] == 0], run.layers.iloc[0]
    trace = product.diagonal(0, -2, -1).sum(-1)
    assert heads["trace_data"].tolist() == pytest.approx(trace.tolist(), rel=1e-5)
    assert layer["norm"] == pytest.approx(stream[:, 1:].norm(dim=-1).mean().item(), rel=1e-6)
    monitored = GeometryMonitor(model, token_ids(), every=1)(0)
    assert monitored["entropy_mean"] == pytest.approx(run.heads["entropy"].mean(), rel=1e-5)


def test_the_module_itself_attends_as_it_is_written():
    """Logits of parts, in float64, sum to those of the queries and keys that it has in bfloat16."""
    gpt = seeded(MixedGPT()).eval()
    model = open_module(gpt, vocabulary=VOCABULARY)
    read = _entering(gpt, gpt.transformer["h"][0].attention).float()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        q, k, _ = gpt.transformer["h"][0].attention.qkv(read).chunk(3, -1)
    assert q.dtype == torch.bfloat16
    q, k = (t.double().unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
    expected = q @ k.mT / (WIDTH // HEADS) ** 0.5
    parts = constituents(model, token_ids(), 0)
    seen = torch.ones(expected.shape[-2:]).tril().bool()
    largest = expected.abs().max()
    assert ((parts.total - expected)[..., seen].abs().max() <= 1e-6 * largest).item()
