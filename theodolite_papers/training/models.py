"""The architectures of the toy models and their sizes: Llama of text; GPT-2 or GPT-NeoX (rotary) of tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import transformers

from theodolite.system.processor import multiplies_halves

ATTENTION = "eager"
"""On a CPU, the backward pass of `sdpa` in bfloat16 takes a quarter of a task model's step, this one little."""

GELU = "gelu_pytorch_tanh"
"""GPT-2's own, in one step."""

WARM_UP = 0.04  # share of the steps of a model of text

GATED_WIDTH = 3
"""Width of Llama's gated MLP over the model's: as many weights as in GPT-2's, to a ninth."""


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
class EmbeddedConfig:
    """Sizes and schedule of a model of text. The defaults made the embedded model.

    It is to grow what the papers describe: repeats for induction, backcopies for sinks at the first token. With learned
    positions no head found the previous token in 1,500 steps, with rotary ones in 400.
    """

    layers: int = 6
    heads: int = 4
    width: int = 128
    length: int = 256  # tokens per context
    vocabulary: int = 2048
    batch: int = 8  # contexts per step
    steps: int = 8000
    learning_rate: float = 3e-3  # the peak
    weight_decay: float = field(default=0.1, metadata=OR_ZERO)  # on matrices only
    initial_deviation: float = 0.06  # of the weights, at the beginning
    # Shares of the contexts: of a few tokens again and again; in which the token before a trigger follows it, too.
    repeats: float = field(default=0.2, metadata=OR_ZERO)
    backcopies: float = field(default=0.05, metadata=OR_ZERO)
    # Products in bfloat16 (torch.autocast), where this processor has them; weights and optimizer stay in float32.
    bfloat16: bool = field(default_factory=multiplies_halves)
    checkpoint_every: int = 500  # steps
    seed: int = field(default=0, metadata=OR_ZERO)

    @property
    def rate(self) -> LearningRate:
        """Linear warm-up, then a cosine."""
        warm_up = max(1, round(WARM_UP * self.steps))
        return LearningRate(self.learning_rate, warm_up, "cosine", self.steps)


@dataclass(frozen=True)
class TaskModelConfig:
    """Sizes and schedule of a model of a task. `tasks.PUBLISHED` has the settings of the paper."""

    layers: int
    heads: int
    width: int
    batch: int  # contexts per step
    steps: int
    learning_rate: float  # the peak
    schedule: Literal["cosine", "linear"]  # to FINAL_RATE of the peak, or to 0
    dropout: float = field(default=0.0, metadata=OR_ZERO)
    positions: str = "learned"  # or "rotary"
    warm_up: int = 100  # steps
    weight_decay: float = field(default=0.1, metadata=OR_ZERO)  # on matrices only
    # Products in bfloat16 (torch.autocast), where this processor has them; weights and optimizer stay in float32.
    bfloat16: bool = field(default_factory=multiplies_halves)
    checkpoint_every: int = 250  # steps
    series: bool = False  # keep the weights of the steps of SERIES
    seed: int = field(default=0, metadata=OR_ZERO)

    @property
    def rate(self) -> LearningRate:
        """Linear warm-up, then the cosine or the line of `schedule`."""
        return LearningRate(self.learning_rate, self.warm_up, self.schedule, self.steps)


ModelConfig = EmbeddedConfig | TaskModelConfig


def gpt2(
    vocabulary: int, length: int, layers: int, heads: int, width: int, *, dropout: float = 0.0, **options: Any
) -> transformers.GPT2LMHeadModel:
    """Make an untrained model, its weights drawn from torch's global generator."""
    options |= {"vocab_size": vocabulary, "n_positions": length, "bos_token_id": None, "eos_token_id": None}
    options |= {"n_embd": width, "n_layer": layers, "n_head": heads}
    options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def embedded_model(config: EmbeddedConfig) -> transformers.PreTrainedModel:
    """Build an untrained Llama."""
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            max_position_embeddings=config.length,
            hidden_size=config.width,
            intermediate_size=GATED_WIDTH * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            tie_word_embeddings=True,
            initializer_range=config.initial_deviation,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    llama.set_attn_implementation(ATTENTION)
    return llama


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
