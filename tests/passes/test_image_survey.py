"""A survey of models of images, against eager models that keep every hidden state and every attention matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from tests import dense, vision
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel, image_reader, open_model
from theodolite.passes.run import Run
from theodolite.passes.survey import survey

SINK = 0.3


@dataclass
class Measured:
    """A survey, and everything of the model on the same pixels."""

    family: str
    model: OpenModel
    corpus: Corpus
    run: Run
    hidden: np.ndarray  # (layers + 1, C, T, d)
    attention: np.ndarray  # (L, C, H, T, T)

    @property
    def leading(self) -> int:
        return len(vision.BEFORE[self.family])


@pytest.fixture(scope="module", params=["dinov2_registers", "siglip"])
def measured(request, tmp_path_factory) -> Measured:
    folder = tmp_path_factory.mktemp(request.param)
    model = open_model(vision.write(request.param, folder / "model"))
    drawn = vision.draw(folder / "images", ["cat", "dog"], 6)
    corpus = Corpus.from_path(drawn, image_reader(model))
    run = survey(model, corpus, batch=5)
    eager = vision.build(request.param).double()
    eager.set_attn_implementation("eager")
    pictures = [vision.pixels_of(Image.open(picture.name)) for picture in corpus.images.pictures]
    blocks = next(
        module for module in eager.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == 2
    )
    hidden: list[torch.Tensor] = []
    blocks[0].register_forward_pre_hook(
        lambda _, a, k: hidden.append(k["hidden_states"] if "hidden_states" in k else a[0]), with_kwargs=True
    )
    for block in blocks:
        block.register_forward_hook(lambda _, a, o: hidden.append(o[0] if isinstance(o, tuple) else o))
    with torch.no_grad():
        output = eager(torch.from_numpy(np.stack(pictures)), output_attentions=True)
    return Measured(
        request.param,
        model,
        corpus,
        run,
        np.stack([h.numpy() for h in hidden]),
        np.stack([a.numpy() for a in output.attentions]),
    )


def close(got, expected, rtol=1e-4, atol=1e-5):
    np.testing.assert_allclose(np.asarray(got, dtype=np.float64), expected, rtol=rtol, atol=atol)


def test_tokens_are_named_and_the_grid_is_kept(measured):
    said = measured.run.provenance["corpus"]
    assert said["grid"] == {"rows": 4, "columns": 4, "before": vision.BEFORE[measured.family]}
    assert said["pixels"] == [16, 16]
    assert said["length"] == 16 + measured.leading
    assert measured.hidden.shape[2] == said["length"]
    first = measured.run.examples[measured.run.examples["context"] == 0]["token"].tolist()
    patches = [f"patch {row},{column}" for row in range(4) for column in range(4)]
    assert first == vision.BEFORE[measured.family] + patches


def test_norms_are_of_patches_and_of_the_tokens_before_them(measured):
    norms, layers = np.linalg.norm(measured.hidden, axis=-1), measured.run.layers
    close(layers["norm"], norms[:, :, measured.leading :].mean(axis=(1, 2)))
    close(layers["norm_first"], norms[:, :, 0].mean(axis=1))


def test_means_are_over_patches(measured):
    patches = measured.hidden[:, :, measured.leading :]
    mean = patches.mean(axis=(1, 2))
    close(measured.run.arrays["mean"], mean)
    close(measured.run.arrays["positional_basis"], measured.hidden.mean(axis=1) - mean[:, None])
    close(measured.run.arrays["context_basis"], patches.mean(axis=2) - mean[:, None])


def test_frequencies_are_those_of_the_plane(measured):
    """Oracle: the transform of products of different groups as tensors of rows, columns, rows, columns."""
    leading = measured.leading
    for layer, row in measured.run.layers.iterrows():
        patches = measured.hidden[layer, :, leading:]
        for name, value in dense.position_columns(patches, (4, 4)).items():
            close(row[name], value)


def test_frequencies_of_a_heads_logits_are_those_of_the_plane(measured):
    weights = measured.model.head_weights(0)
    patches = measured.hidden[0, :, measured.leading :]
    group = np.arange(len(patches)) * 8 // len(patches)
    p = np.stack([patches[group == g].mean(axis=0) for g in range(8)])
    p -= p.mean(axis=1, keepdims=True)
    for head in range(2):
        query, key = (p @ w[head].double().numpy() for w in (weights.w_q, weights.w_k))
        row = measured.run.heads.iloc[head]
        close(row["pwp_low_frequency_3"], dense.shares_of_frequencies(query, key, (4, 4))[3])


def test_heads_do_what_the_eager_model_does(measured):
    attention, heads = measured.attention, measured.run.heads
    entropy = -(attention * np.log(np.maximum(attention, 1e-300))).sum(axis=-1)
    close(heads["entropy"], entropy.mean(axis=(1, 3)).ravel())
    received = attention.mean(axis=3)  # (L, C, H, T): every query sees every key
    sinks = received > SINK
    leading = measured.leading
    close(heads["sink_first"], sinks[..., 0].mean(axis=1).ravel())
    close(heads["sink_later"], sinks[..., max(1, leading) :].any(axis=-1).mean(axis=1).ravel())
    assert heads["same_token"].isna().all()
    assert heads["induction"].isna().all()
    assert sinks.any(), "no sinks: the test sees nothing"
    named = measured.run.sinks.groupby("token")["contexts"].sum().to_dict()
    grid = measured.corpus.grid
    expected = {grid.token_text(t): int(n) for t, n in enumerate(sinks.sum(axis=(0, 1, 2))) if n}
    assert named == expected


def test_pictures_are_kept_with_what_their_tokens_do(measured):
    arrays = measured.run.arrays
    close(arrays["example_received"], measured.attention[:, :4].mean(axis=3).max(axis=2))
    for picture, of in zip(measured.corpus.images.pictures[:4], arrays["example_picture"], strict=True):
        resized = Image.open(picture.name).resize((16, 16), Image.Resampling.BILINEAR)
        assert np.abs(of.numpy().astype(int) - np.asarray(resized).astype(int)).max() <= 1


def test_constituents_add_up_over_patches(measured):
    assert measured.run.provenance["constituents_refused"] == {}
    total = measured.run.constituents.groupby(["layer", "head"])["share"].sum()
    close(total, 1, atol=1e-4)


def test_text_and_images_are_not_confused(measured, opened, corpus):
    with pytest.raises(UsageError, match="reads pixel_values, not text: give it images"):
        survey(measured.model, corpus)
    with pytest.raises(UsageError, match="reads input_ids, not images: give it text"):
        survey(opened("gpt2"), measured.corpus)
    with pytest.raises(UsageError, match="reads input_ids, not images"):
        image_reader(opened("gpt2"))


def test_images_of_another_size_than_the_models(tmp_path):
    """DINOv2 reads any size; ViT says that it does not."""
    drawn = vision.draw(tmp_path / "images", ["cat", "dog"], 4)
    for family in ("dinov2", "vit"):
        folder = vision.write(family, tmp_path / family)
        model = open_model(folder)
        reader = image_reader(model)
        reader.transform.args[0].size = {"height": 24, "width": 32}
        corpus = Corpus.from_path(drawn, reader)
        assert corpus.grid.shape == (6, 8)
        if family == "dinov2":
            run = survey(model, corpus)
            assert run.provenance["corpus"]["grid"]["columns"] == 8
            assert run.arrays["example_received"].shape == (2, 4, 49)
        else:
            with pytest.raises(UsageError, match="cannot read images of 24 × 32"):
                survey(model, corpus)


def test_the_towers_of_clip(tmp_path):
    folder = vision.write_clip(tmp_path / "clip")
    said: list[str] = []
    text, images = (open_model(folder, tower=tower, say=said.append) for tower in (None, "vision"))
    assert [type(model.hf).__name__ for model in (text, images)] == ["CLIPTextModel", "CLIPVisionModel"]
    assert (text.layers, images.layers) == (2, 3)
    assert said[1] == "CLIPModel has two towers: this is the one of images (CLIPVisionModel)"
    corpus = Corpus.from_path(vision.draw(tmp_path / "images", [""], 8), image_reader(images))
    run = survey(images, corpus)
    assert run.provenance["model"]["architecture"] == "CLIPVisionModel"
    pixels = corpus.inputs(slice(0, 8))
    import transformers

    whole = transformers.CLIPModel.from_pretrained(folder)
    expected = whole.vision_model(pixels, output_hidden_states=True).hidden_states[1]
    close(run.layers["norm"][1], expected[:, 1:].norm(dim=-1).mean().item())
    ids = Corpus.random_tokens(60, 12, 8)
    assert survey(text, ids).provenance["model"]["architecture"] == "CLIPTextModel"
    with pytest.raises(UsageError, match="tower is 'sound': give 'text' or 'vision'"):
        open_model(folder, tower="sound")
