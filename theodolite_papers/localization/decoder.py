"""The decoder that Bao et al. 2024 train (section 7, appendix D): fairseq's `transformer_lm`, Post-LN, in plain torch.

Written for speed on one processor core; `as_opt` gives the same function as a model that `transformers` opens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import OPTConfig, OPTForCausalLM

OFFSET = 2  # fairseq counts positions from its padding index + 1, and OPT has kept that
CPU_ROWS = 256  # tokens whose logits are held at once: with 2,048 words they stay in the second-level cache
GPU_LOGITS = 1 << 27
OPT_NAMES = {
    "output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "widen": "fc1",
    "narrow": "fc2",
    "norm": "final_layer_norm",
}
"""What `transformers` calls the parts of a block."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes. As published, queries, keys, values and the feed-forward layer are all `width` wide, with one head."""

    vocabulary: int
    width: int
    layers: int
    length: int
    dropout: float


class Block(nn.Module):
    """Attention and feed-forward, each followed by dropout, the residual sum and its LayerNorm (Post-LN)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.width
        self.dropout = shape.dropout
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, width)
        self.narrow = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        for part in self.projections.weight.chunk(3):  # fairseq's MultiheadAttention.reset_parameters
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Compute the residual stream after this block."""
        query, key, value = self.projections(x).unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        x = self.attention_norm(x + self._dropped(self.output(mixed)))
        return self.norm(x + self._dropped(self.narrow(torch.relu(self.widen(x)))))

    def logits(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length length"]:
        """Compute the attention logits of every query over every key, also of those that the mask hides; float64."""
        query, key, _ = self.projections(x).double().chunk(3, dim=-1)
        return query @ key.mT / math.sqrt(x.shape[-1])

    def factors(self) -> tuple[Float[Tensor, "1 width width"], Float[Tensor, "1 width width"]]:
        """Return W_q and W_k of the one head, as views of the parameters."""
        query, key, _ = self.projections.weight.chunk(3)
        return query.mT[None], key.mT[None]

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Embedding times √d plus fixed sinusoids, dropout, the blocks; an untied output matrix without bias."""

    positions: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * shape.width**-0.5)
        self.unembedding = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * shape.width**-0.5)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.register_buffer("positions", fairseq_sinusoids(shape.length, shape.width), persistent=False)

    def streams(self, ids: Int[Tensor, "batch length"]) -> list[Float[Tensor, "batch length width"]]:
        """Compute the residual stream that each block reads, and the one after the last."""
        x = functional.embedding(ids, self.embedding) * math.sqrt(self.shape.width)
        x = x + self.positions[: ids.shape[1]]
        if self.shape.dropout:
            x = functional.dropout(x, self.shape.dropout, self.training)
        streams = [x]
        for block in self.blocks:
            streams.append(block(streams[-1]))
        return streams

    def loss(
        self, ids: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], dtype: torch.dtype
    ) -> Float[Tensor, ""]:
        """Compute the mean loss in nats per token; `dtype` is that of the products with the output matrix."""
        hidden = self.streams(ids)[-1].flatten(0, 1)
        return next_token_loss(hidden, self.unembedding, targets.flatten(), dtype)

    @torch.no_grad()
    def losses(
        self, ids: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length"]:
        """Compute the loss of every token in nats, in the weights' own dtype throughout."""
        rows = zip(self.streams(ids)[-1], targets, strict=True)
        losses = functional.cross_entropy
        return torch.stack([losses(x @ self.unembedding.mT, to, reduction="none") for x, to in rows])


def fairseq_sinusoids(length: int, width: int) -> Float[Tensor, "length width"]:
    """Return fairseq's fixed positions: all sines, then all cosines; the first token is at position `OFFSET`."""
    half = width // 2
    rates = torch.exp(torch.arange(half) * -(math.log(10000) / max(1, half - 1)))
    angles = torch.arange(OFFSET, OFFSET + length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class _NextTokenLoss(torch.autograd.Function):
    """Cross-entropy with its gradients made on the way, a few hundred tokens at a time."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Float[Tensor, "tokens width"],
        unembedding: Float[Tensor, "vocabulary width"],
        targets: Int[Tensor, " tokens"],
        dtype: torch.dtype,
    ) -> Float[Tensor, ""]:
        count = len(hidden)
        rows = CPU_ROWS if hidden.device.type == "cpu" else max(CPU_ROWS, GPU_LOGITS // len(unembedding))
        narrow, matrix = hidden.to(dtype), unembedding.to(dtype)
        transposed = matrix.mT.contiguous()
        total = hidden.new_zeros((), dtype=torch.float64)
        expected = torch.empty_like(narrow)  # Σ_v p_v w_v of every token
        counted = unembedding.new_zeros(unembedding.shape[::-1])  # Σ_tokens p_v h, transposed
        for start in range(0, count, rows):
            part = narrow[start : start + rows]
            shares = torch.softmax(part @ transposed, dim=1)
            right = shares.gather(1, targets[start : start + rows, None])
            total -= right.double().log().sum()
            torch.mm(shares, matrix, out=expected[start : start + rows])
            counted += part.mT @ shares
        by_hidden = (expected.to(hidden.dtype) - unembedding[targets]) / count
        by_matrix = counted.mT.contiguous().index_add_(0, targets, hidden, alpha=-1).div_(count)
        context.save_for_backward(by_hidden, by_matrix)
        return (total / count).to(hidden.dtype)

    @staticmethod
    def backward(context: Any, *upstream: Any) -> Any:
        by_hidden, by_matrix = context.saved_tensors
        return by_hidden * upstream[0], by_matrix * upstream[0], None, None


def next_token_loss(
    hidden: Float[Tensor, "tokens width"],
    unembedding: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, " tokens"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, ""]:
    """Compute mean −ln softmax(h Wᵀ)[target] in nats, with its gradient; products in `dtype`, sums in float64.

    In bfloat16 the mean loss is off by less than 0.002 and its gradient by less than 1 % of its norm, 12 times as fast.
    """
    return _NextTokenLoss.apply(hidden, unembedding, targets, dtype)


def as_opt(decoder: Decoder) -> OPTForCausalLM:
    """Convert to an OPT model of the same function, no LayerNorm before sublayers: positions in its table, √d in its
    embedding. Training it further would train the positions too, and at another rate of the embedding."""
    shape = decoder.shape
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            ffn_dim=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=1,
            max_position_embeddings=shape.length,
            word_embed_proj_dim=shape.width,
            do_layer_norm_before=False,
            activation_function="relu",
            dropout=shape.dropout,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    table = torch.zeros(shape.length + OFFSET, shape.width)
    table[OFFSET:] = decoder.positions
    weights = {
        "model.decoder.embed_tokens.weight": decoder.embedding * math.sqrt(shape.width),
        "model.decoder.embed_positions.weight": table,
        "lm_head.weight": decoder.unembedding,
    }
    for index, block in enumerate(decoder.blocks):
        layer, parameters = f"model.decoder.layers.{index}", dict(block.named_parameters())
        for kind in ("weight", "bias"):
            for of, rows in zip("qkv", parameters.pop(f"projections.{kind}").chunk(3), strict=True):
                weights[f"{layer}.self_attn.{of}_proj.{kind}"] = rows
        for name, value in parameters.items():
            part, _, kind = name.partition(".")
            weights[f"{layer}.{OPT_NAMES[part]}.{kind}"] = value
    model.load_state_dict({name: value.detach().cpu() for name, value in weights.items()})
    return model.eval()
