"""A plausible run that no model made: smooth spirals, clustered contexts, heads of all kinds; repeatable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from theodolite.accumulate.outliers import MASSIVE_COUNTS
from theodolite.measure.head_roles import ROLES
from theodolite.passes.run import SCHEMA_VERSION, Run

HOSTILE = ["<script>alert(1)</script>", "</script>", "<!--", "\"quoted\" & 'single'", "%{x}<b>bold</b>"]
HOSTILE += ["\u202eevil", "zero\u200bwidth", "line\nend", "\x00\x1b[31m", "\u2028", "שלום"]
WORDS = [" the", ".", " of", "\n", " theodolite", " measures", ",", " angles", " a", " and"]
CUTOFFS = (1, 3, 5, 10)
PARTS = ("mean", "pos", "ctx", "resid", "bias")
GROUPS = ("position", "context", "cross", "constant", "pos-pos", "cvec-cvec", "additive")
REGIMES = ["uniform", "late-site", "early-site", "middle-site", "vanishing", "undefined"]


def make_run(*, blocks=3, heads=4, length=24, width=32, head_width=6, contexts=16, seed=0):
    """A survey of a model of these sizes on few contexts: no standard errors, no constituents."""
    generator = np.random.default_rng(seed)
    layers = blocks + 1
    arrays = _geometry_arrays(generator, layers, length, width, contexts)
    arrays |= _head_arrays(generator, blocks, heads, length, head_width)
    return Run(
        layers=_layers(layers),
        heads=_heads(generator, blocks, heads, length),
        sinks=_sinks(),
        outliers=_outliers(layers),
        examples=_examples(generator, length),
        arrays={name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()},
        provenance=_provenance(blocks, heads, length, width, head_width, contexts),
    )


def make_survey(*, blocks: int = 3, heads: int = 4, seed: int = 0, **sizes: int) -> Run:
    """A whole survey: `make_run` with standard errors, clusters, constituents and attribution."""
    run = make_run(blocks=blocks, heads=heads, seed=seed, **sizes)
    parts = _constituents(np.random.default_rng(seed + 1), blocks * heads, heads)
    scores = dict.fromkeys(("previous_token_se", "same_token_se", "induction_se"), 0.01)
    run = replace(
        run,
        layers=_with_errors(_with_clusters(run.layers)),
        massive=_massive(),
        heads=_with_positional(run.heads.assign(**_coarse_shares(parts), **scores), seed),
        outliers=run.outliers.assign(massive_se=0.1, massive_first_se=0.1),
        constituents=parts,
        attribution=_attribution(blocks, heads),
    )
    return with_groups(run)


def _massive() -> pd.DataFrame:
    """A token with a hostile text that is massive in layers 1 and 2, and a smaller one in layer 2."""
    rows = [(1, 4, 3, HOSTILE[0], 7, -900.0), (2, 4, 3, HOSTILE[0], 7, 800.0), (2, 5, 1, " =", 7, 300.0)]
    return pd.DataFrame(rows, columns=["layer", "context", "position", "token", "dimension", "value"])


def with_groups(run: Run, **errors: float) -> Run:
    """With what its numbers are without each of eight groups, where these do not differ; or have such errors.

    `errors`: by column.
    """
    measured = {"layers": ("rank", "relative_norm", "pp_low_frequency_10", "similarity_within")}
    measured |= {
        "heads": [role.column for role in ROLES if role.column in run.heads] + ["entropy", "propagation"]
    }
    measured |= {"sinks": ("share",), "outliers": ("massive", "massive_first")}
    arrays = {
        f"{table}.{name}.without": without_groups(getattr(run, table)[name], errors.get(name, 0.0))
        for table, names in measured.items()
        for name in names
    }
    typical = (
        1 + 9 * run.arrays["outlier_share"] + 0.01 * torch.arange(run.arrays["outlier_share"].shape[1]).cos()
    )
    return replace(
        run,
        arrays=run.arrays
        | arrays
        | {
            "typical_magnitude": typical,
            "typical_magnitude.without": typical.expand(8, -1, -1).contiguous(),
            "positional_directions.without": leading_in_groups(run.arrays["positional_basis"]),
        },
    )


def without_groups(values, error: float = 0.0) -> torch.Tensor:
    """Numbers (8, rows) without each of eight groups, of which the jackknife makes this error."""
    values = torch.tensor(np.asarray(values, dtype=np.float64))
    signs = torch.tensor([1.0, -1] * 4, dtype=torch.float64)
    return values + signs[:, None] * error / 7**0.5


def leading_in_groups(basis: torch.Tensor) -> torch.Tensor:
    """Leading directions of a positional basis, the same without each of eight groups of contexts."""
    directions = torch.linalg.svd(basis[:, 1:].double(), full_matrices=False).Vh[None, :, :20]
    return directions.expand(8, -1, -1, -1).half()


def weights_only(run: Run) -> Run:
    """What `theodolite spectra` would have kept of it: no text, no column or array that needs one."""
    textual = {"entropy", "entropy_bound", "propagation", "previous_token", "same_token", "induction"}
    kept = [
        name
        for name in run.heads.columns
        if name not in textual
        and not name.startswith(("sink_", "share_", "argmax_", "pwp_", "qk_"))
        and not name.endswith("_data")
    ]
    provenance = {
        key: value for key, value in run.provenance.items() if key not in ("corpus", "counts", "seed")
    }
    return Run(heads=run.heads[kept], arrays={"spectrum": run.arrays["spectrum"]}, provenance=provenance)


def _layers(layers: int) -> pd.DataFrame:
    depth = np.linspace(0, 1, layers)
    return pd.DataFrame(
        {
            "layer": range(layers),
            "rank": np.round(14 - 5 * depth).astype(int),
            "rank_screenot": np.round(16 - 5 * depth).astype(int),
            "stable_rank": 2 + 0.2 * np.sin(5 * depth),
            "relative_norm": 0.97 - 0.8 * depth**3,
            "relative_norm_floor": np.full(layers, 0.05),
            "position_energy": 0.5 - 0.4 * depth,
            "low_frequency_1": 0.4 + 0.05 * depth,
            "low_frequency_3": 0.9 + 0.05 * depth,
            "low_frequency_5": 0.96 + 0.02 * depth,
            "low_frequency_10": 0.98 + 0.015 * depth,
            **{f"pp_low_frequency_{cutoff}": 0.9 + 0.01 * cutoff - 0.05 * depth for cutoff in CUTOFFS},
            "incoherence_mean": 0.04 + 0.03 * depth,
            "incoherence_random": np.full(layers, 0.03),
            "similarity_within": 0.3 + 0.2 * depth,
            "similarity_between": 0.1 + 0.05 * depth,
            "similarity_random": 0.12 + 0.05 * depth,
            "norm": 4 * np.exp(3 * depth),
            "norm_first": 4 * np.exp(3 * depth) * np.where((depth > 0.2) & (depth < 0.95), 20, 1),
            "cosine_previous": np.concatenate([[np.nan], np.linspace(0.4, 0.95, layers - 1)]),
            "rank_collapse": 0.95 - 0.5 * depth,
            "massive_activations": np.zeros(layers, dtype=int),
            "massive_activations_first": np.where((depth > 0.2) & (depth < 0.95), 32, 0),
            "outlier_dimensions": np.round(4 * depth).astype(int),
        }
    )


def _with_clusters(layers: pd.DataFrame) -> pd.DataFrame:
    depth = np.linspace(0, 1, len(layers))
    return layers.assign(silhouette=0.1 + 0.3 * depth, cluster_ari=0.2 + 0.6 * depth)


def _with_errors(layers: pd.DataFrame) -> pd.DataFrame:
    """A twentieth of each value as its standard error, half a dimension for the rank, 0 for random baselines."""
    errors = {}
    for name in layers.columns.drop("layer"):
        errors[f"{name}_se"] = 0.0 * layers[name] if "random" in name else 0.05 * layers[name].abs()
    return layers.assign(**{**errors, "rank_se": 0.5})


def _constituents(generator: np.random.Generator, count: int, heads: int) -> pd.DataFrame:
    """25 shares a head and one of a bias that is not there; they sum to 1, some are negative."""
    rows = []
    for number in range(count):
        shares = generator.normal(0.02, 0.04, 25)
        shares[generator.choice([6, 8, 16, 18])] += 0.6  # among position and what is left
        shares += (1 - shares.sum()) / 25
        pairs = [(query, key) for query in PARTS for key in PARTS]
        place = (number // heads, number % heads)
        rows += [(*place, *pair, share, 0.01) for pair, share in zip(pairs, shares, strict=True)]
        rows.append((*place, "additive", "", 0.0, 0.0))
    return pd.DataFrame(rows, columns=["layer", "head", "query", "key", "share", "standard_error"])


def _coarse_shares(parts: pd.DataFrame) -> dict[str, np.ndarray[Any, Any]]:
    """The five sums of a head's shares, by the definitions of docs/run-folder.md."""
    cvec = ("ctx", "resid")
    names = []
    for query, key in zip(parts["query"], parts["key"], strict=True):
        if query == "additive":
            names.append("share_additive")
        elif {query, key} & {"mean", "bias"}:
            names.append("share_constant")
        elif query in cvec and key in cvec:
            names.append("share_context")
        else:
            names.append("share_position" if query == key else "share_cross")
    sums = parts.assign(name=names).pivot_table("share", ["layer", "head"], "name", "sum")
    return {name: sums[name].to_numpy() for name in sums.columns}


def _with_positional(heads: pd.DataFrame, seed: int) -> pd.DataFrame:
    generator = np.random.default_rng(seed + 2)
    added = {"argmax_property": generator.random(len(heads))}
    for name in ("pwp", "qk"):
        for cutoff in CUTOFFS:
            added[f"{name}_low_frequency_{cutoff}"] = 0.5 + 0.04 * cutoff + 0.1 * generator.random(len(heads))
    return heads.assign(**added)


def _attribution(blocks: int, heads: int) -> pd.DataFrame:
    """The last block's heads: previous by position alone, induction by nothing alone, same by two groups alike."""
    given = {
        "previous": (0.62, {"position": (0.60, 0.05)}),
        "induction": (0.41, {"context": (0.12, 0.15)}),
        "same": (0.33, {"context": (0.31, 0.30), "constant": (0.25, 0.32)}),
    }
    rows = []
    for pattern, (score, groups) in given.items():
        for head in range(min(heads, 3)):
            for group in GROUPS:
                only, without = groups.get(group, (0.03, score))
                worse = 1 - 0.3 * head
                share = 0.0 if group == "additive" else 0.2
                numbers = [worse * score, group, share, worse * only, worse * without, 0.02]
                rows.append((blocks - 1, head, pattern, *numbers))
    names = ["layer", "head", "pattern", "score", "group", "share", "only", "without", "uniform"]
    return pd.DataFrame(rows, columns=names)


def _heads(generator: np.random.Generator, blocks: int, heads: int, length: int) -> pd.DataFrame:
    count = blocks * heads
    layer, head = np.repeat(np.arange(blocks), heads), np.tile(np.arange(heads), blocks)
    limit = np.log(np.arange(1, length + 1)).mean()
    table: dict[str, Any] = {"layer": layer, "head": head, "spectrum_of": ["projection"] * count}
    for suffix, size in (("", 1.0), ("_data", 4.0)):
        trace = size * generator.normal(1, 3, count)
        square = size**2 * generator.normal(3, 2, count)
        table |= {
            f"trace{suffix}": trace,
            f"trace_of_square{suffix}": square,
            f"frobenius_squared{suffix}": size**2 * generator.lognormal(2, 0.5, count),
            f"mean{suffix}": trace / 32,
            f"variance{suffix}": square / 32 - (trace / 32) ** 2,
            f"xi{suffix}": np.where(square > 0, trace / np.sqrt(np.abs(square)), np.nan),
            f"eta{suffix}": np.where(square > 0, np.sqrt(np.abs(square)) / 8, np.nan),
            f"xi_symmetric{suffix}": trace / np.sqrt(np.abs(square) + 1),
            f"eta_symmetric{suffix}": np.sqrt(np.abs(square) + 1) / 8,
            f"r{suffix}": trace / 8,
            f"regime{suffix}": [REGIMES[int(i)] for i in generator.integers(0, 6, count)],
            f"regime_margin{suffix}": np.abs(trace) / 100,
        }
    first = generator.random(count) ** 3
    first[-1] = 0.97
    previous = 0.3 * generator.random(count)
    previous[min(1, count - 1)] = 0.81
    return pd.DataFrame(
        table
        | {
            "entropy": limit * (0.2 + 0.7 * generator.random(count)),
            "entropy_bound": 1e-3 * generator.random(count),
            "propagation": 0.3 + 0.6 * generator.random(count),
            "sink_first": first,
            "sink_later": 0.3 * generator.random(count) ** 2,
            "previous_token": previous,
            "same_token": 0.2 * generator.random(count),
            "induction": 0.5 * generator.random(count),
        }
    )


def _geometry_arrays(generator, layers, length, width, contexts):
    time = (np.arange(length) + 0.5) / length
    waves = np.stack([np.cos(np.pi * k * time) for k in range(1, 9)], axis=1)
    basis = np.stack(
        [
            waves @ (np.diag(1.0 / np.arange(1, 9) ** (1 + 0.1 * layer)) @ generator.normal(size=(8, width)))
            for layer in range(layers)
        ]
    )
    labels = np.arange(contexts) * 4 // contexts
    centres = generator.normal(size=(4, width))
    context = np.stack([centres[labels] + generator.normal(size=(contexts, width)) for _ in range(layers)])
    queries = min(120, 8 * contexts)
    pca = np.stack([waves[:, :3] / (1, 2, 4) * (1 + layer) for layer in range(layers)])
    singular = np.linalg.svd(basis, compute_uv=False)
    return {
        "mean": generator.normal(size=(layers, width)),
        "positional_basis": basis.astype(np.float32),
        "context_basis": context.astype(np.float32),
        "context_label": labels.astype(np.int64),
        "singular_values": singular + 1e-3,
        "positional_pca": pca.astype(np.float32),
        "cvec_pca": generator.normal(scale=0.1, size=(layers, queries, 3)).astype(np.float32),
        "outlier_share": (np.arange(width) % 11 == 3) * np.linspace(0, 1, layers)[:, None].astype(np.float32),
    }


def _head_arrays(generator, blocks, heads, length, head_width):
    shape = (blocks, heads, length)
    limit = np.log(np.arange(1, length + 1))
    half = generator.normal(size=(blocks, heads, head_width // 2, 2)) + np.array([0.7, 0])
    spectrum = np.concatenate([half, half * (1, -1)], axis=2)
    sinks = 0.05 * generator.random(shape) ** 8
    sinks[:, :, 0] = generator.random((blocks, heads))
    theta = np.arange(1, length + 1) / length
    centre = generator.random((blocks, heads, 1))
    predicted = np.exp(-((theta - centre) ** 2) / 0.1)
    return {
        "entropy_by_position": limit * (0.3 + 0.6 * generator.random((blocks, heads, 1))),
        "propagation_by_position": np.clip(predicted + 0.1 * generator.normal(size=shape), 0, 1),
        "propagation_predicted": 0.8 * predicted,
        "propagation_predicted_data": 0.9 * predicted,
        "spectrum": spectrum,
        "spectrum_data": spectrum * 4 + (1, 0),
        "sink_by_position": sinks,
        "visible_keys": np.tile(np.arange(1.0, length + 1), (blocks, 1)),
    }


def _sinks() -> pd.DataFrame:
    rows = [(2, 1, 5, WORDS[0], True, 14, 0.9, 0.0), (1, 0, 6, ".", False, 6, 0.4, 9.5)]
    rows += [(2, 0, 7, ".", False, 3, 0.2, 12.0)]
    rows += [(1, 1, 100 + i, text, False, 1, 0.1, 4.0) for i, text in enumerate(HOSTILE)]
    names = ["layer", "head", "token_id", "token", "first", "contexts", "share", "position"]
    return pd.DataFrame(rows, columns=names)


def _outliers(layers: int) -> pd.DataFrame:
    rows = [(layer, 3, 0.5 + 0.1 * layer, 8.0 + layer, 400.0, 0, 4, 0) for layer in range(1, layers)]
    names = ["layer", "dimension", "share", "maximum", "maximum_first", *MASSIVE_COUNTS]
    return pd.DataFrame(rows, columns=names)


def _examples(generator: np.random.Generator, length: int) -> pd.DataFrame:
    rows = []
    for context in range(2):
        for position in range(length):
            pool = HOSTILE if context else WORDS
            text = pool[int(generator.integers(len(pool)))] if position >= len(pool) else pool[position]
            received = 0.9 if position == 0 else round(float(0.5 * generator.random() ** 6), 4)
            rows.append((context, position, 3, text, received, 2, 1, received > 0.3))
    names = ["context", "position", "token_id", "token", "received", "layer", "head", "sink"]
    return pd.DataFrame(rows, columns=names)


def _provenance(blocks, heads, length, width, head_width, contexts):
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": {"theodolite": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"},
        "model": {
            "id": "synthetic/<img src=x onerror=alert(1)>",
            "revision": None,
            "sha256": "0" * 64,
            "architecture": "GPT2LMHeadModel",
            "family": "gpt2",
            "parameters": 124_439_808,
            "dtype": "float32",
            "layers": blocks,
            "heads": heads,
            "width": width,
            "head_width": head_width,
            "vocabulary": 50257,
            "causal": True,
            "positions": "learned",
        },
        "corpus": {
            "name": "python-docs",
            "sha256": "1" * 64,
            "contexts": contexts,
            "length": length,
            "labels": ["numbers", "<b>strings</b>", "</script>", "modules"],
            "seed": 0,
        },
        "counts": {"contexts": contexts, "tokens": contexts * length, "batches": 2},
        "seed": 0,
        "device": "cpu",
        "wall_seconds": 12.5,
    }
