"""Sparse and low-rank matrices as bytes, against the dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.errors import WorkError
from theodolite.models.stored.factored import PrunedMatrix, packed, packed_block, read_matrices, unpacked
from theodolite.system.files import write_checked


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 19),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_a_packed_matrix_comes_back(outputs, inputs, dtype, share, seed):
    """Oracle: the matrix itself, and the size by count: a value a nonzero, a bit per entry."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(outputs, inputs, generator=generator).to(dtype)
    matrix[torch.rand(outputs, inputs, generator=generator) < share] = 0
    values, bits = packed(matrix)
    assert torch.equal(unpacked(values, bits, (outputs, inputs)), matrix)
    assert len(values) == np.count_nonzero(matrix.float().numpy())
    assert len(bits) == (outputs * inputs + 7) // 8


def test_golden_bits():
    """By hand: row by row, the first entry the highest bit."""
    values, bits = packed(torch.tensor([[1.0, 0, 0, 2.0, 0], [0, 0, 3.0, 0, 4.0]]))
    assert values.tolist() == [1, 2, 3, 4]
    assert bits.tolist() == [0b10010001, 0b01000000]


def _pieces() -> list[PrunedMatrix]:
    """Two matrices of one layer of 7 outputs and 5 inputs, interleaved; the second one has no low-rank part."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    first, second = random(4, 5), random(3, 5)
    first[:, 1] = second[0] = 0
    rows = torch.tensor([6, 0, 2, 4]), torch.tensor([1, 3, 5])
    return [
        PrunedMatrix("q", "block.fused.weight", None, 1, rows[0], first, random(4, 2), random(2, 5)),
        PrunedMatrix("mlp.fc.3", "block.fused.weight", None, 0, rows[1], second),
    ]


def test_pieces_come_back_from_their_file_and_are_sums(tmp_path):
    """Oracle: the pieces themselves; S + L R in float64, rounded once."""
    pieces, notes = _pieces(), {"rows": [1, 2], "error": 0.1}
    write_checked(tmp_path / "block.safetensors", *packed_block(pieces, notes))
    found, told = read_matrices(tmp_path / "block.safetensors")
    assert told == notes
    for one, other in zip(pieces, found, strict=True):
        for name, value in vars(one).items():
            again = getattr(other, name)
            assert torch.equal(value, again) if isinstance(value, torch.Tensor) else value == again, name
    first, second = found
    by_hand = first.sparse.double() + first.left.double() @ first.right.double()
    assert torch.equal(first.merged(), by_hand.float())
    assert torch.equal(second.merged(), second.sparse)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "block.safetensors"
    write_checked(path, *packed_block(_pieces(), {}))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(WorkError, match=r"block\.safetensors is damaged"):
        read_matrices(path)
