"""An independent survey: hidden states and attention matrices kept whole, every column by its definition.

It shares no code with theodolite: models run through `transformers`' own eager attention with everything kept, and
weights are read by parameter name. Slow, and meant to be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations
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


def _over_groups(table: np.ndarray, order: int) -> np.ndarray:
    """Average a table over all tuples of different groups, its first axes."""
    tuples = list(permutations(range(len(table)), order))
    return (
        np.mean([table[chosen] for chosen in tuples], axis=0)
        if tuples
        else np.full(table.shape[order:], np.nan)
    )


def _jackknifed(value: Any, *tables: tuple[np.ndarray, int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute a value of such averages with all groups, and with each left out of every table."""
    groups = len(tables[0][0])

    def without(table: np.ndarray, axes: int, group: int | None) -> np.ndarray:
        for axis in range(axes if group is not None else 0):
            table = np.delete(table, group, axis=axis)
        return table

    numbers = [
        np.asarray(value(*(_over_groups(without(table, axes, group), axes) for table, axes in tables)))
        for group in (None, *range(groups))
    ]
    return numbers[0], np.array(numbers[1:])


def _error(without: np.ndarray) -> np.ndarray:
    return without.std(axis=0) * math.sqrt(len(without) - 1)


def _corrected(value: np.ndarray, without: np.ndarray) -> np.ndarray:
    return len(without) * value - (len(without) - 1) * without.mean(axis=0)


def _root(value: Any) -> Any:
    return np.sign(value) * np.sqrt(np.abs(value))


def position_columns(x: np.ndarray, grid: tuple[int, int] | None = None) -> dict[str, float]:
    """Numbers of the positional basis of hidden states (C, T − 1, d), by products of different groups.

    With a grid of rows and columns, frequencies are of the plane, and all positions are neighbours.
    """
    contexts, _, width = x.shape
    group = np.arange(contexts) * 8 // contexts
    kinds = np.unique(group)
    p = np.stack([x[group == g].mean(0) for g in kinds])
    p -= p.mean(1, keepdims=True)
    everything = (x - x.mean((0, 1))).reshape(-1, width)
    inner = np.einsum("atd,btd->abt", p, p)
    energy, _ = _jackknifed(np.sum, (inner, 2))
    largest, _ = _largest_square(p)
    differences = (p[0 : len(p) - 1 : 2] - p[1::2]) / math.sqrt(2)
    pairs = len(differences) * (len(differences) - 1) / (len(p) * (len(p) - 1) or math.nan)
    noise = 2 * _largest_square(differences)[1] * math.sqrt(pairs)

    def moment(rows: np.ndarray) -> float:
        rows = rows.reshape(-1, width)
        return np.linalg.norm(rows - rows.mean(0), 2) ** 2 * x[..., 0].size / len(rows)

    moments = np.array([moment(x[group != g]) for g in kinds])
    row = {
        "stable_rank": energy / largest if largest > noise else math.nan,
        "relative_norm": float(_root(contexts * largest / _corrected(moment(x), moments))),
        "position_energy": contexts * energy / np.linalg.norm(everything) ** 2,
    }
    lengths, near = _lengths(inner, math.inf if grid else 1.25)
    scales = np.where(near[0] > 0, 1 / np.sqrt(np.maximum(lengths, 1e-300)), 0)
    for name, several in (("low_frequency", scales), ("pp_low_frequency", np.ones_like(scales))):
        row |= _frequencies(name, p, several, grid)
    return row


def _largest_square(p: np.ndarray) -> tuple[float, float]:
    """‖P‖₂², corrected by the jackknife, and its error."""
    length, width = p.shape[1:]
    grams = np.einsum("atd,bsd->abts", p, p) if length <= width else np.einsum("atd,bte->abde", p, p)

    def eigenvalue(gram: np.ndarray) -> float:
        finite = np.isfinite(gram).all()  # not of a single group
        return float(np.linalg.eigvalsh((gram + gram.T) / 2)[-1]) if finite else math.nan

    raw, without = _jackknifed(eigenvalue, (grams, 2))
    value = _corrected(raw, without)
    return float(value), math.hypot(_error(without), 0.25 * (raw - value))


def _lengths(inner: np.ndarray, farthest: float) -> tuple[np.ndarray, np.ndarray]:
    """‖pos_t‖² with all groups and without each, drawn towards neighbours; and the means of neighbours."""
    own, own_without = _jackknifed(lambda value: value, (inner, 2))
    error = _error(own_without)
    place = np.arange(1, len(own) + 1)
    near = [np.maximum(place / t, t / place) <= farthest for t in place]

    def drawn(value: np.ndarray) -> np.ndarray:
        mean = np.array([value[some].mean() for some in near])
        spread = max(((value - mean) ** 2 - error**2).mean(), 0)
        values = mean + spread / (spread + error**2) * (value - mean)
        return np.where(values > 0, values, mean)

    smooth = np.array([[value[some].mean() for some in near] for value in (own, *own_without)])
    every = np.array([drawn(value) for value in (own, *own_without)])
    return np.where(every > 0, every, smooth[0]), smooth


def _frequencies(
    name: str, p: np.ndarray, scales: np.ndarray, grid: tuple[int, int] | None
) -> dict[str, float]:
    rows = p * scales[:, None, :, None]
    return {f"{name}_{k}": share for k, share in shares_of_frequencies(rows, rows, grid).items()}


def shares_of_frequencies(
    left: np.ndarray, right: np.ndarray, grid: tuple[int, int] | None = None
) -> dict[int, float]:
    """Shares of the energy of A Bᵀ in its lowest frequencies; (G, T, d) of each group, or so for each use of groups."""
    groups, length = left.shape[-3:-1]
    left, right = (np.broadcast_to(side, (groups + 1, *side.shape[-3:])) for side in (left, right))
    sizes = grid or (length,)
    cutoffs = (1, 3, 5, 10)
    values = []
    for use in range(groups + 1):
        a, b = (np.delete(side[use], use - 1, axis=0) if use else side[use] for side in (left, right))
        products = np.einsum("atd,bsd->abts", a, b).reshape(len(a), len(a), *sizes, *sizes)
        spectra = dctn(products, type=2, norm="ortho", axes=range(2, products.ndim))
        energies = []
        for k in (length, *cutoffs):
            corner = spectra[(..., *[slice(k)] * (2 * len(sizes)))].reshape(len(a), len(a), -1)
            energies.append(_over_groups(np.einsum("abi,dci->abcd", corner, corner), 4))
        values.append(energies)
    whole, *corners = np.array(values).T
    above = whole[0] > 2 * _error(whole[1:])
    shares = [_corrected(corner[0] / whole[0], corner[1:] / whole[1:]) for corner in corners]
    return {k: float(share) if above else math.nan for k, share in zip(cutoffs, shares, strict=True)}


def context_columns(x: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Numbers of the context vectors of hidden states (C, T − 1, d), from disjoint halves of the positions."""
    contexts, length, width = x.shape
    half = np.arange(length) // max(1, min(16, length // 4)) % 2
    pos = x.mean(0)
    ctx = [(x[:, half == h] - pos[half == h]).mean(1) for h in (0, 1)]
    group = np.unique(np.arange(contexts) * 8 // contexts, return_inverse=True)[1]
    of_groups = [np.array([c[group == g].mean(0) for g in range(group.max() + 1)]) for c in ctx]
    common = -_over_groups(of_groups[0] @ of_groups[1].T, 2)
    lengths = [np.linalg.norm(c, axis=1) for c in ctx]
    cosine = (ctx[0] @ ctx[1].T + common) / np.outer(*lengths)
    row: dict[str, float] = {}
    kinds = {"random": lambda a, b: True}
    if len(np.unique(labels[labels >= 0])) > 1:
        kinds |= {
            "within": lambda a, b: labels[a] == labels[b] >= 0,
            "between": lambda a, b: labels[a] != labels[b] and min(labels[a], labels[b]) >= 0,
        }
    for where in ("within", "between"):
        row |= {f"similarity_{where}": math.nan, f"cosine_{where}": math.nan}
    own = np.diag(cosine)
    for where, chosen in kinds.items():
        pairs = [(a, b) for a in range(contexts) for b in range(a) if chosen(a, b)]
        squares = [(cosine[a, b] * cosine[b, a], own[a] * own[b]) for a, b in pairs]
        both = [(cosine[a, b] + cosine[b, a], own[a] + own[b]) for a, b in pairs]
        row[f"similarity_{where}"] = float(_root(_quotient(squares, pairs, group)))
        if where != "random":
            row[f"cosine_{where}"] = _quotient(both, pairs, group)
    covariance = np.cov(x.reshape(-1, width).T, ddof=0)
    row["incoherence_random"] = np.linalg.norm(covariance) / np.trace(covariance)
    return row


def _quotient(terms: list[tuple[float, float]], pairs: list[tuple[int, int]], group: np.ndarray) -> float:
    """Σ part / Σ whole over pairs of contexts; NaN where the mean whole is not above its noise."""
    part, whole = np.array(terms).T
    of_pairs = group[np.array(pairs)]
    without = [whole[(of_pairs != g).all(1)] for g in range(group.max() + 1)]
    known = all(map(len, without)) and whole.mean() > 2 * _error(np.array([w.mean() for w in without]))
    return part.sum() / whole.sum() if known else math.nan


def layer_columns(dense: Dense, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The layers table, but for clusters, incoherence and rank, which have tests of their own."""
    rows: list[dict[str, float]] = []
    for layer, h in enumerate(dense.hidden):
        x = h[:, 1:]
        pos = x.mean(0) - x.mean((0, 1))
        k = min(20, (min(pos.shape) - 2) // 2)
        token_norm = np.linalg.norm(x, axis=-1)
        centred = x - x.mean(1, keepdims=True)
        row = {
            "rank_screenot": adaptiveHardThresholding(pos, k, strategy="i")[2],
            **position_columns(x),
            **context_columns(x, labels),
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


def jackknife(parts, wholes) -> float:
    """Error of Σ parts / Σ wholes over contexts: each of eight groups of neighbours left out; NaN of fewer contexts."""
    contexts = len(parts)
    if contexts < 8:
        return math.nan
    group = np.arange(contexts) * 8 // contexts
    with np.errstate(invalid="ignore"):
        left = [np.sum(np.array(parts)[group != g]) / np.sum(np.array(wholes)[group != g]) for g in range(8)]
    return math.sqrt(7 / 8 * ((np.array(left) - np.mean(left)) ** 2).sum())


def head_columns(dense: Dense, ids: np.ndarray, causal: bool) -> dict[str, np.ndarray]:
    """The measured part of the heads table, (L · H) values a column."""
    layers, contexts, heads, length, _ = dense.attention.shape
    names = ("entropy", "sink_first", "sink_later", "sink_learned", "previous_token", "same_token")
    columns = {name: np.zeros((layers, heads)) for name in (*names, *(f"{name}_se" for name in names))}
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
                same.append([])
                for i in range(length):
                    equal = [j for j in range(i) if ids[context, j] == ids[context, i]]
                    if equal:
                        same[-1].append(sum(p[i, j] for j in equal))
            values = (entropy, first, later, learned, np.reshape(previous, (contexts, -1)).mean(1))
            sums = [(value, np.ones(contexts)) for value in values]
            sums.append(([sum(own) for own in same], [len(own) for own in same]))
            for name, (parts, wholes) in zip(names, sums, strict=True):
                columns[name][layer, head] = np.sum(parts) / np.sum(wholes) if np.sum(wholes) else math.nan
                columns[name + "_se"][layer, head] = jackknife(parts, wholes)
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
        "sink_by_position": sinks.mean(1),
    }


def propagation(logits: np.ndarray) -> np.ndarray:
    """Empirical ρ of Bao et al. 2024 by its definition: last query's logits (C, T) → (T,)."""
    length = logits.shape[1]
    value = logits / length - logits.mean(1, keepdims=True) / length + 1 / length
    return ((value >= 0) & (value <= 1)).mean(0)
