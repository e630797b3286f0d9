"""Scaled rotary positions at the lengths that they exist for, before and after passes of other lengths.

Oracle: `transformers` with eager attention, a model made anew for each length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import checkpoints
from theodolite import Corpus, constituents, open_model, survey
from theodolite.evaluate.perplexity import perplexity
from theodolite.models import open_streamed
from theodolite.models.source import turned_alike_up_to
from theodolite.sinks.prompt import attention_paid, read_prompt

ORIGINAL, LONGEST = 32, 128
LENGTHS = [100, 60, ORIGINAL, 20, 60, 100]


def _scaled(kind: str, positions: int = ORIGINAL, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
    return {"max_position_embeddings": positions, "rope_parameters": rope}


FROM = {"original_max_position_embeddings": ORIGINAL}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
KINDS = {
    "linear": _scaled("linear"),
    "yarn": _scaled("yarn", **FROM),
    "longrope": _scaled("longrope", LONGEST, **FROM, **LONGROPE),
    "llama3": _scaled("llama3", LONGEST, **FROM, low_freq_factor=1.0, high_freq_factor=4.0),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def made(kind: str) -> PreTrainedModel:
    return checkpoints.build("llama2", **KINDS[kind])


def drawn(length: int) -> Tensor:
    return torch.randint(checkpoints.VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))


def alone(kind: str, ids: Tensor) -> Any:
    """What a model that has read nothing else gives."""
    model = made(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, output_attentions=True)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids, mask = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64) for _ in range(2))
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    return ids, mask


def test_attention_logits_and_their_constituents_at_every_length(kind):
    model = open_model(made(kind))
    assert model.longest == LONGEST
    for length in LENGTHS:
        ids = torch.stack([drawn(length), drawn(length).flip(0)])
        own, read = alone(kind, ids), read_prompt(model, ids[0])
        for layer, attention in enumerate(own.attentions):
            torch.testing.assert_close(
                attention_paid(read.layers[layer][0])[0].float(), attention[0], atol=1e-5, rtol=0
            )
        torch.testing.assert_close(model.logits(ids), own.logits, atol=1e-4, rtol=0)
        split = constituents(model, ids, 1)
        torch.testing.assert_close(split.attention.float(), own.attentions[1], atol=1e-5, rtol=0)
        parts = split.logits.sum(dim=(-4, -3)) + split.additive
        torch.testing.assert_close(parts, split.total, atol=1e-9, rtol=0)


@pytest.mark.parametrize("opened", [open_model, open_streamed])
def test_contexts_of_unlike_lengths_are_each_turned_by_their_own(opened, kind, tmp_path):
    """Perplexity against a plain loop, a survey's entropies against those of `output_attentions`."""
    rows = [drawn(length + more) for length in LENGTHS[:4] for more in (0, 1, 2)]
    ids, mask = padded(rows)
    corpus = Corpus.from_ids(ids, attention_mask=mask)
    model = opened(checkpoints.write("llama2", tmp_path, **KINDS[kind]))
    heads = survey(model, corpus).heads
    own = [alone(kind, row[None]) for row in rows]
    attention = [torch.stack(of.attentions)[:, 0].double() for of in own]
    entropy = torch.cat([torch.special.entr(weights).sum(-1) for weights in attention], dim=-1).mean(-1)
    assert heads["entropy"].to_numpy() == pytest.approx(entropy.flatten().numpy(), abs=1e-5)
    if opened is open_model:
        losses = [
            torch.nn.functional.cross_entropy(of.logits[0, :-1], row[1:], reduction="sum")
            for of, row in zip(own, rows, strict=True)
        ]
        expected = float(sum(losses)) / sum(len(row) - 1 for row in rows)
        assert perplexity(model, corpus).loss == pytest.approx(expected, abs=1e-5)


def test_what_turns_by_the_length_of_a_pass():
    alike = {kind: turned_alike_up_to(made(kind).config) for kind in KINDS}
    assert alike == dict.fromkeys(KINDS) | {"longrope": ORIGINAL}
    dynamic = checkpoints.build("llama2", **_scaled("dynamic"))
    assert open_model(dynamic).longest == ORIGINAL  # beyond, it turns by the longest pass so far
