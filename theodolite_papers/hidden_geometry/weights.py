"""Trained weights as a positional part plus a diagonal plus noise: eq. (9) for every head (Figs. 4 and 26 to 29).

W = W_q W_kᵀ · scaling = V L Vᵀ + D + noise, V the right singular vectors of the positional basis P, and D diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from scipy.linalg import hadamard
from torch import Tensor

from theodolite import OpenModel, Run
from theodolite.errors import UsageError, WorkError
from theodolite.estimates import Estimate, Floats
from theodolite.judging import HOLDS, judge, unless_explained
from theodolite.models.weights.head_weights import EXACT, no_head_matrix
from theodolite.report.data import evenly, head_grid, need, need_column
from theodolite.system.wording import head_name, number, percent
from theodolite.theory import qk_moments
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_name, declared, haar_rotation, share_of_heads
from theodolite_papers.hidden_geometry.layer_columns import Basis, bases_by_group
from theodolite_papers.rank_correlation import error_under_independence, rank_correlation_of_heads

CORNERS = (5, 10, 20, 40, 60)  # sizes K of the corner; the paper sees K ≈ 20 in its figure 4
SHOWN = 60  # side of the maps: `top_num` of the published code, the axes of figures 4 and 26–29
_SEED = 0  # of the random rotations: every layer and every run is compared with the same ones


class RotatedEnergy(NamedTuple):
    """The shares of the energy Σ entries² of W_rot = Vᵀ(W − D)V by place, for each head; float64.

    threshold: τ = √(2 ln d²) · std of W_rot's entries (the published code rounds the deviation to three decimals).
    surviving, surviving_energy: how many entries exceed τ, and their share of the energy. corner_surviving: share of
    theirs in the K × K corner, NaN where none survives. corner_energy: of all energy, without threshold.
    """

    threshold: Float64[Tensor, "*stack"]
    surviving: Float64[Tensor, "*stack"]
    surviving_energy: Float64[Tensor, "*stack"]
    corner_surviving: Float64[Tensor, "*stack corners"]
    corner_energy: Float64[Tensor, "*stack corners"]


@dataclass(frozen=True)
class Decoupling:
    """Eq. (9) of Song & Zhong 2024 for the heads of one layer, against random rotations.

    diagonal: share of ‖W‖_F² in D = diag(W). diagonal_random: the same expected in a Haar-random basis,
    ((tr W)² + ‖W‖_F² + tr W²)/((d + 2)‖W‖_F²). aligned: with V as given, (heads, …). random: with random rotations in
    its place, (rotations, heads, …). rotated_map, diagonal_map: |W_rot| above the threshold, and |D|: figure 4, blue
    and red.
    """

    diagonal: Float64[Tensor, " heads"]
    diagonal_random: Float64[Tensor, " heads"]
    aligned: RotatedEnergy
    random: RotatedEnergy
    rotated_map: Float64[Tensor, "heads shown shown"]
    diagonal_map: Float64[Tensor, "heads shown"]


def decouple(
    w_q: Tensor, w_k: Tensor, v: Tensor, scaling: float, corners: Sequence[int] = CORNERS, rotations: int = 5
) -> Decoupling:
    """Compute every head's energy in D and in the corner of V, against Haar-random rotations (Song & Zhong 2024, 5.1).

    A random corner holds K²/d² of the energy. `corner_energy` is the number to compare: few entries survive at random.

    w_q, w_k: factors of W, (H, d, d_h). v: orthogonal (d, d), the right singular vectors of P; `UsageError` if not.
    scaling: of the logit. corners: K. rotations: how many random bases.
    """
    w_q, w_k, v = w_q.double(), w_k.double(), v.to(w_q.device).double()
    if not torch.allclose(v.mT @ v, torch.eye(len(v), dtype=v.dtype, device=v.device), rtol=0.0, atol=1e-4):
        raise UsageError("v is not orthogonal: give all right singular vectors as columns")
    heads, width = w_q.shape[:2]
    moments = qk_moments(w_q, w_k)
    w_q = w_q * scaling
    diagonal = (w_q * w_k).sum(-1)

    shown = min(SHOWN, width)
    rotated_map = w_q.new_empty(heads, shown, shown)
    aligned = []
    for head in range(heads):
        rotated = _rotate(w_q[head], w_k[head], diagonal[head], v)
        energy = _energy(rotated, corners)
        aligned.append(energy)
        corner = rotated[:shown, :shown].abs()
        rotated_map[head] = torch.where(corner > energy.threshold, corner, 0.0)

    generator = torch.Generator().manual_seed(_SEED)
    random = []
    for _ in range(rotations):
        basis = haar_rotation(width, generator, w_q.device)
        energies = [_energy(_rotate(w_q[h], w_k[h], diagonal[h], basis), corners) for h in range(heads)]
        random.append(_stack(energies))
    expected = moments.trace.square() + moments.frobenius_squared + moments.trace_of_square
    return Decoupling(
        diagonal=diagonal.square().sum(-1) / (moments.frobenius_squared * scaling**2),
        diagonal_random=expected / ((width + 2) * moments.frobenius_squared),
        aligned=_stack(aligned),
        random=_stack(random),
        rotated_map=rotated_map,
        diagonal_map=diagonal[:, :shown].abs(),
    )


def corner_energy(
    w_q: Float64[Tensor, "heads width d_h"],
    w_k: Float64[Tensor, "heads width d_h"],
    v: Float64[Tensor, "*bases width corner"],
) -> Float64[Tensor, "*bases heads"]:
    """Compute the energy share of W − D in the corner of other bases, as `RotatedEnergy.corner_energy`."""
    diagonal = (w_q * w_k).sum(-1)
    corner = _rotate(w_q, w_k, diagonal, v[..., None, :, :])
    whole = qk_moments(w_q, w_k).frobenius_squared - diagonal.square().sum(-1)
    return corner.square().sum((-2, -1)) / whole


def _rotate(w_q: Tensor, w_k: Tensor, diagonal: Tensor, v: Tensor) -> Tensor:
    """Compute Vᵀ(W − D)V, without W."""
    rotated = (v.mT @ w_q) @ (v.mT @ w_k).mT
    return rotated.sub_(v.mT @ (diagonal[..., None] * v))


def _energy(rotated: Tensor, corners: Sequence[int]) -> RotatedEnergy:
    threshold = math.sqrt(2 * math.log(rotated.numel())) * rotated.std(correction=0)
    squares = rotated.square()
    survivors = torch.where(rotated.abs() > threshold, squares, 0.0)
    energy, surviving = squares.sum(), survivors.sum()
    return RotatedEnergy(
        threshold=threshold,
        surviving=survivors.count_nonzero().double(),
        surviving_energy=surviving / energy,
        corner_surviving=torch.stack([survivors[:k, :k].sum() for k in corners]) / surviving,
        corner_energy=torch.stack([squares[:k, :k].sum() for k in corners]) / energy,
    )


def _stack(parts: Sequence[RotatedEnergy]) -> RotatedEnergy:
    return RotatedEnergy(*map(torch.stack, zip(*parts, strict=True)))


MOSTLY = 0.8  # “for more than 80 % positions t” (section 4.2)

LOCALITY = {"previous_token": "attention to the previous token", "entropy": "entropy of attention"}
"""How local a head's attention is on the text: high, and low."""


def _correlations(run: Run, shares: Floats) -> pd.DataFrame:
    rows, layers = [], run.heads["layer"].to_numpy()
    for measure in (*LOCALITY, "layer"):
        other = need_column(run.heads, measure)
        count = int(np.isfinite([shares, other]).all(axis=0).sum())
        rows.append((measure, rank_correlation_of_heads(shares, other, layers).value, count))
    return pd.DataFrame(rows, columns=["with", "rank_correlation", "heads"])


@declared("geometry/figure25")
def figure_25(study: Study, outcome: Outcome) -> None:
    run = study.run
    published = need_column(run.heads, "argmax_property")
    share = percent(float((published > MOSTLY).mean()))
    outcome.read(f"heads above {percent(MOSTLY)} of the positions", share, "GPT-2: more than 43 %")
    correlations = _correlations(run, published)
    for measure, correlation, _ in correlations.itertuples(index=False):
        if label := LOCALITY.get(measure):
            outcome.read(f"rank correlation with {label}", number(correlation))
    has_it = (published[np.isfinite(published)] > MOSTLY).tolist()
    outcome.judge("many", has_it, heads=len(published), most=MOSTLY)
    of_published = correlations.set_index("with")
    for claim in ("layer", "previous_token"):
        correlation, count = of_published.loc[claim, ["rank_correlation", "heads"]]
        if claim == "layer" and not any(has_it):
            outcome.cannot_judge(claim, f"no head has it at more than {percent(MOSTLY)} of the positions")
        elif math.isnan(correlation):
            why = f"{count:g} heads with both, or no difference between them"
            outcome.cannot_judge(claim, f"{outcome.sentence(claim, 'what')}: {why}")
        else:
            # Heads of one layer may be alike: the error is that of a correlation over as many layers.
            layers = run.heads["layer"].nunique()
            error = error_under_independence(layers) if layers > 1 else math.nan
            known = Estimate(float(correlation), error, layers, "layers", by_chance=True)
            outcome.judge(claim, known)
    outcome.tables["heads"] = run.heads.filter(["layer", "head", "argmax_property", *LOCALITY])
    outcome.tables["correlations"] = correlations
    if (grid := head_grid(run, "argmax_property")) is not None:
        outcome.draw("argmax-property", drawing.head_values(grid, "share of positions"))
    other, layers, heads = (need_column(run.heads, name) for name in ("previous_token", "layer", "head"))
    titles = "argmax property", "attention to the previous token"
    outcome.draw("locality", drawing.head_scatter(published, other, layers, heads, titles))


CORNER = 20  # K of the verdicts and of the map: the paper sees the large values within K ≈ 20
SHOWN_HEADS, SHOWN_LAYERS = 12, 13  # evenly chosen where there are more: all of GPT-2 small's
TIMES, DEVIATIONS = 2.0, 2.0  # over a part's share in random bases, and of their sd: it is present (ours)
LEAST_SURVIVING = 10  # entries above the threshold that make a pattern (ours); noise has none or one


@dataclass(frozen=True)
class _Layer:
    """The heads of one block: eq. (9), and whether the weights are those of the logits themselves."""

    block: int
    split: Decoupling
    projection: str
    noise: Float64[Tensor, "draws heads"]
    """Corner energy of the verdicts' K in bases of sampling noise alone; no draws where the text is not at hand."""


def corner_of(width: int) -> int:
    """Return K of the verdicts: 20, or the largest of `CORNERS` within a quarter of a narrow stream."""
    within = [k for k in CORNERS if 4 * k <= width]
    return min(within or CORNERS[:1], key=lambda k: abs(k - CORNER))


def noise_of(p: Basis) -> Float64[Tensor, "draws positions width"]:
    """Estimate what sampling alone puts into a positional basis: means of eight groups, half of them with a minus."""
    signs = torch.from_numpy(hadamard(len(p))[1:]).double()
    return torch.tensordot(signs, p, dims=1) / len(p)


def _split(
    model: OpenModel, basis: Tensor, text: list[Basis] | None, corner: int
) -> tuple[list[_Layer], list[int]]:
    """Split every block that has weights, and list the others. `basis`: (L + 1, T − 1, d), without position 0."""
    layers, without = [], []
    for block in range(model.layers):
        try:
            weights = model.head_weights(block)
        except WorkError:
            without.append(block)
            continue
        # What block ℓ reads is residual layer ℓ; the paper takes its raw P and the raw W, without the norm between.
        directions = torch.linalg.svd(basis[block].double(), full_matrices=True).Vh.mT
        w_q, w_k = weights.w_q.to(model.device), weights.w_k.to(model.device)
        split = decouple(w_q, w_k, directions.to(model.device), weights.scaling)
        noise = basis.new_empty(0, *basis.shape[1:]).double() if text is None else noise_of(text[block])
        short = noise.shape[1] < corner  # fewer positions: completed, as V is
        drawn = torch.linalg.svd(noise, full_matrices=short).Vh[..., :corner, :].mT.to(model.device)
        chance = corner_energy(w_q.double(), w_k.double(), drawn)
        layers.append(_Layer(block, split, weights.projection, chance.cpu()))
    return layers, without


def _table(layers: list[_Layer], corner: int) -> pd.DataFrame:
    """Tabulate the heads; `_random` and `_random_sd` are over random rotations in place of V, `_noise` over noise."""
    parts = []
    for layer in layers:
        split, aligned, random = layer.split, layer.split.aligned, layer.split.random
        columns = {
            "threshold": aligned.threshold,
            "surviving": aligned.surviving.long(),
            "surviving_random": random.surviving.mean(0),
            "surviving_energy": aligned.surviving_energy,
            "diagonal": split.diagonal,
            "diagonal_random": split.diagonal_random,
        }
        if len(layer.noise):
            columns[f"corner_energy_{corner}_noise"] = layer.noise.mean(0)
            columns[f"corner_energy_{corner}_noise_sd"] = layer.noise.std(0)
        for place, k in enumerate(CORNERS):
            at_random = random.corner_energy[..., place]
            columns[f"corner_surviving_{k}"] = aligned.corner_surviving[:, place]
            columns[f"corner_energy_{k}"] = aligned.corner_energy[:, place]
            columns[f"corner_energy_{k}_random"] = at_random.mean(0)
            columns[f"corner_energy_{k}_random_sd"] = at_random.std(0)
        heads = {"layer": layer.block, "head": range(len(split.diagonal)), "weights_of": layer.projection}
        parts.append(pd.DataFrame(heads | {name: values.cpu().numpy() for name, values in columns.items()}))
    table = pd.concat(parts, ignore_index=True)
    corner_energy, random = table[f"corner_energy_{corner}"], table[f"corner_energy_{corner}_random"]
    table["corner_ratio"] = corner_energy / random
    table["corner_z"] = (corner_energy - random) / table[f"corner_energy_{corner}_random_sd"]
    table["diagonal_ratio"] = table["diagonal"] / table["diagonal_random"]
    return table


def _judge(outcome: Outcome, table: pd.DataFrame, corner: int, shortened: str) -> None:
    low_rank = (table["corner_ratio"] >= TIMES) & (table["corner_z"] >= DEVIATIONS)
    # Where hardly anything survives, where it lies is chance.
    concentrated = (table[f"corner_surviving_{corner}"] >= 0.5) & (table["surviving"] >= LEAST_SURVIVING)
    median = table.median(numeric_only=True)
    words: dict[str, Any] = {"heads": f"{len(table)} heads{shortened}", "corner": corner, "times": TIMES}
    words |= {"deviations": DEVIATIONS, "entries": LEAST_SURVIVING, "ratio": number(median["corner_ratio"])}
    words |= {"diagonal": percent(median["diagonal"]), "random": percent(median["diagonal_random"])}
    words["energy"] = percent(median[f"corner_energy_{corner}"])
    aligned = outcome.verdict("low-rank", low_rank.tolist(), **words)
    noise = _noise_explains(outcome, table, corner, low_rank)
    outcome.verdicts.append(unless_explained(aligned, HOLDS, noise))
    outcome.judge("diagonal", (table["diagonal_ratio"] >= TIMES).tolist(), **words)
    outcome.judge("concentrated", concentrated.tolist(), **words)


def _noise_explains(outcome: Outcome, table: pd.DataFrame, corner: int, low_rank: pd.Series) -> str:
    """Explain what else the corner of a majority of heads may come from; empty: nothing."""
    energy, noise = (f"corner_energy_{corner}{of}" for of in ("", "_noise"))
    if noise not in table:
        return "whether sampling noise alone would do so is told by the text, which is not at hand"
    beyond = low_rank & (table[energy] > table[noise] + DEVIATIONS * table[f"{noise}_sd"])
    criterion = outcome.criterion("low-rank")
    if judge("", "", share_of_heads(beyond.tolist(), criterion), criterion).answer == HOLDS:
        return ""
    return f"in {int(beyond.sum())} of them more than in bases of the text's sampling noise alone, by {DEVIATIONS:g} sd"


def _draw_maps(outcome: Outcome, layers: list[_Layer]) -> None:
    heads = evenly(len(layers[0].split.diagonal), SHOWN_HEADS)
    chosen = [layers[place] for place in evenly(len(layers), SHOWN_LAYERS)]
    side = chosen[0].split.diagonal_map.shape[1]

    def draw(place: int) -> go.Figure:
        maps = chosen[place].split.rotated_map, chosen[place].split.diagonal_map
        tiles = drawing.weight_tiles(*(each[heads].cpu().numpy() for each in maps))
        return drawing.weight_maps(tiles, [f"head {head}" for head in heads], side)

    blocks = [f"block {layer.block}" for layer in chosen]
    outcome.draw("weights", by_name("layer", blocks, draw, start=len(chosen) // 2), side=side)


def _read(outcome: Outcome, table: pd.DataFrame, corner: int) -> None:
    median = table.median(numeric_only=True)
    what = f"off-diagonal energy in the K × K corner, K = {', '.join(map(str, CORNERS))}, median over heads"
    for quantity, of in ((what, ""), ("the same in random bases", "_random")):
        outcome.read(quantity, ", ".join(percent(median[f"corner_energy_{k}{of}"]) for k in CORNERS))
    surviving = f"{number(median['surviving'])} ({number(median['surviving_random'])})"
    outcome.read("entries above the threshold, median over heads (in random bases)", surviving)
    what = f"share of their energy in the {corner} × {corner} corner, median over heads"
    paper = f"“concentrated in the top left (K ≈ {CORNER})”"
    outcome.read(what, percent(median[f"corner_surviving_{corner}"]), paper)
    best = table.loc[table["corner_ratio"].idxmax()]
    times = f"{number(float(best['corner_ratio']))} times"
    name = head_name(int(best["layer"]), int(best["head"]))
    outcome.read("head with the largest corner, over random", f"{name}: {times}")


@declared("geometry/figure4")
def figure_4(study: Study, outcome: Outcome) -> None:
    model = study.require_model()
    basis = torch.from_numpy(need(study.run, "positional_basis")[:, 1:])
    corner = corner_of(model.width)
    layers, without = _split(model, basis, bases_by_group(study), corner)
    if not layers:
        raise no_head_matrix(model.id)
    table = outcome.tables["heads"] = _table(layers, corner)
    _read(outcome, table, corner)
    named = sorted({layer.projection for layer in layers} - {EXACT})
    shortened = f" (weights as in: {', '.join(named)})" if named else ""
    shortened += f" (blocks {', '.join(map(str, without))} have no query-key matrix)" if without else ""
    _judge(outcome, table, corner, shortened)
    _draw_maps(outcome, layers)
    notes = [[""] * model.heads for _ in range(model.layers)]
    over_corner, over_diagonal = np.full((2, model.layers, model.heads), np.nan)
    for row in table.to_dict("records"):
        head = row["layer"], row["head"]
        over_corner[head], over_diagonal[head] = row["corner_ratio"], row["diagonal_ratio"]
        notes[head[0]][head[1]] = (
            f"{percent(row[f'corner_energy_{corner}'])} of the off-diagonal energy, random "
            f"{percent(row[f'corner_energy_{corner}_random'])}<br>diagonal {percent(row['diagonal'])}, random "
            f"{percent(row['diagonal_random'])}<br>{row['surviving']} entries survive"
        )
    drawn = drawing.head_values(over_corner, "times random", decades=True, notes=notes)
    outcome.draw("corner", drawn, corner=corner)
    outcome.draw("diagonal", drawing.head_values(over_diagonal, "times random", decades=True, notes=notes))
