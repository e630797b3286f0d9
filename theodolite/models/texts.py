"""Texts and images as a model reads them, and texts as it writes them: prompts, continuations, the texts of tokens.

One after the other, the texts of tokens are the text, with its spaces between words. A tokenizer drops the space in
front of the first token that it is asked for: a token is read behind an anchor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedModel

from theodolite.corpus.corpus import Corpus
from theodolite.corpus.documents import Document
from theodolite.corpus.images import Picture, PicturedTextReader, TransformedImages
from theodolite.corpus.sampling import LEAST_LENGTH
from theodolite.corpus.special_tokens import known_texts, repeated_random_tokens
from theodolite.errors import UsageError, first_line
from theodolite.models.guard import measures
from theodolite.models.hooks import positions_read
from theodolite.models.opened import OpenModel
from theodolite.models.source import decode_greedily
from theodolite.models.stored.loading import LOADING_ERRORS, reason_of, without_progress_bars
from theodolite.system.progress import ShowProgress
from theodolite.system.wording import counted

REPEATED = 48
"""Tokens of the default prompt at most: 24 random ones, twice, as for induction heads (Olsson et al. 2022)."""

PIXELS = "pixel_values"


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


def image_reader(model: OpenModel) -> TransformedImages:
    """Describe how a model reads images: pass it to `Corpus.from_path` in place of a tokenizer.

    `UsageError`: it reads no images, has no image processor, or tokens that are no grid of patches.
    """
    source = model.id
    if not isinstance(model.root, PreTrainedModel):
        raise UsageError(
            f"{source} is a module of its own, which has no image processor: give "
            "TransformedImages(transform, patch=(rows, columns)), as in docs/survey.md"
        )
    config = model.root.config
    if model.source.reads != PIXELS:
        raise UsageError(f"{source} reads {model.source.reads}, not images")
    tokens = positions_read(model, model.source.sample(1))
    size, patch = (_sides(getattr(config, name, None)) for name in ("image_size", "patch_size"))
    if size is None or patch is None:
        raise UsageError(f"{source}: its config.json does not say how its images are cut into patches")
    leading = tokens - (size[0] // patch[0]) * (size[1] // patch[1])
    registers = int(getattr(config, "num_register_tokens", 0) or 0)
    others = leading - 1 - registers  # DeiT has one, for its teacher
    if (leading or registers) and others not in (0, 1):
        raise UsageError(
            f"{source} makes {tokens} tokens of an image of {size[0]} × {size[1]} pixels: they are no grid of patches"
        )
    before = ("[CLS]", *["token 1"] * others, *(f"register {1 + number}" for number in range(registers)))
    processor = _loaded(AutoImageProcessor, model, "image processor", "preprocessor_config.json")
    # Values are (colour · rescale_factor − mean) / deviation, where the processor does either.
    factor = processor.rescale_factor if getattr(processor, "do_rescale", True) else 1.0
    normalized = getattr(processor, "do_normalize", False)
    colours = (processor.image_mean, processor.image_std) if normalized else (0, 1)
    mean, deviation = (tuple(np.atleast_1d(each) / (255 * factor)) for each in colours)
    return TransformedImages(functools.partial(_pixels, processor), patch, before[:leading], mean, deviation)


def pictured_text_reader(model: OpenModel) -> PicturedTextReader:
    """Describe how a model reads a text with a picture in it; `UsageError` where it cannot, or has no processor."""
    token = getattr(getattr(model.root, "config", None), "image_token_id", None)
    if token is None or model.vocabulary is None:
        raise UsageError(f"{model.id} reads no images in a text (its config has no image_token_id)")
    processor = _loaded(AutoProcessor, model, "processor of images and text", "processor_config.json")
    tokenizer = processor.tokenizer  # its own, and not the model's, which stays as it is
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    read = functools.partial(_ids_and_tensors, processor)
    return PicturedTextReader(tokenizer, int(token), model.vocabulary, read)


def _ids_and_tensors(processor: Any, document: Document) -> tuple[list[int], dict[str, Tensor]]:
    """Read a text and its picture, which stands before it where the text does not say where."""
    assert document.picture is not None
    text, mark = document.text, str(processor.image_token)
    picture = Picture(f"the picture in {document.name}", document.picture).open()
    try:
        read = processor(text=text if mark in text else mark + text, images=picture, return_tensors="pt")
    except Exception as error:  # whatever a family's own code raises
        raise UsageError(
            f"{document.name}: the processor refuses its text and picture ({first_line(error)})"
        ) from error
    tensors = {name: values for name, values in read.items() if isinstance(values, Tensor)}
    ids = tensors.pop("input_ids")[0].tolist()
    tensors.pop("attention_mask", None)
    return ids, tensors


def _loaded(loader: Any, model: OpenModel, what: str, file: str) -> Any:
    try:
        with without_progress_bars():
            options = {"revision": model.revision, "backend": "pil", "trust_remote_code": False}
            return loader.from_pretrained(model.id, **options)
    except LOADING_ERRORS as error:
        raise UsageError(
            f"{model.id} has no {what} that can be read ({reason_of(error)}): save its {file} beside its weights"
        ) from error


def _pixels(processor: Any, image: Any) -> Tensor:
    return processor(images=image, return_tensors="pt")[PIXELS][0]


def _sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) and len(size) == 2 else None
