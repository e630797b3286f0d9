"""Reading the weights of all heads over a bare pass of 4,096 tokens, in a model of SmolLM's sizes with random weights.

`python -m benchmarks.head_weights` prints both times and their ratio: 30 layers × 9 heads (3 key heads), d = 576.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ratios import Ratio, seconds, where
from theodolite import open_model

SIZES = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
TOKENS, ROUNDS, BUDGET = 4096, 3, 0.3


def main(device: str) -> list[Ratio]:
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=1536, vocab_size=49152)).to(device)  # type: ignore[arg-type]
    model = open_model(hf)
    ids = torch.randint(49152, (TOKENS // 256, 256))
    reads, passes, ratios = [], [], []
    for _ in range(ROUNDS):
        passes.append(seconds(lambda: model.forward(ids), device))
        reads.append(seconds(lambda: [model.head_weights(layer) for layer in range(model.layers)], device))
        ratios.append(reads[-1] / passes[-1])
    print(f"weights of {model.layers}×{model.heads} heads, d = {model.width}, {where(device)}")
    print(f"all heads' weights    {statistics.median(reads):8.2f} s")
    print(f"{TOKENS} tokens           {statistics.median(passes):8.2f} s")
    print(f"weights / tokens      {statistics.median(ratios):8.2f} × (budget {BUDGET})")
    return [Ratio.of("all heads' weights / a bare pass of 4,096 tokens", ratios, BUDGET)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    main(parser.parse_args().device)
