"""What a checkpoint has beside its weights comes along when it is pruned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.prune import corpus_of
from tests.tokenizers import framed
from theodolite import open_model
from theodolite.models import open_streamed
from theodolite.prune import checkpoint as pruned_checkpoint
from theodolite.prune import prune_model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
COPIED = {"README.md": "# dense", "LICENSE": "none", "tokenizer.model": "pieces", "vocab.txt": "a b"}
COPIED |= {"1_Pooling/config.json": '{"mean": true}'}
LEFT = {"modeling_own.py": "raise SystemExit", "optimizer.pt": "", "trainer_state.json": "{}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """The folder of a tiny model of text and images with all that is served beside its weights."""
    folder = tmp_path_factory.mktemp("served") / "in"
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=300),
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=4),
        image_token_index=4,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = framed(["[UNK]", "<s>", "a", "b", "<image>"], ["<s>"], [])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    transformers.LlavaProcessor(
        transformers.AutoImageProcessor.from_pretrained(_image_processor(folder), backend="pil"),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
    ).save_pretrained(folder)
    said = {"temperature": 0.5, "do_sample": False, "eos_token_id": [2, 3], "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(said))
    for name, text in (COPIED | LEFT).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _image_processor(folder: Path) -> Path:
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}).save_pretrained(folder)
    return folder


def _read_back(folder: Path) -> list[object]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder, backend="pil")
    generation = transformers.GenerationConfig.from_pretrained(folder)
    return [tokenizer.get_vocab(), tokenizer.chat_template, processor.to_dict(), generation.to_dict()]


@pytest.mark.parametrize(
    ("opens", "form"), [(open_model, "merged"), (open_streamed, "merged"), (open_model, "factored")]
)
def test_a_pruned_checkpoint_is_served_as_the_dense_one(opens, form, served, tmp_path):
    """Oracle: the classes of transformers on both folders, and the bytes of the files."""
    prune_model(opens(served), corpus_of(), "wanda", 0.5, out=tmp_path / "out", form=form)
    assert _read_back(tmp_path / "out") == _read_back(served)
    same = [path.relative_to(served) for path in served.rglob("*") if path.is_file()]
    same = [name for name in map(str, same) if name not in {*LEFT, "config.json", "model.safetensors"}]
    same = [
        name for name in same if not name.startswith(("tokenizer.json", "tokenizer_config", "chat_template"))
    ]
    assert {*COPIED, "processor_config.json", "generation_config.json"} <= {*same}
    assert [n for n in same if (served / n).read_bytes() != (tmp_path / "out" / n).read_bytes()] == []
    assert not [name for name in LEFT if (tmp_path / "out" / name).exists()]
    if form == "factored":
        return
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    dense, pruned = load_file(served / "model.safetensors"), model.state_dict()
    vision = [name for name in pruned if "vision" in name]
    reopened = transformers.AutoModelForImageTextToText.from_pretrained(served).state_dict()
    assert vision
    assert all(torch.equal(pruned[name], reopened[name]) for name in vision)
    blocks = [pruned[name] for name in pruned if name.endswith("_proj.weight") and "vision" not in name]
    assert all((weight == 0).float().mean() > 0.4 for weight in blocks)
    assert len(dense) == len(pruned)


def test_a_tokenizer_of_its_own_is_saved(served, tmp_path):
    tokenizer = framed(["[UNK]", "c", "d"], [], [])
    prune_model(open_model(served, tokenizer=tokenizer), corpus_of(), "wanda", 0.5, out=tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    assert (tmp_path / "out" / "README.md").exists()


def test_of_a_hub_model_they_are_those_of_its_commit(served, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    commit = "0" * 40
    shutil.copytree(served, cache / "models--some--model" / "snapshots" / commit)
    asked = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append(revision)
        return huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=cache, local_files_only=True
        )

    monkeypatch.setattr(pruned_checkpoint, "snapshot_download", download)
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(cache), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    model = open_model("some/model", revision=commit)
    prune_model(model, corpus_of(), "wanda", 0.5, out=tmp_path / "out")
    assert asked == [commit]
    assert _read_back(tmp_path / "out") == _read_back(served)
