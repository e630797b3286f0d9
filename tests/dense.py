"""An independent survey: hidden states and attention matrices kept whole, every column by its definition.

It shares no code with theodolite: models run through `transformers`' own eager attention with everything kept, and
weights are read by parameter name. Slow, and meant to be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.fft import dctn
from screenot.ScreeNOT import adaptiveHardThresholding


@dataclass
class Dense:
    """Everything of a small model on a few contexts, float64."""

    hidden: np.ndarray  # (layers + 1, C, T, d), before any final norm
    attention: np.ndarray  # (L, C, H, T, T)
    inputs: np.ndarray  # (L, C, T, d): what the attention modules read


def run(model: Any, ids: torch.Tensor, attention_modules: list[Any], blocks: list[Any]) -> Dense:
    """Run `model` eagerly and keep everything; in float64, but for mixtures of experts, which torch has not."""
    if model.config.model_type != "gpt_oss":
        model = model.double()
    model.set_attn_implementation("eager")
    inputs: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    hooks = [
        m.register_forward_pre_hook(
            lambda _, a, k: inputs.append(k["hidden_states"] if "hidden_states" in k else a[0]),
            with_kwargs=True,
        )
        for m in attention_modules
    ]
    hooks.append(
        blocks[0].register_forward_pre_hook(
            lambda _, a, k: hidden.append(k["hidden_states"] if "hidden_states" in k else a[0]),
            with_kwargs=True,
        )
    )
    hooks += [
        b.register_forward_hook(lambda _, a, o: hidden.append(o[0] if isinstance(o, tuple) else o))
        for b in blocks
    ]
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    return Dense(
        np.stack([h.double().numpy() for h in hidden]),
        np.stack([a.double().numpy() for a in attentions]),
        np.stack([x.double().numpy() for x in inputs]),
    )


def layer_columns(dense: Dense, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The layers table."""
    rows: list[dict[str, float]] = []
    for layer, h in enumerate(dense.hidden):
        x = h[:, 1:]
        contexts, _, width = x.shape
        mean = x.mean((0, 1))
        pos, ctx = x.mean(0) - mean, x.mean(1) - mean
        everything = (x - mean).reshape(-1, width)
        tiled = np.tile(pos, (contexts, 1))
        unit_pos = pos / np.linalg.norm(pos, axis=1, keepdims=True)
        unit_ctx = ctx / np.linalg.norm(ctx, axis=1, keepdims=True)
        energy = dctn(unit_pos @ unit_pos.T, type=2, norm="ortho") ** 2
        raw = dctn(pos @ pos.T, type=2, norm="ortho") ** 2
        k = min(20, (min(pos.shape) - 2) // 2)
        _, _, rank = adaptiveHardThresholding(pos, k, strategy="i")
        cross = np.abs(unit_pos @ unit_ctx.T)
        same, other = [], []
        for a in range(contexts):
            for b in range(a):
                (same if labels[a] == labels[b] else other).append(abs(unit_ctx[a] @ unit_ctx[b]))
        token_norm = np.linalg.norm(x, axis=-1)
        centred = x - x.mean(1, keepdims=True)
        row = {
            "rank": rank,
            "stable_rank": np.linalg.norm(pos) ** 2 / np.linalg.norm(pos, 2) ** 2,
            "relative_norm": np.linalg.norm(tiled, 2) / np.linalg.norm(everything, 2),
            **{f"low_frequency_{c}": energy[:c, :c].sum() / energy.sum() for c in (1, 3, 5, 10)},
            **{f"pp_low_frequency_{c}": raw[:c, :c].sum() / raw.sum() for c in (1, 3, 5, 10)},
            "incoherence_mean": cross.mean(),
            "incoherence_max": cross.max(),
            "similarity_within": np.mean(same) if same else math.nan,
            "similarity_between": np.mean(other) if other else math.nan,
            "norm": token_norm.mean(),
            "norm_first": np.linalg.norm(h[:, 0], axis=-1).mean(),
            "rank_collapse": np.mean(
                [np.linalg.norm(c) / np.linalg.norm(t) for c, t in zip(centred, x, strict=True)]
            ),
            "cosine_previous": math.nan,
        }
        if layer:
            before = dense.hidden[layer - 1][:, 1:]
            product = (before * x).sum(-1) / (np.linalg.norm(before, axis=-1) * token_norm)
            row["cosine_previous"] = product.mean()
        # LLM.int8() for outlier dimensions; Sun et al. 2024 for massive activations.
        massive = np.array([np.abs(c) > max(100, 1000 * np.median(np.abs(c))) for c in h])
        row["massive_activations"] = massive[:, 1:].sum()
        row["massive_activations_first"] = massive[:, 0].sum()
        row["outlier_dimensions"] = ((np.abs(x) >= 6).mean((0, 1)) >= 0.06).sum()
        rows.append(row)
    return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


def outlier_table(dense: Dense) -> dict[str, np.ndarray]:
    """The outliers table, dimension by dimension: LLM.int8() and Sun et al. 2024, as above."""
    rows = []
    for layer, h in enumerate(dense.hidden):
        massive = np.array([np.abs(c) > max(100, 1000 * np.median(np.abs(c))) for c in h])
        for dimension in range(h.shape[2]):
            own, of_dimension = massive[:, :, dimension], np.abs(h[:, :, dimension])
            share = (of_dimension[:, 1:] >= 6).mean()
            if share >= 0.06 or own.any():
                sizes = (share, of_dimension[:, 1:].max(), of_dimension[:, 0].max())
                contexts = sum(bool(context[1:].any()) for context in own)
                rows.append((layer, dimension, *sizes, own[:, 1:].sum(), own[:, 0].sum(), contexts))
    names = ("layer", "dimension", "share", "maximum", "maximum_first")
    names += ("massive", "massive_first", "massive_contexts")
    return dict(zip(names, np.array(rows, dtype=float).reshape(-1, len(names)).T, strict=True))


def head_columns(dense: Dense, ids: np.ndarray, causal: bool) -> dict[str, np.ndarray]:
    """The measured part of the heads table, (L · H) values a column."""
    layers, contexts, heads, length, _ = dense.attention.shape
    names = ("entropy", "sink_first", "sink_later", "sink_learned", "previous_token", "same_token")
    columns = {name: np.zeros((layers, heads)) for name in (*names, "entropy_se", "previous_token_se")}
    least = min(16, length / 4)
    for layer in range(layers):
        for head in range(heads):
            entropy, first, later, learned, previous, same = [], [], [], [], [], []
            for context in range(contexts):
                p = dense.attention[layer, context, head]
                rest = np.clip(1 - p.sum(1), 0, None)  # what a learned sink column took
                full = np.concatenate([p, rest[:, None]], axis=1)
                entropy.append(-(full * np.log(np.where(full > 1e-15, full, 1))).sum(1).mean())
                learned.append(rest.mean())
                seen = p > 0
                received = p.sum(0) / np.maximum(seen.sum(0), 1)
                eligible = seen.sum(0) - 1 >= least
                sinks = np.flatnonzero((received > 0.3) & eligible)
                first.append(0 in sinks)
                later.append(any(s > 0 for s in sinks))
                previous += [p[i, i - 1] for i in range(1, length)]
                for i in range(length):
                    equal = [j for j in range(i) if ids[context, j] == ids[context, i]]
                    if equal:
                        same.append(sum(p[i, j] for j in equal))
            values = (entropy, first, later, learned, previous, same)
            for name, value in zip(names, values, strict=True):
                columns[name][layer, head] = np.mean(value) if value else math.nan
            of_context = np.mean(np.reshape(previous, (contexts, -1)), axis=1)
            for name, value in (("entropy", entropy), ("previous_token", of_context)):
                columns[name + "_se"][layer, head] = np.std(value, ddof=1) / math.sqrt(contexts)
    return {name: value.reshape(-1) for name, value in columns.items()}


def head_arrays(dense: Dense) -> dict[str, np.ndarray]:
    """Arrays by position, (L, H, T)."""
    p = dense.attention
    full = np.concatenate([p, np.clip(1 - p.sum(-1, keepdims=True), 0, None)], axis=-1)
    seen = (p > 0).sum(-2)
    received = p.sum(-2) / np.maximum(seen, 1)
    sinks = (received > 0.3) & (seen - 1 >= min(16, p.shape[-1] / 4))
    return {
        "entropy_by_position": -(full * np.log(np.where(full > 1e-15, full, 1))).sum(-1).mean(1),
        "received_by_position": received.mean(1),
        "sink_by_position": sinks.mean(1),
    }


def propagation(logits: np.ndarray) -> np.ndarray:
    """Empirical ρ of Bao et al. 2024 by its definition: last query's logits (C, T) → (T,)."""
    length = logits.shape[1]
    value = logits / length - logits.mean(1, keepdims=True) / length + 1 / length
    return ((value >= 0) & (value <= 1)).mean(0)
