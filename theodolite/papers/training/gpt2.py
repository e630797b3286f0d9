"""GPT-2's architecture at any size: the one builder of the trainers."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(
    vocabulary: int,
    length: int,
    layers: int,
    heads: int,
    width: int,
    *,
    dropout: float = 0.0,
    special_token: int | None = None,
    **options: Any,
) -> GPT2LMHeadModel:
    """An untrained model, its weights drawn from torch's global generator.

    Args:
        vocabulary, length: tokens and learned positions.
        dropout: on embeddings, attention and what each sublayer adds.
        special_token: id that begins and ends a text, if any. options: further ones of `GPT2Config`.
    """
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=special_token,
            eos_token_id=special_token,
            **options,
        )
    )
