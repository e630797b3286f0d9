"""Hold what few contexts say of a real model against what many say: `python -m benchmarks.few_contexts`.

Needs `make real-models`. Disjoint draws of 16 and of 64 contexts of a text are measured as a survey would, and their
numbers of the layers compared with those of all 1,024: in how many cases the difference is within two of its standard
errors, and within the interval of Student's t that verdicts go by. Written to docs/results/few_contexts.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.corpus.corpus import Corpus
from theodolite.estimates import sigmas
from theodolite.measure.contexts import context_columns
from theodolite.measure.geometry import stream_columns
from theodolite.measure.position import position_columns
from theodolite.models import OpenModel
from theodolite.models.open import open_model
from theodolite.passes.survey_pass import SurveyPass
from theodolite.theory.unbiased import Jackknifed
from tools.real_models import real_model

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "few_contexts.json"
EXEMPT = {
    "rank": "counts what these contexts can show",
    "relative_norm_floor": "is the noise of these contexts",
    "incoherence_random": "has no error",
}
"""Columns that are no estimates of something that all contexts would show better."""


class LayersPass(SurveyPass):
    """Sum what a survey sums of a text, but for attention."""

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Leave out what an attention module reads."""

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Compute a layer's attention, of which nothing is kept."""
        return attend(inputs)


def layers_of(model: OpenModel, corpus: Corpus) -> dict[str, Jackknifed]:
    """Compute the columns of the layers on a text; counts as for a thousand contexts."""
    reading = LayersPass(model, corpus, 0, 32)
    reading.read(0, reading.total)
    means, residual = reading.means.state(), reading.residual.state()
    columns: dict[str, Any] = position_columns(means, residual, reading.sketches.state())
    columns |= context_columns(means, reading.sample, corpus.labels[reading.sample.kept])
    columns |= stream_columns(means, reading.outliers.state())
    numbers = {name: values for name, values in columns.items() if isinstance(values, Jackknifed)}
    scale = 1000 / reading.total
    for name in (name for name in numbers if name.startswith("massive_activations")):
        numbers[name] = Jackknifed(numbers[name].value * scale, numbers[name].without * scale)
    return numbers


def compared(
    few: Sequence[dict[str, Jackknifed]], many: dict[str, Jackknifed]
) -> dict[str, dict[str, float]]:
    """Compare the numbers of several draws with those of all contexts, a row a column."""
    rows = {}
    for name in (name for name in many if name not in EXEMPT):
        values = torch.stack([one[name].value for one in few])
        errors = torch.stack([one[name].error for one in few])
        difference = values - many[name].value
        error = torch.hypot(errors, many[name].error.expand_as(errors))
        known = (difference.isfinite() & error.isfinite()).double()
        inside = [(difference.abs() <= times * error).double() * known for times in (2.0, float(sigmas(8)))]
        count = known.sum().clamp_min(1)
        rows[name] = {
            "known": float(known.mean()),
            "two_errors": float(inside[0].sum() / count) if known.any() else math.nan,
            "interval": float(inside[1].sum() / count) if known.any() else math.nan,
        }
    return rows


def measure(
    name: str, text: Path, length: int, contexts: int, sizes: Sequence[int], draws: int
) -> dict[str, Any]:
    """Measure draws of each size and all contexts of a text, cut into so many tokens."""
    place = real_model(name)
    if place is None:
        raise SystemExit(f"there is no {name}: make real-models")
    model = open_model(place)
    whole = Corpus.from_path(text, model.tokenizer, contexts=contexts, length=length)
    total = len(whole.contexts)
    labels = torch.arange(total) * 4 // total  # stretches of the text: as many labels whatever is drawn
    whole = Corpus(whole.name, whole.contexts, labels, [f"stretch {i}" for i in range(4)], 0)
    many = layers_of(model, whole)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    tables = {}
    for size in sizes:
        rows = [order[i * size : (i + 1) * size].sort().values for i in range(min(draws, total // size))]
        tables[str(size)] = compared([layers_of(model, whole.subset(some)) for some in rows], many)
    first = {
        name: [float(many[name].value[0]), float(many[name].error[0])]
        for name in ("relative_norm", "position_energy")
    }
    return {
        "model": name,
        "text": text.name,
        "length": length,
        "contexts": total,
        "layer_0": first,
        "tables": tables,
    }


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="WikiText-2, say")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--contexts", type=int, default=1024)
    parser.add_argument("--draws", type=int, default=12)
    options = parser.parse_args()
    found = measure(options.model, options.text, options.length, options.contexts, (16, 64), options.draws)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['contexts']} contexts of {found['length']} tokens; layer 0: {found['layer_0']}")
    for size, table in found["tables"].items():
        print(f"\n{size} contexts               known  within 2 errors  within the interval")
        for name, row in table.items():
            print(f"{name:28}{row['known']:6.0%}{row['two_errors']:12.0%}{row['interval']:20.0%}")


if __name__ == "__main__":
    main()
