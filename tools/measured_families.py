"""Survey every text family of `transformers` small, and compare with plain eager attention: `make families`.

`python -m tools.measured_families` measures all and writes docs/results/families.json; with names of families behind
it, these are measured and printed.

The oracle shares no code with theodolite: the family's own model gives hidden states and attention matrices
(`output_hidden_states`, `output_attentions`, eager attention), and `tests/dense.py` the columns by their definition.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from tools.small_models import WITHOUT_ATTENTION, Case, build, cases

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "families.json"
CONTEXTS, LENGTH = 4, 24
HEAD_COLUMNS = ("entropy", "sink_first", "sink_later", "sink_learned", "previous_token", "same_token")
LAYER_COLUMNS = ("norm", "norm_first", "rank_collapse")
RTOL, ATOL = 1e-3, 2e-4
"""Both sides are float32 and add in other orders; what is wrong is off by more."""

WEIGHTS_OF_ANOTHER_KIND = {"granite_swa", "granitemoe_swa", "squeezebert"}
"""Model types whose own models return other weights than the output is made with: before a learned sink scales them, or
before the softmax (SqueezeBERT)."""

OUTCOMES = {
    "surveyed": "every table, and every column that was compared is what eager attention gives",
    "partly": "the same, but for what its line says",
    "refused": "in one line, with the reason",
    "crashed": "a raw error, or a column that is not what eager attention gives: defects",
    "no attention": "refused as well: the models have none",
    "not built": "the script could not make a small model",
}


@dataclass(frozen=True)
class Measured:
    """The result of one family: one of `OUTCOMES`, why, how many of its blocks attend, and how much was compared."""

    name: str
    model_class: str
    outcome: str
    why: str = ""
    blocks: int = 0
    attending: int = 0
    compared: str = ""


def measure(case: Case, folder: Path) -> Measured:
    """Build a family, open and survey it from `folder`, and compare; whatever happens is an outcome."""
    from theodolite.errors import TheodoliteError

    known = {"name": case.name, "model_class": case.model_class}
    try:
        build(case).save_pretrained(folder)
        ids = random_ids(folder)
        streams, attention = eager(folder, ids)
    except Exception as error:
        return Measured(
            **known, outcome="not built", why=f"{type(error).__name__}: {_line(error, folder, case)}"
        )
    try:
        return Measured(**known, **_surveyed_somehow(folder, ids, streams, attention))
    except TheodoliteError as error:
        outcome = "no attention" if case.family in WITHOUT_ATTENTION else "refused"
        return Measured(**known, outcome=outcome, why=_line(error, folder, case))
    except Exception as error:
        return Measured(
            **known, outcome="crashed", why=f"{type(error).__name__}: {_line(error, folder, case)}"
        )


def _surveyed_somehow(
    folder: Path, ids: Any, streams: list[np.ndarray], attention: list[np.ndarray]
) -> dict[str, Any]:
    """Survey; of an encoder-decoder whose decoder has no attention of its own, the encoder alone."""
    from theodolite.errors import UsageError

    try:
        return surveyed(folder, ids, streams, attention)
    except UsageError as error:
        config = json.loads((folder / "config.json").read_text())
        if not config.get("is_encoder_decoder"):
            raise
        of_encoder = surveyed(folder, ids, [], [], "encoder")
        return of_encoder | {"outcome": "partly", "why": f"of its encoder only: {error}"}


def _line(error: Exception, folder: Path, case: Case) -> str:
    line = " ".join(str(error).split()).replace(str(folder), case.family)
    return line if len(line) <= 200 else line[:197] + "…"


def random_ids(folder: Path) -> Any:
    """Draw token ids of the vocabulary of the model in `folder`, (contexts, positions)."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    return torch.randint(config.vocab_size, (CONTEXTS, LENGTH), generator=torch.Generator().manual_seed(0))


def surveyed(
    folder: Path,
    ids: Any,
    streams: list[np.ndarray],
    attention: list[np.ndarray],
    looked_at: str | None = None,
) -> dict[str, Any]:
    """Open and survey the model in `folder`, and compare with what `eager` gave: what `Measured` says of it."""
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import open_model
    from theodolite.passes.survey import survey

    model = open_model(folder, attention=looked_at)
    corpus = Corpus.random_tokens(model.required_vocabulary(), LENGTH, CONTEXTS)
    run = survey(model, replace(corpus, contexts=ids))
    heads, layers = run.heads, run.layers
    attending = sorted(set(heads["layer"]))
    wrong, compared = [], []
    if len(streams) == len(layers):
        wrong += _differences(layers, _layer_columns(streams), slice(0, len(layers) - 1), LAYER_COLUMNS)
        compared.append("layers")
    if len(attention) == len(attending):
        for layer, weights in zip(attending, attention, strict=True):
            expected = _head_columns(weights, ids.numpy(), model.causal)
            of_layer = heads[heads["layer"] == layer].reset_index(drop=True)
            wrong += _differences(of_layer, expected, slice(None), HEAD_COLUMNS)
        compared.append("heads")
    missing = _missing(run)
    facts = {
        "blocks": len(layers) - 1,
        "attending": len(attending),
        "compared": " and ".join(compared) or "nothing",
    }
    if wrong:
        return facts | {"outcome": "crashed", "why": f"differs from eager attention: {'; '.join(wrong[:3])}"}
    return facts | {"outcome": "partly" if missing else "surveyed", "why": missing}


def _missing(run: Any) -> str:
    """Say which tables of the survey lack some layers."""
    of = run.heads.groupby("layer")["spectrum_of"].first()
    without = int((of == "none").sum())
    missing = [f"no query-key spectra in {without} of {len(of)} layers"] if without else []
    refused = run.provenance.get("constituents_refused", {})
    return "; ".join(missing + ([f"logits not split: {next(iter(refused.values()))}"] if refused else []))


def eager(folder: Path, ids: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute hidden states (C, T, d) and attention (C, H, T, T) by the family's own model, those that it returns."""
    import torch
    import transformers

    config = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    try:
        model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    except ValueError:  # those who have one way to attend
        model = model_class.from_pretrained(folder).eval()
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        output = model(**given, output_attentions=True, output_hidden_states=True, use_cache=False)
    streams, attention = (
        [tensor.float().numpy() for tensor in _of_decoder(output, name) if isinstance(tensor, torch.Tensor)]
        for name in ("hidden_states", "attentions")
    )
    length = ids.shape[1]
    streams = [_in_one(hidden, tuple(ids.shape)) for hidden in streams]
    if config["model_type"] in WEIGHTS_OF_ANOTHER_KIND:
        return streams, []
    return streams, [a for a in attention if a.ndim == 4 and a.shape[2:] == (length, length)]


def _in_one(hidden: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Join several residual streams to (C, T, streams · d), wherever the model has their dimension."""
    if hidden.ndim == 4 and hidden.shape[1:3] == shape:
        hidden = np.moveaxis(hidden, 0, 2)
    return hidden.reshape(*hidden.shape[:2], -1)


def _of_decoder(output: Any, name: str) -> Sequence[Any]:
    return getattr(output, f"decoder_{name}", None) or getattr(output, name, None) or ()


def _layer_columns(streams: list[np.ndarray]) -> dict[str, np.ndarray]:
    rows = []
    for hidden in streams:
        x = hidden[:, 1:].astype(float)
        centred = x - x.mean(1, keepdims=True)
        collapse = [np.linalg.norm(c) / np.linalg.norm(t) for c, t in zip(centred, x, strict=True)]
        norms = np.linalg.norm(hidden.astype(float), axis=-1)
        rows.append((norms[:, 1:].mean(), norms[:, 0].mean(), np.mean(collapse)))
    return dict(zip(LAYER_COLUMNS, np.array(rows).T, strict=True))


def _head_columns(weights: np.ndarray, ids: np.ndarray, causal: bool) -> dict[str, np.ndarray]:
    from tests import dense

    nothing = np.empty(0)
    return dense.head_columns(dense.Dense(nothing, weights[None].astype(float), nothing), ids, causal)


def _differences(
    table: Any, expected: dict[str, np.ndarray], rows: slice, columns: Sequence[str]
) -> list[str]:
    wrong = []
    for name in columns:
        got, want = table[name].to_numpy(dtype=float)[rows], expected[name][rows]
        if got.shape != want.shape:
            wrong.append(f"{name} has {len(got)} values, not {len(want)}")
        elif not np.allclose(got, want, rtol=RTOL, atol=ATOL, equal_nan=True):
            wrong.append(f"{name} by {np.nanmax(np.abs(got - want)):.1e}")
    return wrong


def write(measured: Sequence[Measured]) -> None:
    """Write the results that the page is made of."""
    import torch
    import transformers

    rows = [{name: value for name, value in asdict(one).items() if value not in ("", 0)} for one in measured]
    results = {
        "command": "make families",
        "date": date.today().isoformat(),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "families": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read() -> tuple[dict[str, Any], list[Measured]]:
    """Read what `write` wrote: the facts, and the families."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results, [Measured(**row) for row in results.pop("families")]


def _main(names: list[str]) -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    measured = []
    for case in [case for case in cases() if not names or case.name in names]:
        with tempfile.TemporaryDirectory() as scratch:
            measured.append(measure(case, Path(scratch) / "model"))
        print(measured[-1].outcome, case.name, measured[-1].why, sep="  ", flush=True)
    if not names:
        write(measured)


if __name__ == "__main__":
    _main(sys.argv[1:])
