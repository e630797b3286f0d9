"""Corpora of images, against pictures that PIL and NumPy read by themselves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessor

from tests import vision
from theodolite.corpus import images
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.images import PatchGrid
from theodolite.corpus.named import make_corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import image_reader, open_model


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return image_reader(open_model(vision.write("vit", tmp_path_factory.mktemp("vit"))))


@pytest.fixture
def folder(tmp_path):
    return vision.draw(tmp_path / "images", ["cat", "dog"], 4)


def by_name(corpus: Corpus) -> dict[str, int]:
    return {picture.name: index for index, picture in enumerate(corpus.images.pictures)}


def test_pixels_are_those_of_the_image_processor(folder, reader):
    corpus = Corpus.from_path(folder, reader)
    for name, index in by_name(corpus).items():
        expected = vision.pixels_of(Image.open(name))
        np.testing.assert_allclose(corpus.inputs(slice(index, index + 1))[0], expected, atol=1e-6)


def test_tokens_labels_and_shape(folder, reader):
    corpus = Corpus.from_path(folder, reader)
    assert corpus.contexts.tolist() == [list(range(17))] * 8
    assert corpus.grid == PatchGrid(4, 4, ("[CLS]",))
    assert corpus.leading == 1
    for name, index in by_name(corpus).items():
        assert f"/{corpus.label_names[corpus.labels[index]]}/" in name
    assert set(corpus.label_names) == {"cat", "dog"}


def test_the_seed_decides_which_and_in_which_order(folder, reader):
    one, same, other = (Corpus.from_path(folder, reader, None, 5, seed) for seed in (1, 1, 2))
    assert len(one.contexts) == 5
    assert list(by_name(one)) == list(by_name(same))
    assert one.sha256 == same.sha256
    assert torch.equal(one.inputs(slice(0, 5)), same.inputs(slice(0, 5)))
    assert list(by_name(one)) != list(by_name(other))
    assert one.sha256 != other.sha256


def test_as_many_of_each_label(folder, reader):
    vision.draw(folder, ["fish"], 1)
    corpus = Corpus.from_path(folder, reader, per_label=3)
    assert sorted(corpus.label_names[label] for label in corpus.labels) == ["cat"] * 3 + ["dog"] * 3
    balance = {"per_label": 3, "labels_too_short": 1, "labels_not_drawn": 0}
    assert corpus.selection == balance | {"labels_are": "folders"}
    with pytest.raises(UsageError, match=r"no label has 9 contexts: '\w+' has the most, 4"):
        Corpus.from_path(folder, reader, per_label=9)


def test_images_that_do_not_fit_are_read_a_batch_at_a_time(folder, reader, monkeypatch):
    kept = Corpus.from_path(folder, reader)
    monkeypatch.setattr(images, "KEPT_BYTES", 1000)
    lazy = Corpus.from_path(folder, reader)
    assert not lazy.images.tensors._kept
    assert lazy.sha256 == kept.sha256
    assert torch.equal(lazy.inputs(slice(2, 5)), kept.inputs(slice(2, 5)))
    vision.picture(77).save(lazy.images.pictures[2].name)
    with pytest.raises(WorkError, match=r"\.png has changed while it was measured"):
        lazy.inputs(slice(2, 3))


def test_a_subset_reads_its_own_images(folder, reader):
    corpus = Corpus.from_path(folder, reader)
    some = corpus.subset(torch.tensor([5, 1]))
    assert torch.equal(some.inputs(slice(0, 2)), corpus.inputs(torch.tensor([5, 1])))
    assert some.labels.tolist() == corpus.labels[[5, 1]].tolist()
    assert some.sha256 != corpus.sha256


def test_other_files_are_passed_over_and_counted(folder, reader):
    (folder / "notes.txt").write_text("not a picture")
    (folder / ".hidden.png").write_text("not a picture")
    corpus = Corpus.from_path(folder, reader)
    assert len(corpus.contexts) == 8
    passed_over = {"not named as images are": {"count": 1, "names": ["notes.txt"]}}
    assert corpus.selection == {"labels_are": "folders", "files_passed_over": passed_over}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a text called an image", "no image"),
        (b"", "no image"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 40, "broken PNG|no image"),
        (None, ""),  # the half of an image
    ],
)
def test_a_broken_image_is_named(folder, reader, content, why):
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "broken.png").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(
        UsageError, match=rf"broken\.png cannot be read as an image \(.*({why}).*\): mend or remove"
    ):
        Corpus.from_path(folder, reader)


def test_places_without_images_are_refused(tmp_path, reader):
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(UsageError, match=r"holds no image \(\.png"):
        Corpus.from_path(tmp_path, reader)
    with pytest.raises(UsageError, match="does not exist: give an image or a folder"):
        Corpus.from_path(tmp_path / "nowhere", reader)
    with pytest.raises(UsageError, match=r"notes\.txt is not one of \.png"):
        Corpus.from_path(tmp_path / "notes.txt", reader)
    Image.new("I;16", (16, 16)).save(tmp_path / "deep.png")
    with pytest.raises(UsageError, match=r"deep\.png cannot be read .*more than 8 bits"):
        Corpus.from_path(tmp_path / "deep.png", reader)


def test_images_of_several_sizes_are_refused(folder, reader):
    as_they_are = replace(
        reader, transform=partial(reader.transform.func, ViTImageProcessor(do_resize=False))
    )
    vision.picture(0, (16, 16)).save(folder / "cat" / "0.png")
    with pytest.raises(UsageError, match="makes images of several sizes"):
        Corpus.from_path(folder, as_they_are)


def test_transparent_grey_and_turned_images_are_read_upright_in_colour(tmp_path, reader):
    grey, turned = vision.picture(1).convert("L"), vision.picture(2)
    grey.save(tmp_path / "a.png")
    vision.picture(3).convert("RGBA").save(tmp_path / "b.webp", lossless=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned.save(tmp_path / "c.png", exif=exif)
    corpus = Corpus.from_path(tmp_path, reader)
    expected = [grey.convert("RGB"), vision.picture(3), turned.transpose(Image.Transpose.ROTATE_270)]
    found = {name[-5]: index for name, index in by_name(corpus).items() if name.endswith("png")}
    found["b"] = next(index for name, index in by_name(corpus).items() if name.endswith("webp"))
    for letter, image in zip("abc", expected, strict=True):
        np.testing.assert_allclose(
            corpus.inputs(slice(0, 3))[found[letter]], vision.pixels_of(image), atol=1e-6
        )


def test_a_tokenizer_finds_no_text_in_a_folder_of_images(folder):
    from tests.checkpoints import byte_tokenizer

    with pytest.raises(UsageError, match="holds no file of"):
        make_corpus(folder, byte_tokenizer(), 8)
    with pytest.raises(UsageError, match="give a length in tokens"):
        Corpus.from_path(folder, byte_tokenizer())


@pytest.mark.slow
def test_corpora_of_text_live_without_pillow():
    """Pillow is an extra: what reads text must not import it."""
    code = (
        "import sys; sys.modules['PIL'] = None; from theodolite.corpus.corpus import Corpus; Corpus.from_ids"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
