"""Norms and cosines between layers on random tokens: do residual connections explain the geometry? (Fig. 8)"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.estimates import Estimate
from theodolite.models.hooks import Hooks, hooked
from theodolite.report import published
from theodolite.report.data import Floats
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number, with_error
from theodolite_papers.drawing import experiments as drawing
from theodolite_papers.experiment import Study, experiment
from theodolite_papers.hidden_geometry import criteria


class _Streams(Hooks):
    """The residual stream of one sequence by layer, position 0 left out, in float64."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Keep one layer."""
        self.layers.append(hidden[0, 1:].double().cpu())


def random_stream(model: OpenModel, length: int, seed: int) -> Tensor:
    """Hidden states of one sequence of random tokens at every layer: (N, T − 1, d), position 0 left out."""
    ids = Corpus.random_tokens(model.required_vocabulary(), length, 1, seed, below=model.vocabulary).contexts
    streams = _Streams()
    with hooked(model, streams):
        model.forward(ids)
    return torch.stack(streams.layers)


def norms_and_cosines(hidden: Tensor) -> tuple[Floats, Floats, Floats, Floats]:
    """Of (N, n, d): mean norm and its standard error over tokens (N), mean cosine and its error (N, N)."""
    norms = torch.linalg.vector_norm(hidden, dim=-1)
    unit = torch.nn.functional.normalize(hidden, dim=-1)
    root = math.sqrt(hidden.shape[1])
    cosines, errors = [], []
    for layer in unit:
        with_all = (unit * layer).sum(-1)
        cosines.append(with_all.mean(1))
        errors.append(with_all.std(1) / root)
    parts = norms.mean(1), norms.std(1) / root, torch.stack(cosines), torch.stack(errors)
    mean, error, cosine, cosine_error = (part.numpy() for part in parts)
    return mean, error, cosine, cosine_error


@experiment(
    "geometry/figure8",
    "Norms and cosines between layers on random tokens",
    "Norms grow more than 100-fold and layer 0 is nearly orthogonal to the others (appendix B.2, Fig. 8)",
    needs=("model", "layers.norm"),
)
def figure_8(study: Study, outcome: Outcome) -> None:
    run = study.run
    length = run.provenance["corpus"]["length"]
    hidden = random_stream(study.require_model(), length, run.provenance["seed"])
    norms, errors, cosines, cosine_errors = norms_and_cosines(hidden)
    ratios = norms / norms[0] if norms[0] > 0 else np.full_like(norms, np.nan)
    # The relative errors of a quotient add up at most.
    ratio_errors = ratios * (errors / norms + errors[0] / norms[0])
    last = len(norms) - 1
    printed = {1: published.NORM_RATIO_FIRST, last: published.NORM_RATIO_LAST}
    for layer, ratio in printed.items():
        shown = with_error(ratios[layer], ratio_errors[layer])
        outcome.read(f"norm of layer {layer} over layer 0", shown, f"GPT-2: {ratio:g}")
    others = cosines[0, 1:]
    outcome.read(
        "mean cosine of layer 0 with the others",
        f"{number(others.min())} to {number(others.max())}",
        "“close to 0”",
    )
    outcome.claim(
        "Embedding norms increase significantly across layers (appendix B.2, Fig. 8)",
        f"norm at layer {last} over layer 0, {length - 1} random tokens",
        Estimate(float(ratios[last]), float(ratio_errors[last]), length - 1, "tokens"),
        criteria.TENFOLD,
    )
    far = int(np.abs(others).argmax()) + 1
    outcome.claim(
        "The cosine between layer 0 and any other layer is close to 0 (appendix B.2, Fig. 8)",
        f"mean cosine with layer 0 that is largest in size, at layer {far}",
        Estimate(float(cosines[0, far]), float(cosine_errors[0, far]), length - 1, "tokens"),
        criteria.UNRELATED,
    )
    layers = range(len(norms))
    outcome.tables["norms"] = pd.DataFrame(
        {"layer": layers, "norm": norms, "norm_se": errors, "norm_ratio": ratios}
    )
    outcome.tables["cosines"] = pd.DataFrame(cosines, columns=[f"layer {layer}" for layer in layers])
    outcome.figure(
        "norms",
        "Mean norm at every layer",
        drawing.layer_norms(norms, errors, printed),
        "Mean norm of the vectors of one sequence of random tokens, position 0 left out; diamonds are this model's "
        "layer 0 times the ratios printed for GPT-2.",
        "a steep rise: each block's update outgrows its input.",
        f"{SONG}, Fig. 8, left",
    )
    outcome.figure(
        "cosines",
        "Cosine between layers",
        drawing.layer_cosines(cosines),
        "Mean cosine between a token's vectors at every two layers.",
        "a first row near 0: the residual connection does not carry the embedding along unchanged.",
        f"{SONG}, Fig. 8, right",
    )
