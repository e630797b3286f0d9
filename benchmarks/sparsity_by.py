"""The same sparsity in every block, or more where blocks have few outliers, or where their sinks tag little.

`python -m benchmarks.sparsity_by` prunes the embedded model by Wanda, calibrated on three draws of its own topics, and
prints how much worse it predicts topics that it never read (nats a token), and how much is left there of the share of
contexts in which each token is a sink of each head, with standard errors over draws.
"""

from __future__ import annotations

import argparse

import numpy as np

from theodolite import Corpus, Run, open_model, survey
from theodolite.evaluate.perplexity import perplexity
from theodolite.evaluate.scores import mean_and_error
from theodolite.prune import prune_model

WAYS = (None, "owl", "tags")
SPARSITIES, DRAWS, LENGTH = (0.5, 0.6, 0.7), (0, 1, 2), 128


def main(sparsities: tuple[float, ...] = SPARSITIES, draws: tuple[int, ...] = DRAWS) -> None:
    dense = open_model()
    text = Corpus.python_docs(dense.required_tokenizer(), LENGTH, held_out=True)
    loss, sinks = perplexity(dense, text).each.mean(), survey(dense, text)
    print("sparsity | by | loss more | sinks left")
    for sparsity in sparsities:
        for way in WAYS:
            lost, left = [], []
            for draw in draws:
                model = open_model()
                calibration = Corpus.python_docs(model.required_tokenizer(), LENGTH, 128, draw)
                prune_model(model, calibration, "wanda", sparsity, sparsity_by=way)
                lost.append(float(perplexity(model, text).each.mean() - loss))
                left.append(_left(sinks, survey(model, text)))
            print(f"{sparsity} | {way or 'all alike'} | {_shown(lost)} | {_shown(left)}", flush=True)


def _left(before: Run, after: Run) -> float:
    """Of how often each token is a sink of each head, what is left."""
    first, second = (
        run.sinks.groupby(["layer", "head", "first", "token_id"])["share"].sum() for run in (before, after)
    )
    return float(np.minimum(first, second.reindex(first.index, fill_value=0)).sum() / first.sum())


def _shown(values: list[float]) -> str:
    mean, error = mean_and_error(np.array(values))
    return f"{mean:.4f} ± {error:.4f}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
