"""The Triton kernels as compiled for this GPU; where the CPU stands in for one, Triton's interpreter runs them."""

from __future__ import annotations

import os
from dataclasses import fields, replace

import pytest
import torch

from tests.attention.kinds import KINDS, make
from tests.attention.test_summary import dense_summary
from theodolite.attention import triton as attention_triton
from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import summarise, summarise_in_blocks

pytestmark = pytest.mark.gpu

COLUMNS = ("entropy", "log_sum_exp", "largest", "mass")


@pytest.fixture(autouse=True)
def kernels(device, monkeypatch):
    pytest.importorskip("triton", reason="no Triton here")
    if device.type == "cuda":
        assert os.environ["TRITON_INTERPRET"] == "0"
    else:
        monkeypatch.setattr(attention_triton, "on_gpu", lambda tensor: True)
        # Triton's interpreter is not made for threads.
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with torch.no_grad():
        yield
    assert not attention_triton._failed  # nothing fell back to torch


def moved(inputs: AttentionInputs, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    """The inputs on a device; queries, keys and values in a dtype, a bias in float32."""
    tensors = {
        field.name: value.to(device)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
    }
    tensors |= {name: tensors[name].to(dtype) for name in ("query", "key", "value")}
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"].float()
    return replace(inputs, **tensors)


def dtypes() -> list[torch.dtype]:
    """Not bfloat16 in the interpreter, which multiplies it as if it were integers."""
    half = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    return [torch.float32, half]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_what_the_matrices_say(kind, dtype, device):
    """Oracle: T×T matrices in float64 on the CPU, from the same rounded inputs."""
    here = moved(make(kind, strength=1.0).of_contexts(slice(1)), torch.device("cpu"), dtype)
    there = moved(here, device, dtype)
    assert attention_triton.can_do(there)
    got, expected = summarise(there), dense_summary(here)
    for name in COLUMNS:
        torch.testing.assert_close(getattr(got, name).cpu().double(), expected[name], rtol=1e-4, atol=1e-4)
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.output.cpu().double(), expected["output"], rtol=close, atol=close)
    assert torch.equal(got.sinks.cpu(), expected["sinks"])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("length", [4096, 16384])
def test_kernels_on_long_contexts_are_the_plain_computation(length, window, device):
    """Oracle: blocks of logits in float64 on the CPU."""
    if device.type == "cpu":
        length, window = length // 32, window and window // 32
    if window and length > 8192:
        pytest.skip("a mask of 16,384² is 256 MiB and tells nothing that one of 4,096² does not")
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, length, 64, generator=generator).unbind()
    key[:, 0, 0] *= 6
    mask = None
    if window:
        back = torch.arange(length)[:, None] - torch.arange(length)
        mask = ((back >= 0) & (back < window))[None, None]
    here = AttentionInputs(query.double(), key.double(), value.double(), 0.125, window is None, mask)
    got, expected = summarise(moved(here, device, torch.float32)), summarise_in_blocks(here)
    for name in (*COLUMNS, "output"):
        # A sink's mass is a sum over all queries; float32 rounds every term.
        torch.testing.assert_close(
            getattr(got, name).cpu().double(), getattr(expected, name).double(), rtol=2e-4, atol=2e-4
        )
    assert torch.equal(got.sinks.cpu(), expected.sinks)


def test_heads_of_every_usual_width_fit_the_gpu(device):
    """Oracle: blocks of logits in float64 on the CPU. The widest tiles need the most memory of a block."""
    generator = torch.Generator().manual_seed(0)
    half = dtypes()[1]
    for width, dtype in ((32, torch.float32), (64, half), (96, half), (128, torch.float32), (256, half)):
        query, key, value = torch.randn(3, 1, 2, 130, width, generator=generator).to(dtype).unbind()
        here = AttentionInputs(query.double(), key.double(), value.double(), width**-0.5, True)
        there = moved(here, device, dtype)
        assert attention_triton.can_do(there)
        torch.testing.assert_close(
            summarise(there).entropy.cpu().double(),
            summarise_in_blocks(here).entropy.double(),
            rtol=1e-3,
            atol=1e-3,
        )
