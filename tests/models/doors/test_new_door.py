"""A door of one's own, for a kernel that no other door sees. Oracle: the kernel's own output and weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.models.modules import (
    WIDTH,
    Attention,
    check_heads,
    gpt_of,
    opened,
    surveyed,
    token_ids,
)
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.doors import taps
from theodolite.models.doors.answers import answered


class Fused(nn.Module):
    """Has a kernel of its own, of (batch, heads, positions, width)."""

    scaling = 0.3

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


class FusedAttention(Attention, Fused):
    """Of a GPT, by the kernel."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel(q, k, v)

    def weights(self, x: Tensor) -> Tensor:
        """By the definition."""
        q, k, _ = self.split(x)
        return (q @ k.mT * self.scaling).softmax(-1)


def test_a_model_that_was_refused_is_read_through_a_door_that_is_added_later() -> None:
    """Oracle: entropies and norms by the definition; an intervention holds, and nothing stays behind."""
    gpt = gpt_of(FusedAttention)
    with pytest.raises(UsageError, match=r"could be read; it goes .* or give it a door"):
        opened(gpt)
    taps.add_door(has_fused, fused_door)
    check_heads(surveyed(gpt), gpt.blocks, gpt.embedded(token_ids()))
    first = gpt.blocks[0].attention
    with taps.intervened(gpt, first, lambda inputs, answer: 0 * answer(inputs)):
        silent = first(torch.ones(1, 4, WIDTH))
    torch.testing.assert_close(silent, first.out.bias.expand(1, 4, WIDTH))
    assert "kernel" not in vars(first)
