"""Tiny random models of images with their image processors, and pictures drawn with NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

SIDE, PATCH = 16, 4
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
OF_PIXELS = {"image_size": SIDE, "patch_size": PATCH}
FAMILIES = {
    "vit": ("ViTModel", "ViTConfig", {"intermediate_size": 32}),
    "dinov2": ("Dinov2Model", "Dinov2Config", {}),
    "dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"num_register_tokens": 4}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {"intermediate_size": 32}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {"intermediate_size": 32}),
}
BEFORE = {"vit": ["[CLS]"], "dinov2": ["[CLS]"]}
BEFORE |= {"dinov2_registers": ["[CLS]", "register 1", "register 2", "register 3", "register 4"]}
BEFORE |= {"siglip": [], "clip": ["[CLS]"]}
SHARPER = {"siglip": 4.0, "clip": 4.0}  # embeddings of these vary more
SHARP = 14.0


def build(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A model with random weights, whose attention is sharp enough for sinks."""
    name, config, more = FAMILIES[family]
    torch.manual_seed(seed)
    made = getattr(transformers, name)(getattr(transformers, config)(**SIZES, **OF_PIXELS, **more))
    sharpen(made, SHARPER.get(family, SHARP))
    return made.eval()


def sharpen(model: torch.nn.Module, factor: float) -> None:
    """Random weights make uniform attention: make keys and what tells the tokens apart larger, and queries alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.bias", "q_proj.bias")):
                parameter.add_(2 * torch.randn(parameter.shape))
            elif any(part in name for part in ("query", "key", "q_proj", "k_proj")):
                parameter.mul_(factor)
            elif any(
                part in name for part in ("cls_token", "register_tokens", "position", "class_embedding")
            ):
                parameter.add_(torch.randn(parameter.shape))


def write(family: str, folder: Path, seed: int = 0) -> Path:
    """Write model and image processor to `folder` and return it."""
    build(family, seed).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


def write_clip(folder: Path) -> Path:
    """A whole CLIP, with the towers of text and images, its image processor, and no tokenizer."""
    config = transformers.CLIPConfig(
        text_config={**SIZES, "intermediate_size": 32, "vocab_size": 60, "max_position_embeddings": 20}
        | {"bos_token_id": 1, "eos_token_id": 2},
        vision_config={**SIZES, **OF_PIXELS, "num_hidden_layers": 3, "intermediate_size": 32},
        projection_dim=8,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


def picture(seed: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """Waves of a seed's own direction and colours, `size` in pixels (width, height)."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    turn, speed = random.uniform(0, np.pi), random.uniform(0.2, 0.9)
    wave = np.sin(speed * (x * np.cos(turn) + y * np.sin(turn)))
    colours = 127 + 60 * wave[..., None] * random.uniform(-1, 1, 3) + random.normal(0, 20, (*wave.shape, 3))
    return Image.fromarray(colours.clip(0, 255).astype(np.uint8))


def draw(folder: Path, labels: list[str], each: int) -> Path:
    """So many pictures in a subfolder for each label ("": in the folder itself)."""
    for number, label in enumerate(labels):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for index in range(each):
            picture(100 * number + index).save(folder / label / f"{index}.png")
    return folder


def pixels_of(image: Image.Image) -> np.ndarray:
    """What `write`'s image processor gives, by PIL and NumPy alone: (channels, height, width)."""
    resized = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), dtype=np.float64)
    return ((resized / 255 - 0.5) / 0.5).transpose(2, 0, 1)
