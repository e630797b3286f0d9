"""Massive activations planted in an embedding, where every later block has them: found, taken out and held constant."""

from __future__ import annotations

import pytest
import torch
import transformers

from theodolite import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.models.hooks import Hooks, hooked
from theodolite_papers.catch_tag_release.ablated import (
    SpikingTokens,
    find_spikes,
    replace_activations,
)

TOKEN, DIMENSION, SIZE = 7, 3, 5000.0


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def spiky(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spiky")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(request.param))
    with torch.no_grad():
        model.get_input_embeddings().weight[TOKEN, DIMENSION] = SIZE
    model.save_pretrained(folder)
    return open_model(folder, device="cpu")


@pytest.fixture(scope="module")
def ids():
    ids = torch.randint(8, 60, (6, 20), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[2, 11] = TOKEN, TOKEN
    return ids


class _Streams(Hooks):
    def __init__(self) -> None:
        self.streams: list[torch.Tensor] = []

    def stream(self, layer, hidden):
        if layer:
            self.streams.append(hidden.clone())


def streams_of(model, ids) -> torch.Tensor:
    tap = _Streams()
    with hooked(model, tap):
        model.forward(ids)
    return torch.stack(tap.streams)


def spiking_tokens(model, found, ids) -> torch.Tensor:
    tap = SpikingTokens(found)
    with hooked(model, tap):
        model.forward(ids)
    return torch.stack(tap.carry)


def test_planted_activations_are_found(spiky, ids):
    """Oracle: where they were planted, and means by hand."""
    found, streams = find_spikes(spiky, Corpus.from_ids(ids)), streams_of(spiky, ids).double()
    carry = ids == TOKEN
    assert found.dimensions.nonzero()[:, 1].unique().tolist() == [DIMENSION]
    assert torch.equal(spiking_tokens(spiky, found, ids), carry.expand(spiky.layers, -1, -1))
    torch.testing.assert_close(found.spiking, streams[:, carry].mean(dim=1))
    torch.testing.assert_close(found.others, streams[:, ~carry].mean(dim=1))
    control = found.next_largest()
    assert control.sum(dim=1).tolist() == [1] * spiky.layers
    sizes = streams[:, carry].abs().mean(dim=1)
    sizes[:, DIMENSION] = 0
    assert torch.equal(control.int().argmax(dim=1), sizes.argmax(dim=1))


def test_values_are_replaced_behind_every_block_and_come_back(spiky, ids):
    """Oracle: a hook on the released blocks that writes the values by hand."""
    found, before = find_spikes(spiky, Corpus.from_ids(ids)), spiky.logits(ids)
    tokens = spiking_tokens(spiky, found, ids)
    with replace_activations(spiky, tokens, found.dimensions, found.others):
        taken, streams = spiky.logits(ids), streams_of(spiky, ids)
        with pytest.raises(UsageError, match=r"given for \(6, 20\)"):
            spiky.logits(ids[:2])
    carry = ids == TOKEN
    expected = found.others[:, DIMENSION].to(streams)[:, None].expand(-1, int(carry.sum()))
    torch.testing.assert_close(
        streams[:-1, carry][..., DIMENSION], expected[:-1]
    )  # behind the last comes a norm

    def by_hand(layer):
        def hook(_module, _args, output):
            hidden = (output[0] if isinstance(output, tuple) else output).clone()
            hidden[..., DIMENSION] = torch.where(
                carry, found.others[layer, DIMENSION].to(hidden), hidden[..., DIMENSION]
            )
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    handles = [
        block.register_forward_hook(by_hand(layer)) for layer, block in enumerate(spiky.structure.blocks)
    ]
    torch.testing.assert_close(spiky.logits(ids), taken)
    for handle in handles:
        handle.remove()
    assert torch.equal(spiky.logits(ids), before)
    assert not torch.allclose(before, taken)
    every = torch.ones_like(found.dimensions)
    with replace_activations(spiky, tokens, every, found.spiking):
        held = streams_of(spiky, ids)[0, carry]
    assert torch.equal(held, held[:1].expand_as(held))


def test_a_model_without_massive_activations_has_none(checkpoint, ids):
    found = find_spikes(open_model(checkpoint("llama"), device="cpu"), Corpus.from_ids(ids))
    assert not found.dimensions.any()
