"""The architectures of the papers' small models and their sizes: GPT-2, or GPT-NeoX with rotary positions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import transformers

from theodolite.system.processor import multiplies_halves

ATTENTION = "eager"
"""On a CPU, the backward pass of `sdpa` in bfloat16 takes a quarter of a task model's step, this one little."""

GELU = "gelu_pytorch_tanh"
"""GPT-2's own, in one step."""

FINAL_RATE = 0.1  # of the peak learning rate, where a cosine ends

OR_ZERO = {"or_zero": True}  # metadata of a field that need not be positive


@dataclass(frozen=True)
class LearningRate:
    """The learning rate by step: a line from 0 over `warm_up`, then level, a cosine to `FINAL_RATE`, or a line to 0."""

    peak: float
    warm_up: int = 1
    decay: Literal["none", "cosine", "linear"] = "none"
    steps: int = 0

    def at(self, step: int) -> float:
        """Return the learning rate of a step."""
        done = max(0.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        share = {
            "none": 1.0,
            "cosine": FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
        }[self.decay]
        return self.peak * (min(1.0, (step + 1) / self.warm_up) * share)


@dataclass(frozen=True)
class ModelConfig(ABC):
    """Sizes and schedule of a model's training run."""

    layers: int
    heads: int
    width: int
    batch: int  # contexts per step
    steps: int
    learning_rate: float  # the peak
    weight_decay: float = field(default=0.1, kw_only=True, metadata=OR_ZERO)  # on matrices only
    # Products in bfloat16 (torch.autocast), where this processor has them; weights and optimizer stay in float32.
    bfloat16: bool = field(default_factory=multiplies_halves, kw_only=True)
    checkpoint_every: int = field(default=250, kw_only=True)  # steps
    seed: int = field(default=0, kw_only=True, metadata=OR_ZERO)

    @property
    @abstractmethod
    def rate(self) -> LearningRate:
        """The learning rate by step."""


@dataclass(frozen=True)
class TaskModelConfig(ModelConfig):
    """Sizes and schedule of a model of a task. `tasks.PUBLISHED` has the settings of the paper."""

    schedule: Literal["cosine", "linear"]  # to FINAL_RATE of the peak, or to 0
    dropout: float = field(default=0.0, metadata=OR_ZERO)
    positions: str = "learned"  # or "rotary"
    warm_up: int = 100  # steps

    @property
    def rate(self) -> LearningRate:
        """Linear warm-up, then the cosine or the line of `schedule`."""
        return LearningRate(self.learning_rate, self.warm_up, self.schedule, self.steps)


def gpt2(
    vocabulary: int, length: int, layers: int, heads: int, width: int, *, dropout: float = 0.0, **options: Any
) -> transformers.GPT2LMHeadModel:
    """Make an untrained model, its weights drawn from torch's global generator."""
    options |= {"vocab_size": vocabulary, "n_positions": length, "bos_token_id": None, "eos_token_id": None}
    options |= {"n_embd": width, "n_layer": layers, "n_head": heads}
    options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def task_model(config: TaskModelConfig, vocabulary: int, length: int) -> transformers.PreTrainedModel:
    """Make an untrained GPT-2, or with rotary positions GPT-NeoX without its parallel residual."""
    if config.positions == "learned":
        sizes = vocabulary, length, config.layers, config.heads, config.width
        model: transformers.PreTrainedModel = gpt2(*sizes, dropout=config.dropout, activation_function=GELU)
    else:
        model = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                vocab_size=vocabulary,
                max_position_embeddings=length,
                hidden_size=config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=4 * config.width,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                use_parallel_residual=False,
                hidden_dropout=config.dropout,
                attention_dropout=config.dropout,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    model.set_attn_implementation(ATTENTION)
    return model
