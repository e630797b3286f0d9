"""Where a result comes from: packages, model, text, seed and counts, and how its tokens read."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import torch
import transformers

import theodolite
from theodolite.corpus import Corpus
from theodolite.models import OpenModel
from theodolite.run import SCHEMA_VERSION


def versions() -> dict[str, str]:
    """Of everything that has a part in the numbers."""
    return {
        "theodolite": theodolite.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def describe_model(model: OpenModel) -> dict[str, Any]:
    """The part of the provenance that is of the model and of the packages."""
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "model": {
            "id": model.id,
            "revision": model.revision,
            "sha256": model.sha256,
            "architecture": type(model.hf).__name__,
            "family": model.hf.config.model_type,
            "parameters": model.hf.num_parameters(),
            "dtype": str(model.hf.dtype).removeprefix("torch."),
            "layers": model.layers,
            "heads": model.heads,
            "width": model.width,
            "head_width": model.head_width,
            "vocabulary": model.vocabulary,
            "causal": model.causal,
            "positions": model.positions,
        },
        "device": model.device.type,
    }


def describe_pass(
    model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """The part of the provenance that is of this corpus and this pass."""
    contexts, length = corpus.contexts.shape
    return {
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "contexts": contexts,
            "length": length,
            "labels": corpus.label_names,
            "seed": corpus.seed,
        },
        "counts": {
            "contexts": contexts,
            "tokens": contexts * length,
            "unknown_tokens": _unknown_tokens(model, corpus),
        },
        "seed": seed,
        "fingerprint": fingerprint,
        "wall_seconds": seconds,
    }


def token_text(model: OpenModel) -> Callable[[int], str]:
    """The text of a token id; tokens that are part of a character are shown as the vocabulary has them."""
    tokenizer = model.tokenizer

    @functools.cache
    def text(token: int) -> str:
        if tokenizer is None:
            return str(token)
        decoded = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        raw = tokenizer.convert_ids_to_tokens(token)
        return str(raw) if "\ufffd" in decoded or not decoded else decoded

    return text


def _unknown_tokens(model: OpenModel, corpus: Corpus) -> int:
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    return 0 if unknown is None else int((corpus.contexts == unknown).sum())
