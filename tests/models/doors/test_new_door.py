"""A door of one's own, for a kernel that no other door sees. Oracle: the kernel's own output and weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.models.modules import (
    GPT,
    HEADS,
    Attention,
    check_heads,
    gpt_of,
    opened,
    surveyed,
    token_ids,
)
from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.errors import UsageError
from theodolite.models.doors import taps
from theodolite.models.doors.answers import answered


class Fused(nn.Module):
    """Attends by a kernel of its own, (batch, heads, positions, width)."""

    scaling = 0.3

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x * factor for factor in (1.0, 0.5, 2.0))
        return self.kernel(query, key, value)

    def kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return (query @ key.mT * self.scaling).softmax(-1) @ value


@contextmanager
def fused_door(model: nn.Module) -> Iterator[None]:
    """While open, the kernels of a model are answered."""

    def kernel_of(module: Fused) -> object:
        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            inputs = AttentionInputs(query=query, key=key, value=value, scaling=module.scaling, causal=False)
            return answered(module, inputs).transpose(1, 2)

        return kernel

    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, Fused):
                undo.callback(delattr, module, "kernel")
                module.kernel = kernel_of(module)  # on the instance: its class's is uncovered afterwards
        yield


@pytest.fixture(autouse=True)
def own_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the doors of a test away again."""
    monkeypatch.setattr(taps, "DOORS", [*taps.DOORS])


def has_fused(model: nn.Module) -> bool:
    return any(isinstance(module, Fused) for module in model.modules())


def test_a_door_is_a_context_manager_that_is_added() -> None:
    taps.add_door(has_fused, fused_door)
    model, x = Fused(), torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    seen: list[AttentionInputs] = []

    def tap(module: nn.Module, inputs: AttentionInputs) -> Tensor:
        seen.append(inputs)
        return attend(inputs)

    own = model(x)
    with taps.tapped(model, tap):
        torch.testing.assert_close(model(x), own)
    with taps.intervened(model, model, lambda inputs, answer: 2 * answer(inputs)):
        torch.testing.assert_close(model(x), 2 * own)
    (inputs,) = seen
    torch.testing.assert_close(inputs.logits().softmax(-1) @ inputs.value, own)
    assert torch.equal(model(x), own)
    assert "kernel" not in vars(model)


class FusedAttention(Attention, Fused):
    """Of a GPT, by the kernel."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel(q, k, v)

    def weights(self, x: Tensor) -> Tensor:
        """By the definition."""
        q, k, _ = self.split(x)
        return (q @ k.mT * self.scaling).softmax(-1)


def test_a_model_that_was_refused_is_read_through_a_door_that_is_added_later() -> None:
    """Oracle: entropies and norms by the definition."""
    gpt = gpt_of(FusedAttention)
    with pytest.raises(UsageError, match=r"could be read; it goes .* or give it a door"):
        opened(gpt)
    taps.add_door(has_fused, fused_door)
    check_heads(surveyed(gpt), gpt.blocks, gpt.embedded(token_ids()))


def test_a_refusal_names_what_stands_in_place_of_the_softmax() -> None:
    """And the module is read once it attends by a softmax."""
    gpt = GPT(by_hand=True)
    for block in gpt.blocks:
        block.attention.weights = lambda x, of=block.attention: (of.split(x)[0] @ of.split(x)[1].mT).exp()
    with pytest.raises(UsageError, match="could be read: exp between its products is not followed"):
        opened(gpt)
    for block in gpt.blocks:
        del block.attention.weights
    assert opened(gpt).heads == HEADS
