"""What int8 activations cost the embedded model, with its outlier dimensions in float32 or without.

`python -m benchmarks.int8_activations --wikitext FOLDER --out docs/results/int8-activations.json` finds outlier
dimensions on one part of WikiText-2, rounds the inputs of all linear layers of the blocks on another, and prints the
table of docs/using-the-map.md. Both rules and all widths were named before; none was chosen by its outcome.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.results import made_by
from theodolite import Corpus, Exclusions, find_outliers, open_model
from theodolite.evaluate.int8_activations import AS_IT_IS, OUTLIERS, RANDOM, ROUNDED, int8_activations

LENGTH, BITS = 256, (8, 6, 4)
SHARES = (0.01, 0.5)
"""Of tokens, least, in which a dimension is an outlier."""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The cost in nats per token, by bits and rule."""
    frame = pd.DataFrame(rows)
    lines = [
        "| bits | outliers in so many tokens | dimensions a block | all rounded | outlier dimensions kept | as many "
        "random ones kept |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (bits, share), block in frame.groupby(["bits", "share"], sort=False):
        of = block.set_index("what")
        cells = [_cost(of.loc[what]) for what in (ROUNDED, OUTLIERS, RANDOM)]
        lines.append(
            f"| {bits} | {share:.0%} | {of.loc[OUTLIERS, 'dimensions']:.1f} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def _cost(row: Any) -> str:
    return f"{row['cost']:+.4f} ± {row['cost_se']:.4f}".replace("-", "−")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wikitext", type=Path, required=True, help="a folder with valid.txt and test.txt")
    parser.add_argument("--contexts", type=int, default=64, help="of each text")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    model = open_model()
    valid, test = (
        Corpus.from_path(options.wikitext / f"{part}.txt", model.tokenizer, LENGTH, options.contexts)
        for part in ("valid", "test")
    )
    outliers = find_outliers(model, valid)
    rows = []
    for share in SHARES:
        exclusions = Exclusions.of(outliers, share)
        for bits in BITS:
            found = int8_activations(model, test, exclusions, bits=bits)
            print(bits, share, found.to_string(), file=sys.stderr, flush=True)
            for row in found.to_dict(orient="records"):
                known = {name: None if pd.isna(value) else value for name, value in row.items()}
                rows.append({"bits": bits, "share": share, **known})
    command = (
        "python -m benchmarks.int8_activations --wikitext wikitext-2 --out docs/results/int8-activations.json"
    )
    result = {**made_by(command), "seed": 0, "length": LENGTH, "contexts": len(test.contexts), "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table([row for row in rows if row["what"] != AS_IT_IS]))


if __name__ == "__main__":
    main()
