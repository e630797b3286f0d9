"""Make the random GPT-2 that benchmarks measure."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WIDTH, HEADS = 768, 12


def gpt2(layers: int, vocabulary: int = 50257) -> GPT2LMHeadModel:
    """Make a random model of GPT-2's width, without special tokens where the vocabulary is a small one."""
    torch.manual_seed(0)
    more = {} if vocabulary == 50257 else {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=HEADS, vocab_size=vocabulary, **more)
    )
