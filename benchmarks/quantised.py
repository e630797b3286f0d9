"""Rounding, GPTQ and quantised plus low-rank at equal bytes, calibrated on one text and judged on others.

`python -m benchmarks.quantised` prunes the embedded model in bfloat16 and writes docs/results/quantising.json: the bits
of a weight of the blocks (codes, scales and low-rank factors, as they are stored), how much worse each predicts texts
that it was not calibrated on, and what `compare` says of its sinks and tags. Errors are over contexts, of the mean over
the calibration texts; what is compared is paired by context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import made_by
from theodolite import Corpus, OpenModel, compare, open_model, survey, trace_sinks
from theodolite.comparison import read_outputs
from theodolite.evaluate.perplexity import perplexity
from theodolite.evaluate.scores import mean_and_error
from theodolite.prune import prune_model

RESULT = Path(__file__).parents[1] / "docs" / "results" / "quantising.json"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "round, 4 bits": ("round", {"bits": 4}),
    "GPTQ, 4 bits": ("gptq", {"bits": 4}),
    "3 bits + low rank": ("oats", {"bits": 3, "rank_ratio": 1 / 4.125}),
    "GPTQ, 4 bits, groups of 16": ("gptq", {"bits": 4, "group": 16}),
    "4 bits + low rank": ("oats", {"bits": 4, "rank_ratio": 0.875 / 5}),
    "round, 8 bits": ("round", {"bits": 8}),
}
"""The first three have 4.125 bits a weight, the next two 5; ranks are rounded down."""

PAIRS = (
    ("3 bits + low rank", "GPTQ, 4 bits"),
    ("3 bits + low rank", "round, 4 bits"),
    ("4 bits + low rank", "GPTQ, 4 bits, groups of 16"),
    ("GPTQ, 4 bits", "round, 4 bits"),
)
"""Of equal bytes, and compared with each other."""

LENGTH, CALIBRATIONS, JUDGED = 128, (0, 1, 2), 128


def main(calibrations: tuple[int, ...] = CALIBRATIONS, contexts: int = JUDGED) -> dict[str, Any]:
    dense = _opened()
    tokenizer = dense.tokenizer
    assert tokenizer is not None
    texts = {
        "held-out": Corpus.python_docs(tokenizer, LENGTH, None, held_out=True),
        "code": Corpus.stdlib_code(tokenizer, LENGTH, contexts),
    }
    reference = {name: perplexity(dense, text).each for name, text in texts.items()}
    before = _runs(dense, texts["code"])
    losses: dict[str, dict[str, list[np.ndarray]]] = {name: {text: [] for text in texts} for name in MODELS}
    values: dict[str, Any] = {
        f"dense: loss on {name}": float(each.mean()) for name, each in reference.items()
    }
    for name, (method, options) in MODELS.items():
        for seed in calibrations:
            model = _opened()
            calibration = Corpus.python_docs(tokenizer, LENGTH, 128, seed)
            table = prune_model(model, calibration, method, **options).table
            for text, corpus in texts.items():
                losses[name][text].append(perplexity(model, corpus).each)
            if seed == calibrations[0]:
                entries = (table["outputs"] * table["inputs"]).sum()
                values[f"{name}: bits a weight"] = float(8 * table["compact_bytes"].sum() / entries)
                values[f"{name}: error_scaled"] = float(table["error_scaled"].mean())
                values |= _what_survives(name, before, _runs(model, texts["code"]))
        for text in texts:
            values |= _difference(f"{name}: loss more on {text}", losses[name][text], [reference[text]])
            means = [float((each - reference[text]).mean()) for each in losses[name][text]]
            values[f"{name}: loss more on {text}, by calibration"] = means
        print(
            name, {what: value for what, value in values.items() if what.startswith(f"{name}:")}, flush=True
        )
    for first, second in PAIRS:
        for text in texts:
            values |= _difference(f"{first} − {second} on {text}", losses[first][text], losses[second][text])
    return values


def table(values: dict[str, Any]) -> str:
    """What docs/quantising.md shows of them."""
    lines = ["| model | bits a weight | loss more, held-out text | loss more, code | mechanism |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name in MODELS:
        losses = (_shown(values, f"{name}: loss more on {text}") for text in ("held-out", "code"))
        bits, mechanism = values[f"{name}: bits a weight"], values[f"{name}: mechanism"]
        lines.append(f"| {name} | {bits:.2f} | {' | '.join(losses)} | {mechanism} |")
    lines += ["", "| difference of losses | held-out text | code |", "| --- | --- | --- |"]
    for first, second in PAIRS:
        pair = f"{first} − {second}"
        lines.append(
            f"| {pair} | {' | '.join(_shown(values, f'{pair} on {text}') for text in ('held-out', 'code'))} |"
        )
    return "\n".join(lines)


def _shown(values: dict[str, Any], what: str) -> str:
    return f"{values[what]:.4f} ± {values[f'{what}, standard error']:.4f}".replace("-", "−")


def _opened() -> OpenModel:
    return open_model(dtype="bfloat16")


def _runs(model: OpenModel, corpus: Corpus) -> tuple[Any, Any, Any]:
    return survey(model, corpus), trace_sinks(model, corpus), read_outputs(model, corpus)


def _what_survives(name: str, before: tuple[Any, Any, Any], after: tuple[Any, Any, Any]) -> dict[str, Any]:
    audit = compare(
        before[0], after[0], before[1], after[1], outputs_of=(before[2], after[2]), names=("dense", name)
    )
    parts = {
        f"{name}: {part}": audit.part(part).sentence
        for part in ("sinks", "tags", "head outputs", "head types")
    }
    return {f"{name}: mechanism": audit.answer} | parts


def _difference(what: str, first: list[np.ndarray], second: list[np.ndarray]) -> dict[str, float]:
    mean, error = mean_and_error(np.mean(first, axis=0) - np.mean(second, axis=0))
    return {what: mean, f"{what}, standard error": error}


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=RESULT)
    out = arguments.parse_args().out
    told = made_by("python -m benchmarks.quantised") | {"seed": list(CALIBRATIONS), "measured": main()}
    print(table(told["measured"]))
    out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
