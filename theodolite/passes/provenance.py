"""Where a result comes from: packages, model, text, seed and counts, and how its tokens read."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import theodolite
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel
from theodolite.passes.run import SCHEMA_VERSION


def versions() -> dict[str, str]:
    """Of everything that has a part in the numbers."""
    return {
        "theodolite": theodolite.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
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


def describe_pass(model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any]) -> dict[str, Any]:
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
    }


MOST_PARTS = 12
"""Tokens that are tried together until they are whole characters."""

_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


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


def token_texts(model: OpenModel, ids: Tensor) -> list[str]:
    """The texts of consecutive tokens (T); those that share characters have these, and which part they are: 😀₁ 😀₂."""
    alone = token_text(model)
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        for end in range(start + 2, min(start + MOST_PARTS, len(ids)) + 1):
            if model.tokenizer is None or "\ufffd" not in _decoded(model, ids[start : start + 1]):
                break
            together = _decoded(model, ids[start:end])
            if together and "\ufffd" not in together:
                texts += [
                    (together if part == 1 else together.lstrip()) + str(part).translate(_SUBSCRIPT)
                    for part in range(1, end - start + 1)
                ]
                break
        if len(texts) == start:
            texts.append(alone(int(ids[start])))
    return texts


def _decoded(model: OpenModel, ids: Tensor) -> str:
    assert model.tokenizer is not None
    return str(model.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))


def _unknown_tokens(model: OpenModel, corpus: Corpus) -> int:
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    return 0 if unknown is None else int((corpus.contexts == unknown).sum())
