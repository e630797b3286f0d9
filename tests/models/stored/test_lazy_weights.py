"""Weights read from the shards, a block at a time: the model's own."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests import checkpoints, vision
from tests.calls import call
from tests.checkpoints import edited, with_tensors
from tests.models.test_every_family import check_read_by_blocks, opened_whole, same_run
from theodolite.errors import UsageError, WorkError
from theodolite.models import open as reading
from theodolite.models import open_model, open_streamed, structure_search
from theodolite.passes.survey import spectra


def _opened(folder: Path):
    return open_streamed(folder, say=opened_whole)


def _assert_the_models_own(folder: Path) -> None:
    check_read_by_blocks(open_model(folder, device="cpu"), folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma3_text", "olmo2"])
def test_names_that_transformers_changes_on_loading(family, tmp_path):
    """Experts that a checkpoint holds one by one, other names, norms of queries and keys."""
    checkpoints.build(family).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _assert_the_models_own(tmp_path)


def test_a_backbone_read_as_another_head_would_have_it(tmp_path):
    """Names without the prefix of the backbone, as the first GPT-2 checkpoints have them, and no architecture."""
    checkpoints.build("gpt2").base_model.save_pretrained(tmp_path)
    _assert_the_models_own(tmp_path)
    for changes in ({"architectures": ["GPT2LMHeadModel"]}, {"architectures": None, "dtype": None}):
        _assert_the_models_own(edited(tmp_path, **changes))


def test_half_precision(checkpoint):
    folder = checkpoint("llama3", "bfloat16")
    _assert_the_models_own(folder)
    assert open_streamed(folder, dtype="float32").hf.dtype == torch.float32


def test_blocks_are_read_as_they_are_asked_for(copied):
    """Oracle: the first NaN is named when its block is read, and not before."""
    folder = copied("llama3")
    name = "model.layers.1.self_attn.k_proj.weight"
    with_tensors(folder, lambda tensors: tensors[name][2, 3].fill_(math.inf))
    opened = _opened(folder)
    opened.head_weights(0)
    with pytest.raises(WorkError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight holds infinite"):
        spectra(opened)
    with pytest.raises(UsageError, match="layers 0 to 2"):
        opened.head_weights(3)


def _whole(folder: Path) -> str:
    said: list[str] = []
    got = open_streamed(folder, say=said.append)
    same_run(spectra(got), spectra(open_model(folder, device="cpu")))
    (line,) = said
    assert "\n" not in line
    return line


def test_what_cannot_be_read_by_layers_is_opened_whole_and_says_so(checkpoint, monkeypatch):
    folder = checkpoint("llama3")
    check, verify = structure_search.check_recomputed, structure_search.verify_attention

    def off(*given, **of_the_whole):
        if of_the_whole:
            return verify(*given, **of_the_whole)
        with monkeypatch.context() as patch:
            patch.setattr(
                structure_search, "check_recomputed", lambda at, a, b, *rest: check(at, a, 1.01 * b, *rest)
            )
            return verify(*given)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "verify_attention", off)
        assert "layer 0 (model.layers.0.self_attn): the attention output recomputed" in _whole(folder)
    loader = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.delattr(loader, "get_model_conversion_mapping")
    assert "cannot import name 'get_model_conversion_mapping'" in _whole(folder)


def test_quantised_experts_are_opened_whole_and_no_weights_at_all_are_refused(copied):
    """Where only experts are quantised, the whole model is opened: of these, transformers has no kernel here."""
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}
    folder = edited(copied("gpt_oss"), quantization_config=method)

    def four_bits(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name + "_blocks"] = tensors.pop(name).to(torch.uint8)

    with_tensors(folder, four_bits)
    with pytest.raises((UsageError, WorkError)):
        open_streamed(folder)


def test_a_head_of_zeros_is_degenerate_and_no_error(tmp_path):
    """A hole in a file reads as zeros: no spectrum, and attention that is uniform."""
    model = checkpoints.build("llama2")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    run = spectra(_opened(tmp_path))
    same_run(run, spectra(open_model(tmp_path, device="cpu")))
    zeros = run.heads[run.heads.layer == 1]
    assert (zeros.frobenius_squared == 0).all()
    assert (run.arrays["spectrum"][1] == 0).all()
    assert set(zeros.regime) == {"uniform"}


def write_layout(config: transformers.LlamaConfig, folder: Path) -> int:
    """Write a checkpoint, a file a layer, random in the attention and holes elsewhere; how many parameters it has."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = transformers.LlamaForCausalLM(config).bfloat16().state_dict()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = tensor
    for file, inside in files.items():
        header, end = {}, 0
        for name, tensor in inside.items():
            header[name] = {
                "dtype": "BF16",
                "shape": [*tensor.shape],
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in inside.items():
                if "self_attn" in name:
                    opened.seek(8 + len(text) + header[name]["data_offsets"][0])
                    weights = torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5
                    opened.write(weights.bfloat16().view(torch.uint8).numpy())
            opened.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.numel() for tensor in tensors.values())


PEAKS = """
import sys
from benchmarks.timing import peak_memory
from theodolite.models import open_streamed
for folder in sys.argv[1:]:
    model = open_streamed(folder, say=lambda line: "bfloat16" in line or sys.exit(line))
    assert all(model.head_weights(layer).w_q.any() for layer in range(model.layers))
    print(peak_memory())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path):
    """The operating system's count: many layers of holes and of attention, after few in the same process."""
    sizes, folders, few, many, width = [], [], 2, 24, 1024
    for layers in (few, many):
        folders.append(tmp_path / str(layers))
        folders[-1].mkdir()
        config = transformers.LlamaConfig(
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
        )
        parameters = write_layout(config, folders[-1])
        sizes.append(2 * parameters)
    command = [sys.executable, "-c", PEAKS, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = [int(peak) for peak in done.stdout.split()]
    assert sizes[1] - sizes[0] > 2**29
    assert peaks[1] - peaks[0] < (many - few) * 16 * width**2 * 2 / 2  # half of what their blocks take


def test_the_command_reads_by_blocks(checkpoint, monkeypatch):
    """What opens the whole model is not called."""
    expected = spectra(open_model(checkpoint("gpt2"), device="cpu")).heads
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", None)
    rows = json.loads(call("spectra", checkpoint("gpt2"), "--json")[1])["heads"]
    assert [row["trace"] for row in rows] == pytest.approx(expected.trace.tolist(), rel=1e-12)


def test_of_two_towers_it_is_the_one_of_text_as_where_all_is_read(tmp_path):
    said: list[str] = []
    model = open_streamed(vision.write_clip(tmp_path), say=said.append)
    assert type(model.hf).__name__ == "CLIPTextModel"
    assert "opened whole, since it has two towers, of which this is the one of text" in said


@pytest.mark.parametrize("opened", [open_model, open_streamed])
def test_a_folder_at_home(opened, checkpoint, monkeypatch):
    folder = checkpoint("gpt2")
    monkeypatch.setenv("HOME", str(folder.parent))
    for path in ("~/gpt2", Path("~/gpt2")):
        assert opened(path).id == str(folder)
