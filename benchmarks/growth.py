"""How a survey's time grows: `python -m benchmarks.growth [FOLDER]`, seven minutes on two cores.

Random Llamas, one thing doubled at a time: contexts, their length, layers, heads at the same width. The text pass and
the rest, all of which is the same however many contexts there are, each in seconds beside the bare forward pass. The
last is a model of 1,024 heads in bfloat16. FOLDER (docs/results) gets `growth.json`, shown in docs/images/growth.png.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.survey import bare_seconds, stage_seconds
from benchmarks.timing import in_process, peak_memory
from theodolite.corpus.corpus import Corpus
from theodolite.models import open_model
from theodolite.passes.survey import TEXT_TITLE
from theodolite.system.processor import keep_pages
from tools.real_models import REPOSITORY

VOCABULARY = 8192


@dataclass(frozen=True)
class Size:
    """A model and a text."""

    contexts: int = 16
    length: int = 256
    layers: int = 8
    heads: int = 8
    width: int = 512
    dtype: str = "float32"

    def model(self) -> LlamaForCausalLM:
        """Make the random model."""
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            hidden_size=self.width,
            intermediate_size=8 * self.width // 3,
            vocab_size=VOCABULARY,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, self.dtype))


BASE = Size()
DOUBLED: dict[str, list[Size]] = {
    "contexts": [replace(BASE, contexts=number) for number in (8, 16, 32, 64, 128)],
    "length": [replace(BASE, length=number) for number in (128, 256, 512, 1024, 2048)],
    "layers": [replace(BASE, layers=number) for number in (4, 8, 16, 32)],
    "heads": [replace(BASE, heads=number) for number in (4, 8, 16, 32, 64)],
}
MANY_HEADS = Size(contexts=8, layers=32, heads=32, width=2048, dtype="bfloat16")


def timed(size: Size) -> dict[str, float]:
    """Survey a random model of a size: seconds of the bare pass, of the text pass and of the rest, and GiB."""
    keep_pages()
    with tempfile.TemporaryDirectory() as folder:
        size.model().save_pretrained(folder)
        model = open_model(folder, device="cpu", dtype=size.dtype)
        corpus = Corpus.random_tokens(VOCABULARY, size.length, size.contexts)
        weights = sum(parameter.nbytes for parameter in model.hf.parameters())
        bare, stages = min(bare_seconds(model, corpus, 2)), stage_seconds(model, corpus)
        text = stages.pop(TEXT_TITLE)
        memory = (peak_memory("cpu") - weights) / 2**30
        return {"bare": bare, "text": text, "rest": sum(stages.values()), "gib beyond weights": memory}


def rows() -> Iterator[dict[str, object]]:
    """Survey every size, each in a process of its own, and say so."""
    sizes = [(what, size) for what, of in DOUBLED.items() for size in of]
    for what, size in [*sizes, ("many heads", MANY_HEADS)]:
        row = {"doubled": what, **asdict(size), **in_process("growth", json.dumps(asdict(size)))}
        print(row, flush=True)
        yield row


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(timed(Size(**json.loads(sys.argv[1])))))
    else:
        folder = Path(sys.argv[1]) if sys.argv[1:] else REPOSITORY / "docs" / "results"
        (folder / "growth.json").write_text(json.dumps(list(rows()), indent=1) + "\n")
