"""One prompt, as a model reads it: what is asked for, what the package carries, or random tokens, twice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.corpus.special_tokens import repeated_random_tokens
from theodolite.errors import UsageError
from theodolite.models.opened import OpenModel
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
