"""The QK matrix of the positional basis of every head, as for models trained on addition (Figs. 19 and 22).

Splits the model's logits with the run's mean and positional basis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite import Corpus, Run
from theodolite.errors import UsageError, WorkError
from theodolite.judging import Criterion, Verdict, judge, untestable
from theodolite.logits.constituents import whole_positional_basis
from theodolite.logits.shares import SPLIT_CONTEXTS, TOKENS_A_PASS, sample_of, working_dtype
from theodolite.measure.geometry import CUTOFFS
from theodolite.measure.positional import qk_low_frequency
from theodolite.models.query_key_parts import LayerPass, split_queries_and_keys, visit_layers
from theodolite.report.data import Floats, evenly
from theodolite.report.exhibit import by_name
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome
from theodolite.system.wording import counted, number
from theodolite.theory.decomposition import PARTS, decompose_around
from theodolite_papers.drawing import theory as maps
from theodolite_papers.experiment import Study, experiment
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.addition_check import of_an_adder
from theodolite_papers.hidden_geometry.layer_columns import share_of_heads

SHOWN_HEADS, SHOWN_LAYERS, SHOWN_POSITIONS = 12, 13, 64
"""Drawn, evenly chosen where there are more: all heads of GPT-2 small."""


class _PositionalLogits:
    """Mean over contexts of every layer's logits between pos + μ and pos + μ, and how smooth those of pos are.

    `logits`: layer → (H', n, n), shown heads and positions; `smooth`: layer → (H, cutoffs), summed over contexts.
    """

    def __init__(self, run: Run, heads: list[int], shown: list[int]) -> None:
        self.mean, self.pos = run.arrays["mean"], whole_positional_basis(run)
        self.end = run.arrays["positional_basis"].shape[1]
        self.heads, self.shown = heads, shown
        self.logits: dict[int, Floats] = {}
        self.smooth: dict[int, Floats] = {}
        self.refused: dict[int, str] = {}

    def add(self, layer_pass: LayerPass) -> None:
        """Add the contexts of a pass."""
        parts = decompose_around(layer_pass.stream, self.mean[layer_pass.layer], self.pos[layer_pass.layer])
        try:
            split = split_queries_and_keys(
                layer_pass, parts, working_dtype(layer_pass.stream), check_all=False
            )
        except WorkError as error:
            self.refused[layer_pass.layer] = str(error)
            return
        mean, pos = PARTS.index("mean"), PARTS.index("pos")
        repeat = split.query.shape[2] // split.key.shape[2]
        query = (split.query[mean] + split.query[pos])[:, self.heads][:, :, self.shown]
        key = (split.key[mean] + split.key[pos])[:, [head // repeat for head in self.heads]][:, :, self.shown]
        logits = torch.einsum("chid,chjd->hij", query, key) * split.inputs.scaling
        text = slice(1, self.end)
        smooth = qk_low_frequency(split.query[pos][:, :, text], split.key[pos][:, :, text]).sum(0)
        for sums, value in ((self.logits, logits), (self.smooth, smooth)):
            added = value.double().cpu().numpy()
            sums[layer_pass.layer] = sums[layer_pass.layer] + added if layer_pass.layer in sums else added


def _sampled(study: Study) -> Tensor:
    """A sample of the run's contexts; random ones of their length, where the text is not at hand."""
    seed = study.provenance["seed"]
    if study.corpus is not None:
        return study.corpus.contexts[sample_of(study.corpus, seed)]
    length = whole_positional_basis(study.run).shape[1]
    return Corpus.random_tokens(
        study.require_model().required_vocabulary(), length, SPLIT_CONTEXTS, seed
    ).contexts


@experiment(
    "geometry/figure19",
    "QK matrix of the positional basis of every head, as for models trained on addition",
    "Models trained on addition have discontinuous QK matrices (section 4.3, Figs. 5, 19 and 22)",
    needs=("model", "arrays.positional_basis", "arrays.mean"),
)
def figure_19(study: Study, outcome: Outcome) -> None:
    run, model = study.run, study.require_model()
    positions = run.arrays["positional_basis"].shape[1] - 1
    heads = evenly(model.heads, SHOWN_HEADS)
    shown = [1 + place for place in evenly(positions, SHOWN_POSITIONS)]
    sums = _PositionalLogits(run, heads, shown)
    sample = _sampled(study)
    for batch in sample.split(max(1, TOKENS_A_PASS // sample.shape[1])):
        visit_layers(model, batch, range(model.layers), sums.add)
    if not sums.logits:
        raise UsageError(f"no layer of this model can be split: {next(iter(sums.refused.values()))}")
    layers = sorted(sums.logits)
    rows: list[dict[str, Any]] = [
        {"layer": layer, "head": head}
        | {f"low_frequency_{k}": float(share) for k, share in zip(CUTOFFS, shares, strict=True)}
        for layer in layers
        for head, shares in enumerate(sums.smooth[layer] / len(sample))
    ]
    table = pd.DataFrame(rows)
    median = float(table["low_frequency_10"].median())
    outcome.read(
        "share of energy at K = 10 of pos-pos, median over heads", number(median), "“visibly discontinuous”"
    )
    if sums.refused:
        reason = next(iter(sums.refused.values()))
        outcome.read("layers that cannot be split", f"{len(sums.refused)}: {reason}")
    outcome.verdicts.append(rough_verdict(study, table["low_frequency_10"].to_numpy(), positions))
    outcome.tables["smoothness"] = table
    drawn = [layers[place] for place in evenly(len(layers), SHOWN_LAYERS)]
    tiles = [maps.positional_tiles(sums.logits[layer] / len(sample)) for layer in drawn]
    names = [f"head {head}" for head in heads]
    outcome.figure(
        "positional-logits",
        "QK matrix of the positional basis, every head",
        by_name(
            "block",
            [f"block {layer}" for layer in drawn],
            lambda place: maps.weight_maps(tiles[place], names, len(shown)),
        ),
        f"Logits of {counted(len(shown), 'position')} of {positions} (queries downwards) with pos + μ on both sides, "
        f"through norm, projection and rotation, mean over {counted(len(sample), 'context')}; masked pairs are drawn "
        "too. "
        "Every row less its mean; each head on its own scale, blue below and red above.",
        "smooth shading in language models, breaks in models trained on addition.",
        f"{SONG}, Figs. 19 and 22",
        wide=True,
    )


def rough_verdict(study: Study, shares: Floats, positions: int) -> Verdict:
    """Judge the shares of low frequencies of heads, where the model was trained on addition: of most of the heads."""
    claim = "The QK matrix of a model trained on addition is not smooth (section 4.3, Figs. 5, 19 and 22)"
    shares = shares[np.isfinite(shares)]
    median = f"share of energy at K = 10 of pos-pos, median of {counted(len(shares), 'head')}"
    median += f": {number(float(np.median(shares)))}"
    limit = criteria.UNLIKE_LANGUAGE
    if positions < criteria.LEAST_UNSMOOTH_POSITIONS:
        verdict = untestable(claim, f"{positions} positions have only {positions} frequencies")
    else:
        chance = f"positions in random order: {(10 / positions) ** 2:.2g}"
        what = f"share of heads with at most {number(limit.limit)} of pos-pos' energy at K = 10 ({median}; {chance})"
        most = Criterion("at least", 0.5, f"of the heads; {limit.source}")
        verdict = judge(claim, what, share_of_heads(limit.met(shares).tolist(), most), most)
    return of_an_adder(study.model, study.run, verdict, median)
