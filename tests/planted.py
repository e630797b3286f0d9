"""Checkpoints with planted sinks: which tokens they are, of which heads, what they catch, and the tags they write.

Half of the ordinary tokens (A) are sent by head (0, 1) to the token S1. Independently, a third (B) is sent by head
(0, 2) to S1 and by head (1, 3) to the first token, and a third (C) by both to S2. All other heads attend evenly.
Embeddings have mean zero and a mean square of one, so that the first norm does nothing to them. The perceptron of
layer 2 takes dimension `OUTLIER` out again, in which head (0, 1) tags; nothing is done to the other tags.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

WIDTH, HEADS, LAYERS, HEAD_WIDTH, VOCABULARY = 64, 4, 4, 16, 63
S1, S2, BOS = 60, 61, 62

IS_A, IS_B, IS_C, IS_S1, IS_S2, IS_BOS, BALANCE = range(7)
"""Dimensions of the embedding."""

MARK = 3.0
LOGIT = (9.0, 36.0)
"""Of a token and its sink in layers 0 and 1 (there, before what tags do to norms: a third); other logits are 0."""

OUTLIER = 40
"""The dimension in which head (0, 1) tags."""

LENGTH = 60

# (layer, head, the sink's marker, the dimension of those that it catches)
SINKS = ((0, 1, IS_S1, IS_A), (0, 2, IS_S1, IS_B), (0, 2, IS_S2, IS_C), (1, 3, IS_BOS, IS_B))
SINKS += ((1, 3, IS_S2, IS_C),)
SHORT = 0.03
"""What tokens that are no sinks write, relative to their embeddings."""

TAG_LENGTH = (20.0, 6.0, 6.0, 6.0, 6.0)


def embeddings() -> torch.Tensor:
    """(VOCABULARY, WIDTH) float64: mean 0, mean square 1. Token 6 i + j has the j-th pair of attributes."""
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)
    content = torch.randn(VOCABULARY, 24, generator=generator, dtype=torch.float64)
    for token in range(60):
        table[token, IS_A] = MARK * (token % 2)
        table[token, (IS_B, IS_C, BALANCE)[token % 3]] = MARK * (token % 3 < 2)
    table[S1, IS_S1] = table[S2, IS_S2] = table[BOS, IS_BOS] = MARK
    table[:, BALANCE] = -table.sum(dim=1)
    content -= content.mean(dim=1, keepdim=True)
    rest = WIDTH - table.square().sum(dim=1, keepdim=True)
    table[:, 8:32] = content * (rest / content.square().sum(dim=1, keepdim=True)).sqrt()
    return table


def tag(number: int) -> torch.Tensor:
    """What the sink SINKS[number] writes into a token that it catches, (WIDTH), mean 0, of its TAG_LENGTH."""
    generator = torch.Generator().manual_seed(10 + number)
    direction = 0.1 * torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    if number == 0:
        direction.zero_()[OUTLIER] = 1.0
    direction[:8] = 0.0  # so that later layers read the attributes as they were
    direction[8:] -= direction[8:].mean()
    return TAG_LENGTH[number] * direction / torch.linalg.vector_norm(direction)


def contexts(count: int, seed: int = 0) -> torch.Tensor:
    """(count, LENGTH): BOS, S1 and S2 among the next five tokens, then all pairs of attributes equally often."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        start = [S1, S2, *(6 * generator.integers(0, 10, 3) + 2)]  # of neither attribute
        kinds = np.tile(np.arange(6), (LENGTH - 6) // 6)
        body = 6 * generator.integers(0, 10, len(kinds)) + generator.permutation(kinds)
        rows.append([BOS, *generator.permutation(start), *body])
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def attention(ids: np.ndarray, head: int) -> np.ndarray:
    """The attention of a head of layer 0 on one context (T, T), from nothing but what is planted."""
    table = embeddings().numpy()
    logits = np.zeros((len(ids), len(ids)))
    for layer, planted, marker, reader in SINKS:
        if (layer, planted) == (0, head):
            logits += LOGIT[0] * np.outer(table[ids, reader] > 0, table[ids, marker] > 0)
    weights = np.exp(logits) * np.tri(len(ids))
    return weights / weights.sum(1, keepdims=True)


def written(ids: np.ndarray, head: int) -> np.ndarray:
    """What each token of a context writes where a head of layer 0 attends to it (T, WIDTH)."""
    table = embeddings().numpy()
    values = np.zeros((len(ids), WIDTH))
    values[:, 50:55] = SHORT * table[ids, 8:13]
    for number, (layer, planted, marker, _) in enumerate(SINKS):
        if (layer, planted) == (0, head):
            values += np.outer(table[ids, marker] > 0, tag(number).numpy())
    return values


def _matrices(layer: int) -> dict[str, torch.Tensor]:
    """W_q, W_k, W_v, W_O (in, out) of one layer; keys and values of two neighbouring heads are the same."""
    features = HEADS * HEAD_WIDTH
    w = {name: torch.zeros(WIDTH, features, dtype=torch.float64) for name in "qkv"}
    w["o"] = torch.zeros(features, WIDTH, dtype=torch.float64)
    for number, (at, head, marker, reader) in enumerate(SINKS):
        if at != layer:
            continue
        axis = 7 if marker != IS_S2 else 6  # the slowest of RoPE's frequencies
        w["q"][reader, HEAD_WIDTH * head + axis] = LOGIT[layer] * math.sqrt(HEAD_WIDTH) / MARK
        pair = head // 2 * 2
        for twin in (pair, pair + 1):
            w["k"][marker, HEAD_WIDTH * twin + axis] = 1 / MARK
            w["v"][marker, HEAD_WIDTH * twin + axis] = 1 / MARK
            # What the other tokens write is short, and W_O reads it.
            w["v"][8:13, HEAD_WIDTH * twin : HEAD_WIDTH * twin + 5] = SHORT * torch.eye(
                5, dtype=torch.float64
            )
        w["o"][HEAD_WIDTH * head + axis] = tag(number)
        w["o"][HEAD_WIDTH * head : HEAD_WIDTH * head + 5, 50:55] = torch.eye(5, dtype=torch.float64)
    return w


# A perceptron reads a caught token divided by its norm, which tags made longer.
_REMOVED = math.sqrt(1 + (TAG_LENGTH[0] ** 2 + 2 * TAG_LENGTH[1] ** 2) / WIDTH)


def build(family: str) -> Any:
    """The planted model, float64: "gpt2" or "llama"."""
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if family == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        config = transformers.GPT2Config(**sizes, n_positions=64, **none)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            intermediate_size=8,
            max_position_embeddings=64,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e12},
            **none,
        )
        model = transformers.LlamaForCausalLM(config)
    model = model.double().eval()
    norms = [p for name, p in model.named_parameters() if p.ndim == 1 and "weight" in name]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in norms:
            norm.fill_(1.0)
        model.get_input_embeddings().weight.copy_(embeddings())
        (_plant_gpt2 if family == "gpt2" else _plant_llama)(model)
    return model


def _plant_gpt2(model: Any) -> None:
    for layer, block in enumerate(model.transformer.h):
        w = _matrices(layer)
        block.attn.c_attn.weight.copy_(torch.cat([w["q"], w["k"], w["v"]], dim=1))
        block.attn.c_proj.weight.copy_(w["o"])
    mlp = model.transformer.h[2].mlp
    mlp.c_fc.weight[OUTLIER, 0], mlp.c_fc.bias[0] = 1.0, 30.0  # gelu(z + 30) = z + 30
    mlp.c_proj.weight[0, OUTLIER], mlp.c_proj.bias[OUTLIER] = -_REMOVED, 30.0 * _REMOVED


def _plant_llama(model: Any) -> None:
    key_heads = torch.arange(HEADS * HEAD_WIDTH).view(HEADS, HEAD_WIDTH)[::2].flatten()
    for layer, block in enumerate(model.model.layers):
        w = _matrices(layer)
        block.self_attn.q_proj.weight.copy_(w["q"].T)
        block.self_attn.k_proj.weight.copy_(w["k"][:, key_heads].T)
        block.self_attn.v_proj.weight.copy_(w["v"][:, key_heads].T)
        block.self_attn.o_proj.weight.copy_(w["o"].T)
    mlp = model.model.layers[2].mlp
    mlp.gate_proj.bias[0] = 40.0  # silu(40) = 40
    mlp.up_proj.weight[0, OUTLIER] = 1.0
    mlp.down_proj.weight[OUTLIER, 0] = -_REMOVED / 40


def write(family: str, folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """Write the planted model to `folder` and return it."""
    build(family).to(dtype).save_pretrained(folder)
    return folder
