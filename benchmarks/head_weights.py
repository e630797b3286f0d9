"""Reading the weights of all heads over a bare pass of 4,096 tokens, in a model of SmolLM's sizes with random weights.

30 layers × 9 heads (3 key heads), d = 576.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import Ratio, in_turns, over
from theodolite import open_model

SIZES = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
TOKENS, ROUNDS, BUDGET = 4096, 3, 0.3


def measure(device: str) -> Iterator[Ratio]:
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=1536, vocab_size=49152)).to(device)  # type: ignore[arg-type]
    model = open_model(hf)
    ids = torch.randint(49152, (TOKENS // 256, 256))
    works = {
        "pass": lambda: model.forward(ids),
        "weights": lambda: [model.head_weights(layer) for layer in range(model.layers)],
    }
    times = in_turns(works, ROUNDS, device)
    what = f"weights of {model.layers} × {model.heads} heads / a bare pass of 4,096 tokens"
    yield Ratio.of(what, over(times["weights"], times["pass"]), BUDGET)
