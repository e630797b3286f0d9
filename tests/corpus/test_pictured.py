"""A picture in each text: what a model of both reads, and what is measured of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image

from tests.calls import call
from tests.tokenizers import framed
from theodolite import Corpus, Run, open_model, survey, trace_sinks
from theodolite.corpus.images import PicturedTextReader
from theodolite.errors import UsageError, WorkError
from theodolite.evaluate.perplexity import perplexity
from theodolite.models import continued, pictured_text_reader
from theodolite.prune import prune_model
from theodolite.sinks.outliers import find_outliers

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE, VOCABULARY, PATCHES = 4, 300, 16


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    """The folder of a tiny LLaVA, whose heads attend unevenly."""
    folder = tmp_path_factory.mktemp("llava")
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=VOCABULARY),
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=4),
        image_token_id=IMAGE,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        parameter.data *= 30 if "q_proj" in name or "k_proj" in name else 1
    model.save_pretrained(folder)
    tokenizer = framed(["[UNK]", "<s>", "a", "b", "<image>"], ["<s>"], [])
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}"
        "{{ '<image> ' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}{% endfor %}"
    )
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Eight rows with a picture and a text, of unlike lengths; one without a picture, one without a text."""
    random = np.random.default_rng(0)
    rows = []
    for row in range(8):
        pixels = random.integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{row}.png")
        words = " ".join(random.choice(["a", "b"], 6 + row % 3))
        rows.append({"image": f"{row}.png", "text": words, "label": "xy"[row % 2]})
    rows[0]["text"] = "a b <image> b b a"
    rows += [{"image": None, "text": "a b a b"}, {"image": "0.png", "text": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def as_released(llava: Path, table: Path) -> dict[str, tuple[list[int], tuple[torch.Tensor, ...]]]:
    """Ids and eager attention of each row by its text, as the classes of transformers have them."""
    hf = transformers.LlavaForConditionalGeneration.from_pretrained(llava, attn_implementation="eager").eval()
    processor = transformers.AutoProcessor.from_pretrained(llava, backend="pil")
    found = {}
    for line in table.read_text().splitlines()[:8]:
        row = json.loads(line)
        text = row["text"] if "<image>" in row["text"] else "<image>" + row["text"]
        picture = Image.open(table.parent / row["image"]).convert("RGB")
        read = processor(text=text, images=picture, return_tensors="pt")
        with torch.no_grad():
            found[row["text"] + row["image"]] = (
                read["input_ids"][0].tolist(),
                hf(**read, output_attentions=True).attentions,
            )
    return found


def test_ids_and_attention_are_those_of_the_released_classes(llava, table):
    """Oracle: processor and model of transformers, row by row."""
    model = open_model(llava)
    corpus = Corpus.from_pictured(table, pictured_text_reader(model), 64)
    released = as_released(llava, table)
    read = [row.masked_fill(row >= VOCABULARY, IMAGE).tolist() for row in corpus.rows()]
    assert sorted(read) == sorted(ids for ids, _ in released.values())
    for row in corpus.rows():
        assert row[row >= VOCABULARY].tolist() == list(range(VOCABULARY, VOCABULARY + PATCHES))
    assert corpus.selection["rows_without_image"] == corpus.selection["rows_without_text"] == 1
    assert corpus.label_names == ["x", "y"] or corpus.label_names == ["y", "x"]
    paid: list[list[float]] = [[] for _ in range(4)]
    entropy = [0.0] * 4
    for ids, attentions in released.values():
        picture = torch.tensor(ids) == IMAGE
        behind = torch.arange(len(ids)) > int(picture.nonzero().max())
        for layer, weights in enumerate(attentions):
            for head, own in enumerate(weights[0].double()):
                paid[2 * layer + head] += own[behind][:, picture].sum(dim=1).tolist()
                entropy[2 * layer + head] += float(torch.special.entr(own).sum())
    tokens = sum(len(ids) for ids, _ in released.values())
    run = survey(model, corpus)
    np.testing.assert_allclose(run.heads["to_image"], [np.mean(of) for of in paid], atol=1e-6)
    np.testing.assert_allclose(run.heads["entropy"], np.array(entropy) / tokens, atol=1e-5)
    assert np.ptp(run.heads["to_image"]) > 0.05
    one_by_one = survey(model, corpus, batch=1)
    columns = ["to_image", "entropy", "propagation", "sink_later"]
    np.testing.assert_allclose(one_by_one.heads[columns], run.heads[columns], atol=1e-6)


def test_parts_of_the_picture_are_named_in_tables(llava, table):
    model = open_model(llava)
    corpus = Corpus.from_pictured(table, pictured_text_reader(model), 64)
    run = survey(model, corpus)
    named = set(run.sinks["token"])
    assert any(name.startswith("image ") for name in named)
    assert {name.strip() for name in named} <= {
        "<s>",
        "a",
        "b",
        "[UNK]",
        *(f"image {1 + number}" for number in range(PATCHES)),
    }
    traced = trace_sinks(model, corpus)
    assert any(name.startswith("image ") for name in traced.traces["token"])
    find_outliers(model, corpus)
    assert run.provenance["corpus"]["image_column"] == "image"


def test_parquet_as_datasets_writes_it_and_conversations_are_read_alike(llava, table, tmp_path):
    """Paths, bytes and the two together; a text, a conversation that places its picture, and one that does not."""
    reader = pictured_text_reader(open_model(llava))
    rows = [json.loads(line) for line in table.read_text().splitlines()[1:8]]
    wanted = Corpus.from_pictured(table, reader, 64).subset(torch.arange(8))
    stored = [
        {
            "image": {"bytes": (table.parent / row["image"]).read_bytes(), "path": None},
            "text": [{"role": "user", "content": row["text"]}],
        }
        for row in rows
    ]
    first = [{"type": "text", "text": "a b"}, {"type": "image"}, {"type": "text", "text": "b b a"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(stored), tmp_path / "t.parquet")
    corpus = Corpus.from_pictured(tmp_path / "t.parquet", reader, 64)
    ids = {tuple(row.tolist()) for row in corpus.rows()}
    beginning = json.loads(table.read_text().splitlines()[0])
    placed = tmp_path / "one.jsonl"
    placed.write_text(json.dumps(beginning | {"text": [{"role": "user", "content": first}]}))
    ids |= {tuple(row.tolist()) for row in Corpus.from_pictured(placed, reader, 64).rows()}
    assert ids == {tuple(row.tolist()) for row in wanted.rows()}


def test_the_command_reads_pictures_and_says_where_it_does_not(llava, table, tmp_path):
    given = (llava, "--corpus", table, "--out", tmp_path / "out")
    with_images = (*given, "--image-column", "image", "--length")
    code, _, errors = call("survey", *with_images, 64)
    assert code == 0, errors
    run, model = Run.load(tmp_path / "out"), open_model(llava)
    direct = survey(model, Corpus.from_pictured(table, pictured_text_reader(model), 64))
    np.testing.assert_array_equal(run.heads["to_image"], direct.heads["to_image"])
    code, _, errors = call("survey", llava, "--corpus", table, "--length", 6, "--out", tmp_path / "plain")
    assert code == 0
    assert "--image-column image" in " ".join(errors.split())
    assert "to_image" not in Run.load(tmp_path / "plain").heads
    for words, said in (
        ((*with_images, 8), "no picture has room in a context of 8 tokens"),
        ((*with_images, 64, "--shard", "1/2"), "not of images"),
        ((*given, "--image-column", "photo"), "no column 'photo'"),
        ((*with_images, 64, "--source-column", "text"), "gives each row a source: leave out --image-column"),
    ):
        code, _, errors = call("survey", *words)
        assert code == 2, words
        assert said in " ".join(errors.split())


def test_what_reads_ids_alone_refuses_pictures(llava, table, tmp_path, opened):
    model = open_model(llava)
    corpus = Corpus.from_pictured(table, pictured_text_reader(model), 64)
    for refused in (
        lambda: perplexity(model, corpus),
        lambda: prune_model(model, corpus, "wanda", 0.5, out=tmp_path / "out"),
        lambda: continued(model, corpus, 2),
    ):
        with pytest.raises(UsageError, match="a text alone"):
            refused()
    with pytest.raises(UsageError, match="reads no images in a text"):
        survey(opened("llama"), corpus)
    with pytest.raises(UsageError, match="reads no images in a text"):
        pictured_text_reader(opened("llama"))


def test_a_picture_that_changes_or_is_none_ends_in_a_line(llava, table, monkeypatch):
    monkeypatch.setattr("theodolite.corpus.images.KEPT_BYTES", 0)
    reader = pictured_text_reader(open_model(llava))
    corpus = Corpus.from_pictured(table, reader, 64)
    again = Corpus.from_pictured(table, reader, 64)
    torch.testing.assert_close(corpus.inputs(slice(0, 1)).pictures, again.inputs(slice(0, 1)).pictures)
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(table.parent / "3.png")
    with pytest.raises(WorkError, match=r"row 4 of .*rows.jsonl line 4 has changed"):
        [corpus.inputs(slice(row, row + 1)) for row in range(8)]
    (table.parent / "3.png").write_text("no picture")
    with pytest.raises(UsageError, match="cannot be read as an image"):
        Corpus.from_pictured(table, reader, 64)


def _by_hand(more: dict[str, torch.Tensor]) -> PicturedTextReader:
    """Gives a text of 12 tokens with a picture of four from the second on, and what a family's processor gives."""
    ids = [1, *[IMAGE] * 4, 2, 3, 2, 2, 3, 3, 2]
    return PicturedTextReader(None, IMAGE, VOCABULARY, lambda document: ([*ids], more))


def _gemma3() -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **SIZES, vocab_size=VOCABULARY, head_dim=8, num_key_value_heads=2
        ),
        vision_config=transformers.SiglipVisionConfig(**SIZES, image_size=16, patch_size=4),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    )
    kinds = torch.tensor([[0, 1, 1, 1, 1, *[0] * 7]])
    read = {"pixel_values": torch.rand(1, 3, 16, 16), "token_type_ids": kinds}
    return transformers.Gemma3ForConditionalGeneration(config), read


def _qwen2() -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = dict(**SIZES, vocab_size=VOCABULARY, num_key_value_heads=2, rope_parameters=rotary)
    vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, patch_size=4, mlp_ratio=2)
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    kinds = torch.tensor([[0, 1, 1, 1, 1, *[0] * 7]])
    read = {"pixel_values": torch.rand(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return transformers.Qwen2VLForConditionalGeneration(config), read | {"mm_token_type_ids": kinds}


def _intern() -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**SIZES, vocab_size=VOCABULARY, num_key_value_heads=2),
        vision_config=transformers.InternVLVisionConfig(**SIZES, image_size=[16, 16], patch_size=[4, 4]),
        image_token_id=IMAGE,
    )
    return transformers.InternVLForConditionalGeneration(config), {"pixel_values": torch.rand(1, 3, 16, 16)}


@pytest.mark.parametrize(("made", "reads"), [(_gemma3, False), (_qwen2, False), (_intern, True)])
def test_families_that_see_or_place_image_tokens_otherwise_are_refused(made, reads, table):
    torch.manual_seed(0)
    hf, read = made()
    model = open_model(hf.eval())
    corpus = Corpus.from_pictured(table, _by_hand(read), 64)
    if reads:
        assert survey(model, corpus).heads["to_image"].between(0.1, 0.9).all()
        return
    with pytest.raises(UsageError, match="sees or counts an image's tokens otherwise"):
        survey(model, corpus)


def test_a_template_beside_the_processor_alone_is_used(llava, table, tmp_path):
    """As older checkpoints have it; the tokenizer of the model stays as it was."""
    folder = tmp_path / "older"
    shutil.copytree(llava, folder)
    template = next(path for path in folder.glob("chat_template*"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    model = open_model(folder)
    assert model.tokenizer.chat_template is None
    row = json.loads(table.read_text().splitlines()[1])
    turns = table.parent / "turns.jsonl"
    turns.write_text(json.dumps(row | {"text": [{"role": "user", "content": row["text"]}]}))
    ids = next(Corpus.from_pictured(turns, pictured_text_reader(model), 64).rows())
    plain = Corpus.from_pictured(table, pictured_text_reader(model), 64)
    assert ids.tolist() in [other.tolist() for other in plain.rows()]
    assert model.tokenizer.chat_template is None


def test_what_does_not_fit_is_left_out_before_it_is_chosen(llava, table, tmp_path):
    """Oracle: the rows that fit, by their lengths; a text file beside tables has no images."""
    reader = pictured_text_reader(open_model(llava))
    long = json.loads(table.read_text().splitlines()[1]) | {"text": "a " * 30 + "<image>", "label": "x"}
    (table.parent / "notes.txt").write_text("a text without images")
    table.write_text("\n".join([*[json.dumps(long)] * 6, *table.read_text().splitlines()[:8]]))
    for seed in range(3):
        corpus = Corpus.from_pictured(table.parent, reader, 40, contexts=6, seed=seed)
        assert len(corpus.contexts) == 6
    balanced = Corpus.from_pictured(table.parent, reader, 40, per_label=3)
    assert balanced.labels.bincount().tolist() == [3, 3]
    assert balanced.selection["picture_cut"] == 6
    assert balanced.selection["rows_without_image"] == 1
