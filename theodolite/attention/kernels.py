"""The Triton kernels of the attention summary; `triton.py` launches them, `summary.py` computes the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(at, row, row_stride, rows, column, column_stride, columns):
    """Load a tile of a matrix; 0 outside of its rows and columns."""
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(at + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def _logits(
    query,  # (tile, padded)
    key,  # (padded, tile)
    row,
    column,
    inside,
    mask_at,
    mask_query,
    mask_key,
    bias_at,
    bias_query,
    bias_key,
    scaling,
    softcap,
    masked: tl.constexpr,
    is_causal: tl.constexpr,
    has_mask: tl.constexpr,
    has_bias: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Compute the masked logits of a tile; `inside` says which pairs there are."""
    logits = tl.dot(query, key, input_precision="ieee") * scaling
    if has_cap:
        scaled = 2.0 * logits / softcap
        # tanh(x) = 1 − 2 / (e^{2x} + 1): right at both ends, and Triton has no tanh of its own.
        logits = softcap * (1.0 - 2.0 / (tl.exp(tl.minimum(scaled, 80.0)) + 1.0))
    if has_bias:
        place = bias_at + row[:, None] * bias_query + column[None, :] * bias_key
        logits += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if has_mask:
        place = mask_at + row[:, None] * mask_query + column[None, :] * mask_key
        inside = inside & (tl.load(place, mask=inside, other=0) != 0)
    if is_causal:
        inside = inside & (column[None, :] <= row[:, None])
    return tl.where(inside, logits, masked), inside


@triton.jit
def attention_rows(
    q, q_batch, q_head, q_position, q_width,
    k, k_batch, k_head, k_position, k_width,
    m, m_batch, m_head, m_query, m_key,
    b, b_batch, b_head, b_query, b_key,
    scaling, softcap,
    v, v_batch, v_head, v_position, v_width,
    output, entropy, log_sum_exp, largest,
    first, last,
    heads, group, queries, keys,
    width: tl.constexpr, padded: tl.constexpr,
    tile: tl.constexpr,
    value_width: tl.constexpr, value_padded: tl.constexpr,
    is_causal: tl.constexpr, has_mask: tl.constexpr, has_bias: tl.constexpr, has_cap: tl.constexpr,
):  # fmt: skip
    """Compute output, entropy, log-sum-exp and largest logit of a tile of queries, over keys `first … last`."""
    place, number = tl.program_id(0), tl.program_id(1)
    batch, head = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    row = number * tile + tl.arange(0, tile)
    lane, value_lane = tl.arange(0, padded), tl.arange(0, value_padded)
    there = row < queries
    query = _tile(q + batch * q_batch + head * q_head, row, q_position, queries, lane, q_width, width)
    key_at = k + batch * k_batch + (head // group) * k_head
    value_at = v + batch * v_batch + (head // group) * v_head
    mask_at, bias_at = m + batch * m_batch + head * m_head, b + batch * b_batch + head * b_head
    masked: tl.constexpr = -1e30
    most = tl.full([tile], masked, tl.float32)
    total = tl.zeros([tile], tl.float32)
    moment = tl.zeros([tile], tl.float32)  # Σ e^{x − most} (x − most)
    summed = tl.zeros([tile, value_padded], tl.float32)
    for start in range(tl.load(first + number), tl.load(last + number), tile):
        column = start + tl.arange(0, tile)
        key = _tile(key_at, lane, k_width, width, column, k_position, keys)
        logits, _ = _logits(
            query, key, row, column, there[:, None] & (column[None, :] < keys),
            mask_at, m_query, m_key, bias_at, b_query, b_key, scaling, softcap,
            masked, is_causal, has_mask, has_bias, has_cap,
        )  # fmt: skip
        now = tl.maximum(most, tl.max(logits, axis=1))
        shrunk = tl.exp(most - now)
        shifted = logits - now[:, None]
        weights = tl.exp(shifted)
        # Where nothing was seen before, `shrunk` is 0 and the difference finite: their product is 0.
        moment = shrunk * (moment + total * (most - now)) + tl.sum(weights * shifted, axis=1)
        total = shrunk * total + tl.sum(weights, axis=1)
        if value_width > 0:
            value = _tile(value_at, column, v_position, keys, value_lane, v_width, value_width)
            added = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            summed = summed * shrunk[:, None] + added
        most = now
    at = place.to(tl.int64) * queries + row
    tl.store(largest + at, most, mask=there)
    tl.store(log_sum_exp + at, most + tl.log(total), mask=there)
    tl.store(entropy + at, tl.log(total) - moment / total, mask=there)
    if value_width > 0:
        out = output + ((batch * queries + row[:, None]) * heads + head) * value_width + value_lane[None, :]
        kept = there[:, None] & (value_lane[None, :] < value_width)
        tl.store(out, (summed / total[:, None]).to(output.dtype.element_ty), mask=kept)


@triton.jit
def attention_mass(
    q, q_batch, q_head, q_position, q_width,
    k, k_batch, k_head, k_position, k_width,
    m, m_batch, m_head, m_query, m_key,
    b, b_batch, b_head, b_query, b_key,
    scaling, softcap,
    log_sum_exp, received,
    first, last,
    heads, group, queries, keys,
    width: tl.constexpr, padded: tl.constexpr,
    tile: tl.constexpr,
    is_causal: tl.constexpr, has_mask: tl.constexpr, has_bias: tl.constexpr, has_cap: tl.constexpr,
):  # fmt: skip
    """Sum in float64 what a tile of keys gets from queries `first … last`, whose log-sum-exps are known."""
    place, number = tl.program_id(0), tl.program_id(1)
    batch, head = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    column = number * tile + tl.arange(0, tile)
    lane = tl.arange(0, padded)
    there = column < keys
    key_at = k + batch * k_batch + (head // group) * k_head
    key = _tile(key_at, lane, k_width, width, column, k_position, keys)
    query_at = q + batch * q_batch + head * q_head
    mask_at, bias_at = m + batch * m_batch + head * m_head, b + batch * b_batch + head * b_head
    masked: tl.constexpr = -1e30
    total = tl.zeros([tile], tl.float64)
    for start in range(tl.load(first + number), tl.load(last + number), tile):
        row = start + tl.arange(0, tile)
        query = _tile(query_at, row, q_position, queries, lane, q_width, width)
        normaliser = tl.load(log_sum_exp + place.to(tl.int64) * queries + row, mask=row < queries, other=0.0)
        logits, seen = _logits(
            query, key, row, column, (row[:, None] < queries) & there[None, :],
            mask_at, m_query, m_key, bias_at, b_query, b_key, scaling, softcap,
            masked, is_causal, has_mask, has_bias, has_cap,
        )  # fmt: skip
        weights = tl.where(seen, tl.exp(logits - normaliser[:, None]), 0.0)
        total += tl.sum(weights, axis=0).to(tl.float64)
    tl.store(received + place.to(tl.int64) * keys + column, total, mask=there)
