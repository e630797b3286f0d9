"""Texts as a model reads and writes them: prompts, greedy continuations, and the texts of tokens.

One after the other, the texts of tokens are the text, with its spaces between words. A tokenizer drops the space in
front of the first token that it is asked for: a token is read behind an anchor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.corpus.special_tokens import known_texts, repeated_random_tokens
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.opened import OpenModel
from theodolite.models.source import decode_greedily
from theodolite.system.progress import ShowProgress
from theodolite.system.wording import counted

REPEATED = 48
"""Tokens of the default prompt at most: 24 random ones, twice, as for induction heads (Olsson et al. 2022)."""


@dataclass(frozen=True)
class Focus:
    """The layer, head and prompt that experiments on a prompt look at.

    Attributes:
        prompt: the text; None: random tokens, twice.
        layer, head: the one head, both or neither; neither: the heads that follow each pattern of attention most.
    """

    prompt: str | None = None
    layer: int | None = None
    head: int | None = None

    def given(self) -> dict[str, str | int]:
        """Return what the user fixed of the experiment, by the names of options."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __post_init__(self) -> None:
        if (self.layer is None) != (self.head is None):
            raise UsageError("one head is a layer and a head in it: give both --layer and --head, or neither")
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("the prompt is empty: give some text")


def shipped_prompt(name: str) -> str:
    """Read a prompt that the package carries: one of `assets/prompts`, such as few-shot or chain-of-thought."""
    path = resources.files("theodolite") / "assets" / "prompts" / f"{name}.txt"
    return path.read_text(encoding="utf-8").strip()


def prompt_ids(model: OpenModel, prompt: str | None, longest: int, seed: int) -> Int[Tensor, " positions"]:
    """Tokenize the prompt, special tokens included; None: random tokens, twice, `longest` at most."""
    if prompt is None:
        vocabulary, length = model.required_vocabulary(), min(REPEATED, longest)
        return repeated_random_tokens(vocabulary, length, 1, seed, below=model.vocabulary)[0][0]
    if model.tokenizer is None:
        raise UsageError(f"{model.id} has no tokenizer to read a prompt with: leave --prompt out")
    text = prompt.encode("utf-8", "replace").decode()  # a shell can hand over half a surrogate pair
    tokens = list(model.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
    if len(tokens) < LEAST_LENGTH:
        found = counted(len(tokens), "token")
        raise UsageError(f"the prompt is {found} long: give one of at least {LEAST_LENGTH}")
    return torch.tensor(tokens)


def prompt_or_shipped(model: OpenModel, prompt: str | None, shipped: str) -> Int[Tensor, " positions"]:
    """Return the prompt asked for, or of the shipped one the last tokens that fit the model's positions."""
    if prompt is None:
        return prompt_ids(model, shipped_prompt(shipped), 0, 0)[-(model.longest or 0) :]
    ids = prompt_ids(model, prompt, 0, 0)
    if not model.has_positions(len(ids)):
        line = f"the prompt is {len(ids)} tokens long: {model.id} has positions for {model.longest}"
        raise UsageError(line)
    return ids


@measures("model")
def continued(
    model: OpenModel,
    corpus: Corpus,
    count: int,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Corpus:
    """Continue every context by `count` tokens of greedy decoding with the model's own cache.

    A context is read as one text, not cut where it ends a sequence. `selection` then says from which position on the
    tokens are the model's (`written_from`). Attention as the model wrote is that which a pass over the corpus reads:
    the logits of a context in each batch are compared.

    Args:
        batch: contexts at a time; None: 4096 tokens' worth.
        show_progress: told (contexts done, contexts in all).

    Raises:
        UsageError: the model predicts no next token, has no positions for so many, or contexts have several lengths.
        WorkError: it writes by other logits than it has of the finished text.
    """
    model.check_writes(corpus.contexts.shape[1], count)
    if not corpus.text_alone:
        raise UsageError("texts with images, or sources beside them, are not continued: give a text alone")
    if corpus.lengths is not None:
        raise UsageError("contexts of several lengths are not continued: give those of one length")
    model.check_tokens(corpus.contexts)
    length = corpus.contexts.shape[1]
    batch = batch or max(1, 4096 // (length + count))
    rows: list[Tensor] = []
    show_progress(0, len(corpus.contexts))
    for part in corpus.contexts.split(batch):
        rows += decode_greedily(model.source, part, count)
        show_progress(len(rows), len(corpus.contexts))
    selection = corpus.selection | {"written_from": length}
    return replace(corpus, contexts=torch.stack(rows), selection=selection, text_bytes=None)


def token_text(model: OpenModel) -> Callable[[int], str]:
    """Return the text of a token id, with a space in front where it begins a word.

    Special tokens, and those that are part of a character, are shown as the vocabulary has them.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        return str
    _, anchor = next(known_texts(tokenizer), ("", []))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    before = decode(anchor)

    @functools.cache
    def text(token: int) -> str:
        whole = decode([*anchor, token])
        shown = whole[len(before) :] if whole.startswith(before) else decode([token])
        unreadable = "\ufffd" in shown or not shown or token in tokenizer.all_special_ids
        return str(tokenizer.convert_ids_to_tokens(token)) if unreadable else shown

    return text


def text_of_tokens(model: OpenModel, corpus: Corpus) -> Callable[[int], str]:
    """Return the text of a token id of a corpus; of images, and of pictures in a text, the name of their part."""
    if corpus.grid is not None:
        return corpus.grid.token_text
    text, pictured = token_text(model), corpus.pictured
    if pictured is None:
        return text
    return lambda token: text(token) if token < pictured.first else f"image {1 + token - pictured.first}"


def token_texts(model: OpenModel, ids: Tensor) -> list[str]:
    """Return the texts of consecutive tokens (T)."""
    return list(map(token_text(model), ids.tolist()))
