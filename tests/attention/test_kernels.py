"""The kernels, run by Triton's interpreter, and compiled for devices that are not here.

Not where types are checked: the interpreter calls small functions by the million.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.accumulate.test_attention import measured
from tests.attention.kinds import make
from tests.attention.test_summary import dense_summary
from tests.slow import slow_but
from theodolite.attention import triton as attention_triton
from theodolite.attention.summary import summarise, summarise_in_blocks


@pytest.fixture
def kernels(monkeypatch):
    """Kernels wherever they can do it, and no gradients, which they do not give."""
    pytest.importorskip("triton", reason="no Triton here")
    monkeypatch.setattr(attention_triton, "on_gpu", lambda tensor: True)
    with torch.no_grad():
        yield


def in_half_or_single(kind: str, dtype: torch.dtype):
    inputs = make(kind, dtype, strength=1.0).of_contexts(slice(2))  # the interpreter takes seconds for each
    return inputs if inputs.bias is None else replace(inputs, bias=inputs.bias.float())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but(
        [("grouped", torch.float32)],
        [
            ("grouped", torch.float32),
            ("window", torch.float16),
            ("capped", torch.float32),
            ("sink", torch.float16),
            ("alibi", torch.float32),
        ],
    ),
)
def test_kernels_are_what_the_matrices_say(kind, dtype, kernels):
    """Not in bfloat16, which the interpreter multiplies as if it were integers."""
    inputs = in_half_or_single(kind, dtype)
    assert attention_triton.can_do(inputs)
    got, expected = summarise(inputs), dense_summary(inputs)
    assert got.mass.dtype == torch.float64
    for name in ("entropy", "log_sum_exp", "largest", "mass"):
        torch.testing.assert_close(getattr(got, name).double(), expected[name], rtol=2e-5, atol=2e-5)
    close = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.output.double(), expected["output"], rtol=close, atol=close)
    assert torch.equal(got.sinks, expected["sinks"])


@pytest.mark.parametrize("width", slow_but([5], [5, 40]))
def test_kernels_take_any_width_and_strides(width, kernels):
    """Queries as projections leave them: heads inside positions; values wider than keys."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, 70, 3, n, generator=generator).transpose(1, 2) for n in (width, width, 24)
    )
    inputs = replace(make("causal"), query=query, key=key, value=value, scaling=0.3)
    got, expected = summarise(inputs), summarise_in_blocks(inputs)
    for name in ("output", "entropy", "log_sum_exp", "largest"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.mass, expected.mass, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda i: replace(i, query=i.query.double()),
        lambda i: replace(i, value=i.value.bfloat16()),
        lambda i: replace(i, query=torch.zeros(2, 4, 150, 129), key=torch.zeros(2, 4, 150, 129)),
    ],
)
def test_what_kernels_cannot_do_goes_the_other_way(change, kernels):
    inputs = in_half_or_single("causal", torch.float32)
    assert attention_triton.can_do(inputs)
    assert not attention_triton.can_do(change(inputs))


def test_a_triton_that_cannot_run_is_left_alone(kernels, monkeypatch):
    def fail(inputs):
        raise OSError("no compiler here")

    monkeypatch.setattr(attention_triton, "_failed", [])
    monkeypatch.setattr(attention_triton, "summarise", fail)
    inputs = in_half_or_single("causal", torch.float32)
    with pytest.warns(UserWarning, match=r"Triton cannot run here \(no compiler here\)"):
        got = summarise(inputs)
    torch.testing.assert_close(got.entropy, summarise_in_blocks(inputs).entropy)
    assert not attention_triton.can_do(inputs)  # not tried again


COMPILED = """
import warnings; warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from theodolite.attention import kernels

ROWS = dict.fromkeys(("entropy", "log_sum_exp", "largest"), "fp32")
POINTERS = ROWS | {"received": "fp64", "first": "i32", "last": "i32"}
def build(kernel, dtype, width, tile, kinds):
    constants = dict.fromkeys(("width", "padded", "value_width", "value_padded"), width) | {"tile": tile}
    constants |= {name: name in kinds for name in ("is_causal", "has_mask", "has_bias", "has_cap")}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = POINTERS | dict.fromkeys(("q", "k", "v", "output"), dtype) | {"m": "i1", "b": "fp32"}
    signature = {
        name: "constexpr" if name in constants
        else "*" + pointers[name] if name in pointers
        else "fp32" if name in ("scaling", "softcap") else "i32"
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).metadata.shared
for kernel in (kernels.attention_rows, kernels.attention_mass):
    print(build(kernel, "bf16", 128, 64, ("is_causal",)), build(kernel, "fp32", 128, 32, ("has_mask", "has_cap")))
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """To machine code of an H100, whose blocks have 227 KiB of shared memory."""
    pytest.importorskip("triton", reason="no Triton here")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert all(0 < int(shared) <= 227 * 1024 for shared in done.stdout.split())


@pytest.mark.parametrize("kind", slow_but(["sink"], ["sink", "grouped", "alibi"]))
def test_the_kernels_give_the_same_statistics(kind, kernels, monkeypatch):
    """Where no weights pass by, what is paid to previous and equal tokens is found from normalisers."""
    inputs = make(kind, torch.float32).of_contexts(slice(1))
    if inputs.bias is not None:
        inputs = replace(inputs, bias=inputs.bias.float())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # Triton's interpreter is not made for threads
    assert attention_triton.can_do(inputs)
    by_kernels, output = measured(inputs)
    monkeypatch.setattr(attention_triton, "on_gpu", lambda tensor: False)
    in_blocks, expected = measured(inputs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    for name, value in in_blocks.state().items():
        torch.testing.assert_close(by_kernels.state()[name], value, rtol=1e-5, atol=1e-4, msg=name)
