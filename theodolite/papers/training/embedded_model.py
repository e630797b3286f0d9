"""The architectures of the embedded-model trainer: GPT-2's, or gpt-oss's where heads have a no-op option.

A no-op option is a term in every softmax that carries no value. gpt-oss has one, a learned sink logit per head; fixed
at 0 it is the softmax off by one, with 1 + Σ eˣ in the denominator; fixed far below all other logits it has no effect.
So the three are one architecture with the same number of weights, but for the sink logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from theodolite.errors import UsageError
from theodolite.papers.training.gpt2 import gpt2

NoOp = Literal["none", "off-by-one", "learned"]
NO_OPS: tuple[NoOp, ...] = ("none", "off-by-one", "learned")

ABSENT_LOGIT = -1e4
"""A logit whose weight in a softmax is 0 in every dtype: no other logit comes near."""

GATED_WIDTH = 3
"""Width of gpt-oss's gated MLP over the model's: as many weights as in GPT-2's, to a ninth."""


@dataclass(frozen=True)
class EmbeddedConfig:
    """Sizes and schedule of a model. The defaults made the embedded model."""

    layers: int = 6
    heads: int = 4
    width: int = 128
    length: int = 256  # tokens per context, and learned positions
    vocabulary: int = 2048
    batch: int = 16  # contexts per step
    steps: int = 7000
    learning_rate: float = 2e-3  # the peak
    weight_decay: float = 0.1  # on matrices only
    bfloat16: bool = True  # products in bfloat16 (torch.autocast); weights and optimizer stay in float32
    checkpoint_every: int = 500  # steps
    seed: int = 0
    no_op: NoOp | None = (
        None  # None: GPT-2; else gpt-oss, whose contexts all begin with the end-of-text token
    )


def build(config: EmbeddedConfig) -> PreTrainedModel:
    """A model before its training.

    Raises:
        UsageError: `config.no_op` is none of `NO_OPS`.
    """
    if config.no_op is None:
        return gpt2(
            config.vocabulary, config.length, config.layers, config.heads, config.width, special_token=0
        )
    if config.no_op not in NO_OPS:
        raise UsageError(f"no_op is '{config.no_op}'; choose {', '.join(NO_OPS)}.")
    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=config.vocabulary,
            max_position_embeddings=config.length,
            hidden_size=config.width,
            intermediate_size=GATED_WIDTH * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.width // config.heads,
            num_local_experts=1,
            num_experts_per_tok=1,
            layer_types=["full_attention"] * config.layers,
            sliding_window=config.length,  # read even where no layer has one
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
    )
    model.set_attn_implementation("eager")  # the one that has the learned logit on every processor
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.constant_(parameter, ABSENT_LOGIT if config.no_op == "none" else 0.0)
            parameter.requires_grad_(config.no_op == "learned")
    return model
