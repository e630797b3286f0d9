"""Forward passes that go through the blocks of a model together: all through one block, before any is in the next.

So a block that is read from its files as it runs (`StreamedBlocks`) is read once for any number of passes. Whoever
makes the passes repeats them, in the same order, for every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from theodolite.errors import WorkError
from theodolite.models.structure import first_tensor
from theodolite.system.mapped import kept

Inside = Callable[[], AbstractContextManager[object]]


class Sweep:
    """Hidden states of several passes that go through the blocks together.

    While `block(layer)` is open, a pass runs that block alone, on what the pass of the same number left at the block
    before; the others give back what they get, and their hooks are not called.

    Attributes:
        carried: the number of a pass → what it left at the last block that it ran.
        others: how many outputs blocks have beside hidden states; None where these are all they return.

    Args:
        blocks: in the order of the layers, each a module of its own.
        folder: keep hidden states in files without a name there; None: in memory.
        beside: hand on what blocks give the next ones beside hidden states (T5's biases of position), too.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], folder: Path | None = None, *, beside: bool = False
    ) -> None:
        self.carried: dict[int, Tensor] = {}
        self.others: int | None = None
        self._blocks, self._folder = blocks, folder
        self._number = 0
        self._entered: Tensor | None = None
        self._beside: Sequence[Any] = ()
        self._handed_on: dict[tuple[int, int], Sequence[Any]] | None = {} if beside else None

    @contextmanager
    def block(self, layer: int, inside: Inside = nullcontext, *, keep: bool = True) -> Iterator[None]:
        """Let every pass run this block alone while open, the same passes as at the block before.

        Args:
            inside: is open while the block runs, and may swallow an exception by which it is left.
            keep: whether passes go on from here; else they may be made again.

        Raises:
            WorkError: (a pass) there is something between blocks, or they pass on more than hidden states.
        """
        self._number, self._beside = 0, ()
        alone = partial(self._alone, layer, inside, keep)
        for number, block in enumerate(self._blocks):
            # As `Module.compile` does: called in place of the module and its hooks.
            block._compiled_call_impl = alone if number == layer else partial(self._back, number)
        try:
            yield
        finally:
            for block in self._blocks:
                block._compiled_call_impl = None

    def _back(self, layer: int, /, *args: Any, **kwargs: Any) -> Any:
        """Give back what a block is given, in place of the block."""
        hidden = first_tensor(args, kwargs)
        if not layer:
            self._entered = hidden
        if any(value is other for value in (*args, *kwargs.values()) for other in self._beside):
            raise WorkError("its blocks pass on more than hidden states")
        if self.others is None:
            return hidden
        handed_on = (self._handed_on or {}).get((self._number, layer), [None] * self.others)
        return (hidden, *handed_on)

    def _alone(self, layer: int, inside: Inside, keep: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a block on what this pass left at the one before."""
        number, hidden = self._number, first_tensor(args, kwargs)
        self._number += 1
        if layer and hidden is not self._entered:
            raise WorkError("the model computes something between its blocks")
        if number in self.carried:
            carried = self.carried[number].to(hidden.device)
            if "hidden_states" in kwargs:
                kwargs = {**kwargs, "hidden_states": carried}
            else:
                args = (carried, *args[1:])
        output: Any = None
        with inside():
            output = self._blocks[layer]._call_impl(*args, **kwargs)
        if output is None:  # it was left
            return hidden if self.others is None else (hidden, *[None] * self.others)
        left, *beside = output if isinstance(output, tuple | list) else (output,)
        self.others = len(beside) if isinstance(output, tuple | list) else None
        if self._handed_on is None:
            self._beside = [part for part in beside if isinstance(part, Tensor)]
        elif keep:
            self._handed_on[number, layer] = beside
        if keep:
            self.carried[number] = kept(left, self.carried.get(number), self._folder)
        return output
