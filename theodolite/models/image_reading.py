"""Read images as a checkpoint does: by its own image processor, into its tokens, also among those of a text."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedModel

from theodolite.corpus.documents import Document
from theodolite.corpus.images import Picture, PicturedTextReader, TransformedImages
from theodolite.errors import UsageError, first_line
from theodolite.models.hooks import positions_read
from theodolite.models.opened import OpenModel
from theodolite.models.stored.loading import LOADING_ERRORS, reason_of, without_progress_bars

PIXELS = "pixel_values"


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
    return TransformedImages(partial(_pixels, processor), patch, before[:leading], mean, deviation)


def pictured_text_reader(model: OpenModel) -> PicturedTextReader:
    """Describe how a model reads a text with a picture in it; `UsageError` where it cannot, or has no processor."""
    token = getattr(getattr(model.root, "config", None), "image_token_id", None)
    if token is None or model.vocabulary is None:
        raise UsageError(f"{model.id} reads no images in a text (its config has no image_token_id)")
    processor = _loaded(AutoProcessor, model, "processor of images and text", "processor_config.json")
    tokenizer = processor.tokenizer  # its own, and not the model's, which stays as it is
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return PicturedTextReader(tokenizer, int(token), model.vocabulary, partial(_ids_and_tensors, processor))


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
