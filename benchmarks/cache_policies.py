"""What the embedded model loses when its cache keeps few tokens: traced sinks against first tokens, and a window.

`python -m benchmarks.cache_policies --wikitext FOLDER --out docs/results/cache-policies.json` reads two kinds of text:
WikiText-2, and Python's documentation, which the model was trained on. It traces sinks and chooses one of nine variants
(which sinks, how many places they have) on one text of a kind, judges it against the other policies on another, whose
sinks nobody looked at, and prints the tables of docs/using-the-map.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.results import made_by
from theodolite import Corpus, Exclusions, OpenModel, open_model, trace_sinks
from theodolite.corpus.named import make_corpus
from theodolite.corpus.spec import DOCS, HELD_OUT
from theodolite.evaluate.cache_policies import FULL, cache_policies, losses_with
from theodolite.evaluate.scores import mean_and_error
from theodolite.models import TracedCache

LENGTH, BATCH = 256, 16
CHOICE_SIZES, SIZES = (16, 32, 64), (8, 16, 32, 64, 128)
RULES = {
    "sinks of whole contexts": (False, 0.01),
    "sinks of whole contexts, of 5 % of contexts": (False, 0.05),
    "and local sinks": (True, 0.01),
}
"""Name → whether sinks of stretches count, and the least share of contexts."""
PARTS = {"an eighth": 8, "a quarter": 4, "half": 2}
"""Of the cache, which sinks may take."""


def chosen(model: OpenModel, corpus: Corpus) -> tuple[str, str, Exclusions, list[dict[str, Any]]]:
    """The variant with the lowest mean loss over three sizes, its rules, and the losses of all."""
    runs = {local: trace_sinks(model, corpus, stretches=local) for local in (False, True)}
    rules = {name: Exclusions.of(runs[local], share) for name, (local, share) in RULES.items()}
    tried = []
    for name, exclusions in rules.items():
        for part, of in PARTS.items():
            losses = [
                losses_with(
                    model,
                    corpus,
                    lambda model, size=size, sinks=exclusions.tokens, of=of: TracedCache(
                        model, sinks, size, places=size // of
                    ),
                    BATCH,
                )[0].each
                for size in CHOICE_SIZES
            ]
            loss, error = mean_and_error(np.mean(losses, axis=0))
            tried.append({"sinks": name, "places": part, "loss": loss, "loss_se": error})
            print(tried[-1], file=sys.stderr, flush=True)
    best = min(tried, key=lambda row: row["loss"])
    return best["sinks"], best["places"], rules[best["sinks"]], tried


def judged(model: OpenModel, corpus: Corpus, exclusions: Exclusions, of: int) -> pd.DataFrame:
    """The policies side by side."""
    tables = [
        cache_policies(model, corpus, exclusions, (size,), places=size // of, batch=BATCH) for size in SIZES
    ]
    return pd.concat([tables[0], *(table[table["policy"] != FULL] for table in tables[1:])])


def measured(model: OpenModel, chosen_on: str, judged_on: str, contexts: int) -> dict[str, Any]:
    """A variant chosen on one text, on half as many contexts, and judged on another."""
    first, second = (
        make_corpus(name, model.tokenizer, LENGTH, count)
        for name, count in ((chosen_on, contexts // 2), (judged_on, contexts))
    )
    sinks, places, exclusions, tried = chosen(model, first)
    rows = judged(model, second, exclusions, PARTS[places]).to_dict(orient="records")
    return {
        "chosen": {
            "text": Path(chosen_on).name,
            "contexts": len(first.contexts),
            "sinks": sinks,
            "places": places,
            "of": tried,
        },
        "judged": {
            "text": Path(judged_on).name,
            "contexts": len(second.contexts),
            "rows": [
                {name: None if value != value else value for name, value in row.items()} for row in rows
            ],
        },
    }


def table(result: dict[str, Any]) -> str:
    """Perplexity by policy and size, with differences of the loss in nats to `window + first four`."""
    rows = pd.DataFrame(result["judged"]["rows"])
    policies = [policy for policy in dict.fromkeys(rows["policy"]) if policy != FULL]
    lines = ["| tokens kept | " + " | ".join(policies) + " |", "| --- |" + " --- |" * len(policies)]
    for size, block in rows[rows["policy"] != FULL].groupby("size"):
        cells = [_cell(block[block["policy"] == policy].iloc[0]) for policy in policies]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    full = rows[rows["policy"] == FULL]["perplexity"].iloc[0]
    return "\n".join([*lines, f"| {LENGTH} | {full:.1f} |" + " |" * (len(policies) - 1)])


def _cell(row: Any) -> str:
    difference = row["difference"]
    shown = f"{row['perplexity']:.1f}"
    if pd.isna(difference):
        return shown
    return f"{shown} ({difference:+.3f} ± {row['difference_se']:.3f})".replace("-", "−")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wikitext", type=Path, required=True, help="a folder with valid.txt and test.txt")
    parser.add_argument(
        "--contexts", type=int, default=128, help="judged on, at most; chosen on half of them"
    )
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    model = open_model()
    pairs = (
        (str(options.wikitext / "valid.txt"), str(options.wikitext / "test.txt")),
        (DOCS, HELD_OUT),
    )
    texts = [measured(model, *pair, options.contexts) for pair in pairs]
    command = (
        "python -m benchmarks.cache_policies --wikitext wikitext-2 --out docs/results/cache-policies.json"
    )
    result = {**made_by(command), "seed": 0, "length": LENGTH, "texts": texts}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n\n".join(map(table, texts)))


if __name__ == "__main__":
    main()
