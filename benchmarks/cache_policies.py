"""What the embedded model loses when its cache keeps few tokens: traced sinks against the first four, and a window.

`python -m benchmarks.cache_policies --chosen-on wikitext-2/valid.txt --judged-on wikitext-2/test.txt --out
docs/results/cache-policies.json` traces sinks and chooses one of nine variants (which sinks, how many places they
have) on the first text, judges it against the other policies on the second, whose sinks nobody looked at, and prints
the table of docs/using-the-map.md.
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


def table(result: dict[str, Any]) -> str:
    """Perplexity by policy and size, with differences of the loss in nats to `window + first four`."""
    rows = pd.DataFrame(result["rows"])
    full = rows[rows["policy"] == FULL].iloc[0]
    policies = [policy for policy in dict.fromkeys(rows["policy"]) if policy != FULL]
    lines = [
        "| tokens kept | " + " | ".join(policies) + " |",
        "| --- |" + " --- |" * len(policies),
    ]
    for size, block in rows[rows["policy"] != FULL].groupby("size"):
        cells = [_cell(block[block["policy"] == policy].iloc[0]) for policy in policies]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nThe whole context: {full['perplexity']:.1f}."


def _cell(row: Any) -> str:
    difference = row["difference"]
    shown = f"{row['perplexity']:.1f}"
    if difference is None or not np.isfinite(difference):
        return shown
    return f"{shown} ({difference:+.3f} ± {row['difference_se']:.3f})".replace("-", "−")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chosen-on", type=Path, required=True)
    parser.add_argument("--judged-on", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=128, help="judged on; chosen on half of them")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    model = open_model()
    first = Corpus.from_path(options.chosen_on, model.tokenizer, LENGTH, options.contexts // 2)
    sinks, places, exclusions, tried = chosen(model, first)
    second = Corpus.from_path(options.judged_on, model.tokenizer, LENGTH, options.contexts)
    found = judged(model, second, exclusions, PARTS[places])
    rows = [
        {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in row.items()}
        for row in found.to_dict(orient="records")
    ]
    result = {
        **made_by(
            "python -m benchmarks.cache_policies --chosen-on wikitext-2/valid.txt --judged-on wikitext-2/test.txt "
            "--out docs/results/cache-policies.json"
        ),
        "seed": 0,
        "contexts": len(second.contexts),
        "length": LENGTH,
        "chosen": {"sinks": sinks, "places": places, "contexts": len(first.contexts), "of": tried},
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
