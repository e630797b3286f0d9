"""Make the random models that benchmarks measure."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WIDTH, HEADS = 768, 12


def gpt2(layers: int, vocabulary: int = 50257) -> GPT2LMHeadModel:
    """Make a random model of GPT-2's width, without special tokens where the vocabulary is a small one."""
    torch.manual_seed(0)
    more = {} if vocabulary == 50257 else {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=HEADS, vocab_size=vocabulary, **more)
    )


def of_smollm2() -> LlamaForCausalLM:
    """Make a random model of the shape of SmolLM2-135M, for where the real one is absent."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=30,
            hidden_size=576,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    )
