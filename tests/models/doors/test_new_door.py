"""A door of one's own, for a kernel that no other door sees. Oracle: the kernel's own output and weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

from theodolite.attention.inputs import AttentionInputs, attend
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


def test_a_door_is_a_context_manager_and_an_entry_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "DOORS", [(lambda model: isinstance(model, Fused), fused_door), *taps.DOORS])
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
