"""Text as a random walk: second moments of hidden states against min(s, t) Σ, random tokens and a true walk.

One pass over some contexts sums what attention reads and the residual stream; the survey's own pass is not touched.
Position 0 is left out, whose vector is an outlier in most models: the walk is x_1 … x_n, n = T − 1, and has n − 1
increments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.accumulate.sums import LayerSums
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.errors import UsageError
from theodolite.estimates import Estimates
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import TOKENS_A_BATCH
from theodolite.report import style
from theodolite.report.data import OF_GROUPS
from theodolite.system.wording import number, with_error
from theodolite.theory.unbiased import leaving_out
from theodolite_papers import drawing
from theodolite_papers.drawing import Line
from theodolite_papers.experiment import Outcome, Study, by_layer, by_name, declared

CONTEXTS = 64  # read at most, whatever the corpus: a fixed cost; eight in each group
SHOWN_POSITIONS = 64  # of the second moments x_s·x_t, evenly chosen
LAGS = 8  # of the autocorrelation of increments
LEAST_LENGTH = LAGS + 4  # tokens per context: every lag has at least two pairs of increments
ALL = torch.ones(GROUPS, dtype=torch.float64)  # weights of the groups of contexts: every one counts

MEASURES = {
    "r_squared": ("R² of τ·min(s, t) for E[x_s·x_t], τ fitted", "1", "R²"),
    "trace_ratio": ("τ over E‖x_{t+1} − x_t‖²", "1", ""),
    "autocorrelation": ("autocorrelation of successive increments", "0", "autocorrelation"),
    "growth": ("exponent of the growth of E‖x_t‖² with t", "1", "growth"),
}
"""What is read off one layer: in words, of a true walk, and in the picker of those that are drawn by layer."""


class WalkSums(LayerSums):
    """Sums over contexts of products of vectors and of increments, for N layers of width d.

    Of each layer: contexts (G,) by group; gram (G, S, S) of x_s·x_t at the positions `shown`; lagged (G, LAGS + 1)
    sums over steps of ε_t·ε_{t+lag}; increments (d, d) of εεᵀ over all steps, about zero.
    """

    def __init__(self, layers: int, width: int, contexts: int, length: int) -> None:
        self.positions = length - 1
        last, shown = self.positions - 1, min(self.positions, SHOWN_POSITIONS)
        self.shown = np.unique(np.linspace(0, last, shown).round().astype(int)).tolist()
        self.groups, shown = Groups(contexts), len(self.shown)
        shapes: dict[str, tuple[int, ...]] = {"contexts": (GROUPS,), "gram": (GROUPS, shown, shown)}
        shapes |= {"lagged": (GROUPS, LAGS + 1), "increments": (width, width)}
        super().__init__(layers, shapes)

    def update(self, layer: int, hidden: Tensor, first_context: int) -> None:
        """Add one layer's vectors, (batch, T, d), of the contexts `first_context …`."""
        walk = hidden[:, 1:].double()
        steps = walk.diff(dim=1)
        for group, part in self.groups.parts(first_context, len(walk)):
            chosen, of_group = walk[part][:, self.shown], steps[part]
            count = of_group.shape[1]
            lagged = [(of_group[:, : count - lag] * of_group[:, lag:]).sum() for lag in range(LAGS + 1)]
            self.add("contexts", layer, torch.tensor(float(len(chosen)), device=walk.device), group)
            self.add("gram", layer, (chosen @ chosen.mT).sum(0), group)
            self.add("lagged", layer, torch.stack(lagged), group)
        flat = steps.flatten(0, 1)
        self.add("increments", layer, flat.T @ flat)

    def of(self, name: str, layer: int) -> Tensor:
        """Return one layer's sums, on the CPU."""
        return self.at(name, layer, torch.device("cpu"))

    @property
    def steps_shared(self) -> Tensor:
        """min(s, t) at the shown positions, (S, S); the first position that is not left out has s = 1."""
        at = torch.tensor(self.shown, dtype=torch.float64) + 1
        return torch.minimum(at[:, None], at)

    def covariance(self, layer: int) -> Tensor:
        """Compute Σ̂ of the increments, their second moment about zero, (d, d)."""
        return self.of("increments", layer) / (self.of("contexts", layer).sum() * (self.positions - 1))

    def gram(self, layer: int, weights: Tensor = ALL) -> Tensor:
        """Compute E[x_s·x_t] at the shown positions, (S, S), over the groups of weight 1."""
        contexts = weights @ self.of("contexts", layer)
        return torch.tensordot(weights, self.of("gram", layer), dims=1) / contexts

    def autocorrelations(self, layer: int, weights: Tensor = ALL) -> Tensor:
        """Compute E[ε_t·ε_{t+lag}] / E‖ε_t‖² for lags 0 … LAGS. Independent vectors have −½ at lag 1, a walk has 0."""
        steps = self.positions - 1 - torch.arange(LAGS + 1, dtype=torch.float64)
        mean = (weights @ self.of("lagged", layer)) / steps
        return mean / mean[0]

    def numbers(self, layer: int, weights: Tensor = ALL) -> Tensor:
        """Compute `MEASURES` of one layer, in their order."""
        shared, gram = self.steps_shared, self.gram(layer, weights)
        contexts = weights @ self.of("contexts", layer)
        at, norms = shared.diagonal().log(), gram.diagonal().log()
        steps = (weights @ self.of("lagged", layer))[0] / (contexts * (self.positions - 1))
        fitted = (gram * shared).sum() / shared.square().sum()  # τ of τ·min(s, t) by least squares
        # Over that of the best constant; R² is negative where it is larger.
        error = (gram - fitted * shared).square().sum() / (gram - gram.mean()).square().sum()
        growth = ((at - at.mean()) * norms).sum() / (at - at.mean()).square().sum()
        return torch.stack([1 - error, fitted / steps, self.autocorrelations(layer, weights)[1], growth])

    def table(self) -> pd.DataFrame:
        """Tabulate layers: `MEASURES`, each with its standard error `…_se` over contexts.

        Errors are from leaving out each of the groups of contexts, NaN below eight contexts.
        """
        rows = []
        for layer in range(self.layers):
            numbers, errors = self.numbers(layer), torch.full((len(MEASURES),), math.nan)
            if bool((self.of("contexts", layer) > 0).all()):
                errors = leaving_out(partial(self.numbers, layer), GROUPS).error
            rows.append([layer, *numbers.tolist(), *errors.tolist()])
        return pd.DataFrame(rows, columns=["layer", *MEASURES, *(f"{name}_se" for name in MEASURES)])


def simulated_walk(text: WalkSums, seed: int) -> WalkSums:
    """Simulate Gaussian random walks with a text's covariance Σ̂ of increments, and sum them in the same way.

    The walks are in the eigenbasis of Σ̂: every number that is read off the sums is the same in any rotated basis.
    """
    contexts, width = text.groups.contexts, text.of("increments", 0).shape[0]
    sums = WalkSums(text.layers, width, contexts, text.positions + 1)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(text.layers):
        scale = torch.linalg.eigvalsh(text.covariance(layer)).clamp_min(0).sqrt()
        for context in range(contexts):
            steps = torch.randn(text.positions, width, generator=generator, dtype=torch.float64)
            # x_1 is the first step from zero; in front of it stands the position that is left out.
            walk = torch.cat([torch.zeros(1, width, dtype=torch.float64), (steps * scale).cumsum(0)])
            sums.update(layer, walk[None], context)
    return sums


@dataclass(frozen=True)
class TextWalk:
    """Sums over a text: what the attention modules read (L layers), the residual stream (L + 1); and the contexts."""

    inputs: WalkSums
    residual: WalkSums
    corpus: Corpus


class _WalkHooks(Hooks):
    def __init__(self, inputs: WalkSums, residual: WalkSums) -> None:
        self.inputs, self.residual, self.first = inputs, residual, 0

    def stream(self, layer: int, hidden: Tensor) -> None:
        self.residual.update(layer, hidden[:, : self.residual.positions + 1], self.first)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        self.inputs.update(layer, hidden[:, : self.inputs.positions + 1], self.first)


@measures("model")
def read_walk(model: OpenModel, corpus: Corpus, seed: int) -> TextWalk:
    """Read a seeded sample of at most `CONTEXTS` contexts.

    Raises:
        UsageError: the contexts are too short.
    """
    count, length = corpus.contexts.shape
    # No walk goes on into the special tokens that a tokenizer puts at the end.
    text_length = length - corpus.trailing(model.tokenizer)
    for tokens in (length, text_length):
        if tokens < LEAST_LENGTH:
            raise UsageError(
                f"contexts of {tokens} tokens are too short to be seen as walks: use --length {LEAST_LENGTH} or more"
            )
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:CONTEXTS].sort().values
    sample, sizes = corpus.subset(chosen), (model.width, len(chosen), text_length)
    hooks = _WalkHooks(WalkSums(model.layers, *sizes), WalkSums(model.layers + 1, *sizes))
    batch = max(1, TOKENS_A_BATCH // length)
    with hooked(model, hooks):
        for first in range(0, len(chosen), batch):
            hooks.first = first
            model.forward(sample.contexts[first : first + batch])
    return TextWalk(hooks.inputs, hooks.residual, sample)


TEXT, RANDOM, WALK = "text", "random tokens", "simulated walk"
LINES = (
    Line(TEXT, style.MEASURED, width=2.6),
    Line(RANDOM, style.BLUE),
    Line(WALK, style.GREEN),
)


def text_walk(study: Study) -> TextWalk:
    """Read the text of the run once for all experiments."""
    corpus = study.require_corpus()
    seed = int(study.provenance["seed"])
    return study.cached("text as a walk", lambda: read_walk(study.require_model(), corpus, seed))


@declared("localization/walk")
def walk(study: Study, outcome: Outcome) -> None:
    text, seed, model = text_walk(study), int(study.provenance["seed"]), study.require_model()
    contexts, length = text.corpus.contexts.shape
    tokens = Corpus.random_tokens(model.required_vocabulary(), length, contexts, seed, below=model.vocabulary)
    sums = {TEXT: text.inputs, RANDOM: read_walk(model, tokens, seed).inputs}
    sums[WALK] = simulated_walk(text.inputs, seed)
    tables = {name: of.table() for name, of in sums.items()}
    residual = text.residual.table()
    shown = tables | {f"{TEXT}, residual stream": residual}
    for name, (words, of_a_walk, _) in MEASURES.items():
        middles = {source: _column(table, name).at(len(table) // 2) for source, table in shown.items()}
        by_source = [f"{source} {with_error(of.value, of.error)}" for source, of in middles.items()]
        outcome.read(f"{words}, middle layer", "; ".join(by_source), f"a walk: {of_a_walk}")
    what = "lowest R² of the simulated walk over layers: what this test gives for a true walk"
    outcome.read(what, number(float(tables[WALK]["r_squared"].min())), "a walk: 1")
    of_text, of_random = (_column(tables[of], "autocorrelation") for of in (TEXT, RANDOM))
    errors = np.asarray(np.hypot(*(tables[of]["autocorrelation_se"] for of in (TEXT, RANDOM))))
    for claim, name, estimates in (
        ("moments", "r_squared", _column(tables[TEXT], "r_squared")),
        ("residual", "r_squared", _column(residual, "r_squared")),
        ("uncorrelated", "autocorrelation", replace(of_text, values=np.abs(of_text.values))),
        ("grows", "growth", _column(tables[TEXT], "growth")),
        ("drifts", "autocorrelation", Estimates(of_text.values - of_random.values, errors, *OF_GROUPS)),
    ):
        outcome.judge(claim, estimates, measure=MEASURES[name][0])
    parts = [table.assign(tokens=name, vectors="attention input") for name, table in tables.items()]
    layers = pd.concat([*parts, residual.assign(tokens=TEXT, vectors="residual stream")], ignore_index=True)
    first = ["tokens", "vectors"]
    outcome.tables["layers"] = layers[[*first, *layers.columns.drop(first)]]
    _draw(outcome, sums, tables)


def _column(table: pd.DataFrame, name: str) -> Estimates:
    values, errors = (table[of].to_numpy(dtype=np.float64) for of in (name, f"{name}_se"))
    return Estimates(values, errors, *OF_GROUPS)


def _draw(outcome: Outcome, sums: dict[str, WalkSums], tables: dict[str, pd.DataFrame]) -> None:
    text = sums[TEXT]
    at = np.array(text.shown, dtype=np.float64) + 1
    lags = np.arange(1, LAGS + 1, dtype=np.float64)

    def moments(layer: int) -> go.Figure:
        grams = {name: of.gram(layer).numpy() for name, of in sums.items()}
        grams["min(s, t)"] = text.steps_shared.numpy()
        least = np.finfo(np.float64).tiny
        pictures = {name: gram / max(float(np.abs(gram).max()), least) for name, gram in grams.items()}
        titles = ("t", "s", "over the largest")
        return drawing.maps(pictures, (at, at), titles, (-1.0, 1.0), signed=tuple(pictures), square=True)

    def growth(layer: int) -> go.Figure:
        norms = [of.gram(layer).diagonal().numpy() for of in sums.values()]
        log, titles = {"type": "log", "dtick": 1}, ("t", "E‖x_t‖² over E‖x_1‖²")
        return drawing.curves(at, LINES, [norm / norm[0] for norm in norms], titles, xaxis=log, yaxis=log)

    def increments(layer: int) -> go.Figure:
        values = [of.autocorrelations(layer)[1:].numpy() for of in sums.values()]
        titles = ("lag", "E[ε_t·ε_{t+lag}] / E‖ε_t‖²")
        return drawing.curves(lags, LINES, values, titles, yaxis={"range": [-0.6, 0.3]})

    for key, draw in (("moments", moments), ("growth", growth), ("increments", increments)):
        outcome.draw(key, by_layer(text.layers, draw))
    drawn = {name: (label, words) for name, (words, _, label) in MEASURES.items() if label}

    def layers(place: int) -> go.Figure:
        values = [_column(table, list(drawn)[place]).values for table in tables.values()]
        of_layers = tables[TEXT]["layer"].to_numpy(dtype=np.float64)
        return drawing.curves(of_layers, LINES, values, ("layer", ""))

    captioned = "; ".join(f"{label}: {words}" for label, words in drawn.values())
    picker = by_name("measure", [label for label, _ in drawn.values()], layers)
    outcome.draw("layers", picker, measures=captioned)
