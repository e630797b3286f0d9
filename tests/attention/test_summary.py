"""What attention does, without a T×T matrix, against the matrices themselves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.attention.kinds import BATCH, HEADS, KINDS, LENGTH, dense, dense_logits, make, masked_by_bias
from theodolite.attention.summary import AttentionSummary, attention_summary, summarise, weights_at
from theodolite.errors import UsageError

module = sys.modules["theodolite.attention.inputs"]


def dense_summary(inputs) -> dict[str, torch.Tensor]:
    logits = dense_logits(inputs)
    weights, output, learned = dense(inputs)
    whole = logits
    if inputs.sink is not None:
        column = inputs.sink.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        whole = torch.cat([logits, column], dim=-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1) - torch.special.xlogy(learned, learned)
    seen = logits.isfinite().sum(-2)
    batch, heads, _, keys = logits.shape
    propagates = torch.zeros(batch, heads, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            row = logits[b, h, -1]
            t = int(row.isfinite().sum())
            omega = row[row.isfinite()]
            s = omega / t - omega.mean() / t + 1 / t
            propagates[b, h, row.isfinite()] = (s >= 0) & (s <= 1)
    return {
        "output": output,
        "entropy": entropy,
        "log_sum_exp": whole.logsumexp(-1),
        "largest": logits.amax(-1),
        "mass": weights.sum(-2),
        "received": weights.sum(-2) / seen.clamp_min(1),
        "sinks": (weights.sum(-2) / seen.clamp_min(1) > 0.3) & (seen - 1 >= 16),
        "propagates": propagates,
    }


def compare(got: AttentionSummary, inputs, tolerance: float) -> None:
    expected = dense_summary(inputs)
    for name, value in expected.items():
        found = getattr(got, name)
        if value.dtype == torch.bool:
            assert torch.equal(found, value), name
        else:
            torch.testing.assert_close(found.double(), value, rtol=tolerance, atol=tolerance, msg=name)
    if inputs.sink is not None:
        torch.testing.assert_close(got.learned.double(), dense(inputs)[2], rtol=tolerance, atol=tolerance)
    else:
        assert got.learned is None


@pytest.mark.parametrize("entries", [1, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_what_its_matrices_say(kind, entries, monkeypatch):
    """`entries`: a head (or a group of them) at a time, as of long contexts, or all at once."""
    monkeypatch.setattr(module, "BLOCK_ENTRIES", entries)
    inputs = make(kind)
    assert len(list(inputs.head_parts())) == (1 if entries > 1 else 2 if kind == "grouped" else HEADS)
    compare(summarise(inputs), inputs, 1e-10)


def test_padding_may_differ_between_contexts():
    inputs = make("padded")
    mask = inputs.mask.repeat(BATCH, 1, 1, 1)
    mask[1, :, :, 70:90] = False
    mask[1, :, 70:90, 0] = True
    inputs = replace(inputs, mask=mask)
    compare(summarise(inputs), inputs, 1e-10)


def test_large_logits_lose_no_digits():
    """Entropies of logits around 10⁴: the definition needs more than the logarithms of weights."""
    inputs = make("causal")
    inputs = replace(inputs, query=inputs.query * 1e4)
    compare(summarise(inputs), inputs, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_pairs(kind):
    inputs = make(kind)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randint(LENGTH, (2, 300), generator=generator)
    got = weights_at(inputs, summarise(inputs).log_sum_exp, query, key)
    torch.testing.assert_close(got, dense(inputs)[0][:, :, query, key], rtol=1e-10, atol=1e-12)


def test_from_queries_and_keys_alone():
    inputs = make("causal")
    alone = attention_summary(inputs.query, inputs.key)
    assert alone.output.shape == (BATCH, LENGTH, HEADS, 0)
    torch.testing.assert_close(alone.entropy, dense_summary(inputs)["entropy"], rtol=1e-10, atol=1e-10)
    assert torch.equal(alone.propagates, summarise(inputs).propagates)


@pytest.mark.parametrize(
    ("query", "key", "softcap", "words"),
    [
        ((2, 4, 8, 16), (2, 3, 8, 16), None, "heads a multiple of the key heads"),
        ((4, 8, 16), (4, 8, 16), None, "give \\(batch, heads"),
        ((2, 4, 8, 16), (2, 4, 9, 16), None, "8 queries and 9 keys: say by a mask"),
        ((2, 4, 8, 16), (2, 4, 8, 16), 0.0, "softcap 0.0 is not positive"),
    ],
)
def test_bad_calls(query, key, softcap, words):
    with pytest.raises(UsageError, match=words):
        attention_summary(torch.zeros(query), torch.zeros(key), softcap=softcap)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, -1e30])
@pytest.mark.parametrize("kind", ["window", "padded", "causal", "alibi"])
def test_a_mask_may_be_written_as_a_bias(kind, lowest):
    """Oracle: the matrices of the inputs with the mask itself; every number, those that count who sees a key, too."""
    inputs = make(kind)
    compare(summarise(masked_by_bias(inputs, lowest)), inputs, 1e-10)


def test_a_bias_of_half_precision_may_hold_its_lowest_value():
    inputs = make("window")
    seen = inputs.mask.expand(-1, HEADS, -1, -1)
    bias = torch.zeros(seen.shape, dtype=torch.float16).masked_fill(~seen, torch.finfo(torch.float16).min)
    got = attention_summary(inputs.query, inputs.key, inputs.value, causal=False, bias=bias)
    compare(got, inputs, 1e-10)


def test_a_causal_layer_whose_bias_hides_padding():
    """Oracle: the matrices with causality and padding in one mask; the second context is padded."""
    inputs = make("causal")
    padded = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.float64)
    padded[1, ..., :7] = -torch.inf
    whole = padded.isfinite() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    got = attention_summary(inputs.query, inputs.key, inputs.value, bias=padded.expand(-1, HEADS, -1, -1))
    compare(got, replace(inputs, causal=False, mask=whole), 1e-10)


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ENTRIES", 1)
    inputs, threads = make("grouped"), torch.get_num_threads()
    try:
        found = []
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(summarise(inputs))
    finally:
        torch.set_num_threads(threads)
    for name in ("output", "entropy", "log_sum_exp", "largest", "mass"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))


LONG = """
import torch
from benchmarks.timing import peak_memory
from theodolite.attention.summary import attention_summary
torch.set_num_threads(1)
torch.set_grad_enabled(False)
length = 8192
query, key, value = torch.randn(3, 1, 4, length, 16).unbind()
attention_summary(query[:, :, :64], key[:, :, :64], value[:, :, :64])
before = peak_memory()
attention_summary(query, key, value)
print(peak_memory() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square_of_the_length():
    """By the operating system's count: a T×T matrix of one head would take 256 MiB at T = 8192."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 2**20
