"""Where a result comes from: packages, model, text, seed and counts."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

import theodolite
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.models import OpenModel
from theodolite.passes.run import SCHEMA_VERSION


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers."""
    return {
        "theodolite": theodolite.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def describe_model(model: OpenModel) -> dict[str, Any]:
    """Describe the model and the packages, for the provenance."""
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "model": {
            "id": model.id,
            **model.weights().described(),
            "architecture": model.source.name,
            "family": model.source.family,
            "parameters": sum(p.numel() for p in model.root.parameters()),
            "dtype": str(model.source.dtype).removeprefix("torch."),
            "layers": model.layers,
            "heads": model.heads,
            "width": model.width,
            "head_width": model.head_width,
            "vocabulary": model.vocabulary,
            "causal": model.causal,
            "positions": model.positions,
            **({"attention": model.source.attention} if model.source.attention else {}),
        },
        "device": model.device.type,
    }


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """Describe the corpus, for the provenance."""
    contexts, length = corpus.contexts.shape
    images = corpus.images
    of_images = {} if images is None else {"grid": images.grid.described(), "pixels": list(images.size)}
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "contexts": contexts,
        "length": length,
        **({} if corpus.lengths is None else {"shortest": int(corpus.lengths.min())}),
        "labels": corpus.label_names,
        "seed": corpus.seed,
        **corpus.selection,
        **of_images,
    }


def describe_pass(model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Describe the corpus, the seed and the counts of a pass, for the provenance."""
    trailing = trailing_special_tokens(model.tokenizer, corpus.contexts, corpus.lengths)
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    return {
        "corpus": describe_corpus(corpus) | {"trailing_special_tokens": trailing},
        "counts": {
            "contexts": len(corpus.contexts),
            "tokens": len(corpus.tokens),
            "unknown_tokens": 0 if unknown is None else int((corpus.tokens == unknown).sum()),
        },
        "seed": seed,
        "fingerprint": fingerprint,
    }
