"""GGUF files are opened as the model that was written into them, whatever its architecture and quantisation.

The oracles are the tiny models from which the `gguf` package wrote the files, its own decoding of what it wrote, and
`transformers`' own reading of the same file.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import checkpoints, gguf_files
from tests.calls import call
from tests.models.test_every_family import check_read_by_blocks, opened_whole
from theodolite.cli.screen import section_of
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models import open_model, open_streamed
from theodolite.models.stored.gguf import gguf_tokenizer

IDS = torch.arange(40).view(2, 20)
GEMMA_3 = {"query_pre_attn_scalar": 8}
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 12, "final_logit_softcapping": 2.0},
    "gemma3_text": GEMMA_3,
    "qwen3_moe": {"norm_topk_prob": True},  # as llama.cpp computes
}
PATTERN = {"gemma3.attention.sliding_window_pattern": 4}
FAMILIES = ["llama2", "llama3", "phi3", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen2_moe", "qwen3_moe"]


def built(name: str, **changes: object):
    """The tiny model whose settings a GGUF file has keys for."""
    return checkpoints.build(name, **CHANGES.get(name, {}) | changes)


def written(model, folder: Path, **options) -> Path:
    """A GGUF file of it."""
    path = folder / "model.gguf"
    gguf_files.write(model, path, **options)
    return path


def check_same(path: Path, model) -> None:
    """The file is opened as this model, to the bit."""
    opened = open_model(path)
    with torch.no_grad():
        torch.testing.assert_close(opened.logits(IDS), model(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture_is_the_model_that_was_written(name, tmp_path):
    model = built(name)
    check_same(written(model, tmp_path, more=PATTERN if name == "gemma3_text" else None), model)


def rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, "factor": 4.0, **more}}


YARN = {"original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 3.5, 4.0, 4.5], "attention_factor": 1.25}
GLOBAL = {"full_attention": rope("linear")["rope_parameters"]}
LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}


def scaling(architecture: str, **keys: object) -> dict[str, object]:
    return {f"{architecture}.rope.scaling.{name}": value for name, value in keys.items()}


@pytest.mark.parametrize(
    ("name", "changes", "keys"),
    [
        ("llama2", rope("linear"), scaling("llama", type="linear", factor=4.0)),
        (
            "llama2",
            rope("yarn", **YARN),
            scaling("llama", type="yarn", factor=4.0, original_context_length=16),
        ),
        (
            "gemma3_text",
            GEMMA_3 | {"rope_parameters": GLOBAL | LOCAL},
            scaling("gemma3", type="linear", factor=4.0) | PATTERN | {"gemma3.rope.freq_base_swa": 2e4},
        ),
        (
            "phi3",
            rope("longrope", **LONG, **YARN) | {"original_max_position_embeddings": 16},
            scaling("phi3", attn_factor=1.25, original_context_length=16),
        ),
    ],
)
def test_rotary_positions_are_scaled_as_the_file_says(name, changes, keys, tmp_path):
    model = checkpoints.build(name, **changes)

    def with_divisors(tensors: dict[str, np.ndarray]) -> None:
        if name == "phi3":
            for length in ("short", "long"):
                tensors[f"rope_factors_{length}.weight"] = np.array(LONG[f"{length}_factor"], np.float32)

    check_same(written(model, tmp_path, more=keys, change=with_divisors), model)


WINDOW = {"use_sliding_window": True, "sliding_window": 5}


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("llama2", {}, {"without": ["head_count_kv", "rope_dimension_count"]}),
        ("llama2", {}, {"more": {"llama.attention.causal": True, "llama.pooling_type": 3}}),
        (
            "gemma2",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"without": ["rope_freq_base"]},
        ),
        ("llama2", {"mlp_bias": True}, {}),
        ("qwen2", WINDOW | {"layer_types": ["sliding_attention"] * 4}, {}),
        ("qwen3_moe", WINDOW, {}),
        (
            "qwen3",
            WINDOW | {"max_window_layers": 1},
            {"more": {"qwen3.attention.sliding_window_pattern": [False, True, True]}},
        ),
    ],
)
def test_what_a_file_leaves_out_or_says_of_a_variant(name, changes, options, tmp_path):
    """As many key heads as heads, heads as wide as the stream allows, llama.cpp's base; windows, biases, residuals."""
    model = built(name, **changes)
    check_same(written(model, tmp_path, **options), model)


@pytest.mark.parametrize(
    "kind",
    [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize(("name", "architecture"), [("llama3", "llama"), ("gemma3_text", "gemma3")])
def test_weights_are_those_that_gguf_decodes(kind, name, architecture, tmp_path):
    """To the bit, in the layout that they have in the file, and rounded to --dtype."""
    stored = gguf_files.write(built(name, intermediate_size=64), tmp_path / "model.gguf", kind)
    opened = open_model(tmp_path)
    decoded = {
        name: gguf.dequantize(data, Type.F32 if data.dtype == np.float32 else kind)
        for name, data in stored.items()
    }
    tensors = gguf_files.tensors_of(opened.hf, architecture)
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, decoded[name], err_msg=name)
    assert tensors.keys() == decoded.keys() - {"rope_freqs.weight"}
    assert opened.stored["tensor_types"][kind.name] == sum(
        data.dtype != np.float32 for data in stored.values()
    )
    assert opened.stored["gguf"] == kind.name
    half, whole = open_model(tmp_path, dtype="bfloat16").hf.state_dict(), opened.hf.state_dict()
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in whole.items())


def test_what_transformers_reads_of_the_same_file(tmp_path):
    path = written(built("llama2", intermediate_size=64), tmp_path, types=Type.Q4_0)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name), open_model(path)
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, ours.logits(IDS))
    text = "he said: «hello», 1234  times\n\n"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert ours.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert ours.tokenizer.decode(ours.tokenizer(text)["input_ids"]) == text
    assert ours.tokenizer.eos_token == "<|endoftext|>"
    assert ours.tokenizer.apply_chat_template([{"content": "hello"}], tokenize=False) == "hello"


def test_one_file_of_a_split_stands_for_all(tmp_path):
    model = built("llama2", tie_word_embeddings=False)
    gguf_files.write(model, tmp_path / "model.gguf", split_max_tensors=12)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [f"model-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    for place in (*files, tmp_path):
        check_same(place, model)
    assert open_model(files[1]).sha256 == sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    files[2].unlink()
    with pytest.raises(
        UsageError, match=r"model-00003-of-00003.gguf is missing: .* is one of 3 files of a model"
    ):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "qwen3_moe"])
def test_read_a_layer_or_a_block_at_a_time(name, tmp_path):
    path = written(built(name), tmp_path)
    whole = open_model(path)
    assert whole.sha256 == sha256(path.read_bytes()).hexdigest()
    check_read_by_blocks(whole, path)
    streamed = open_streamed(path, say=opened_whole)
    assert torch.equal(streamed.logits(IDS), whole.logits(IDS))
    assert set(streamed.streamed.readings) == {1}


def drop(name: str):
    return lambda tensors: tensors.pop(name)


def add(name: str, like: str):
    return lambda tensors: tensors.__setitem__(name, tensors[like])


def cut(rows: int):
    return lambda tensors: tensors.update({"blk.1.ffn_up.weight": tensors["blk.1.ffn_up.weight"][:rows]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"change": drop("blk.1.attn_q.weight")}, WorkError, r"lacks 1 of .* \(first: blk.1.attn_q.weight\)"),
        (
            {"change": add("blk.3.attn_q.weight", "blk.1.attn_q.weight")},
            WorkError,
            "tensor blk.3.attn_q.weight of .* has no place in LlamaForCausalLM",
        ),
        (
            {"change": cut(20)},
            WorkError,
            "tensor blk.1.ffn_up.weight of .* is 20 × 32, .*mlp.up_proj.weight of 48 × 32",
        ),
        (
            {"more": {"llama.attention.sliding_window": 7}},
            UsageError,
            "says llama.attention.sliding_window = 7, .* no setting for that in LlamaConfig",
        ),
        (
            {"more": {"llama.attention.causal": False}},
            UsageError,
            "says llama.attention.causal = False, .* no setting",
        ),
        (
            {"more": scaling("llama", type="su", factor=2.0)},
            UsageError,
            "rotary positions are scaled by 'su'",
        ),
        ({"more": scaling("llama", type="yarn")}, UsageError, "metadata lack llama.rope.scaling.factor"),
        ({"more": scaling("llama", attn_factor=1.5)}, UsageError, "'none' with attn_factor 1.5"),
        ({"more": {"llama.block_count": 10**6}, "without": ["block_count"]}, UsageError, "1000000 layers"),
        (
            {"more": {"llama.embedding_length": 0}, "without": ["embedding_length"]},
            UsageError,
            "its metadata say 0 as llama.embedding_length",
        ),
    ],
)
def test_a_file_that_is_another_model_is_named(options, error, message, tmp_path):
    path = written(built("llama2"), tmp_path, **options)
    with pytest.raises(error, match=message) as raised:
        open_model(path)
    assert section_of(str(raised.value)).name == "gguf-files"


@pytest.mark.parametrize(
    ("name", "left_out", "key"),
    [
        ("llama2", "context_length", "context_length"),
        ("llama2", "head_count", "attention.head_count"),
        ("llama2", "layer_norm_rms_eps", "attention.layer_norm_rms_epsilon"),
        ("gemma2", "sliding_window", "attention.sliding_window"),
        ("qwen3_moe", "expert_used_count", "expert_used_count"),
    ],
)
def test_a_key_that_is_missing_is_named(name, left_out, key, tmp_path):
    """Oracle: llama.cpp requires it, or its default is not `transformers`'."""
    path = written(built(name), tmp_path, without=[left_out])
    architecture = gguf_files.ARCHITECTURES.get(name, "llama" if name == "llama2" else name)
    for opened in (open_model, open_streamed):
        with pytest.raises(
            UsageError, match=f"model.gguf: its metadata lack {architecture}.{key}: download it again"
        ):
            opened(path)


@pytest.mark.parametrize("name", ["lluma", "falcon"])
def test_an_architecture_that_is_not_read_is_named(name, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match=f"GGUF files of the architecture {name} are not read") as raised:
        open_model(tmp_path)
    assert section_of(str(raised.value)).name == "gguf-files"


def test_experts_of_which_a_part_is_missing(tmp_path):
    path = written(built("qwen3_moe"), tmp_path, change=drop("blk.1.ffn_up_exps.weight"))
    with pytest.raises(WorkError, match=r"lacks 1 of .* \(first: blk.1.ffn_up_exps\)"):
        open_model(path)


def edit(old: bytes, new: bytes):
    return lambda data: data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"PK" + data[2:], "is no GGUF file"),
        (lambda data: data[:200], "cut short: download it again"),
        (lambda data: data[:-5000], "tensor .*: the file is cut short: download it again"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "download it again"),
        (edit(b"general.architecture", b"general.architectura"), "does not say its architecture"),
        (
            lambda data: of_type(data, 99),
            "tensor blk.0.attn_q.weight is of type 99, unknown to gguf",
        ),
        (lambda data: of_type(data, Type.I32), "cannot decode tensor blk.0.attn_q.weight"),
    ],
)
def test_a_damaged_file_is_refused_in_a_line(damage, message, tmp_path):
    path = written(built("llama2"), tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    for opened in (open_model, open_streamed):
        with pytest.raises(TheodoliteError, match=message) as raised:
            opened(path)
        assert "\n" not in str(raised.value)
        assert path.name in str(raised.value)
        assert section_of(str(raised.value)).name == "gguf-files"


def of_type(data: bytes, kind: int) -> bytes:
    """The file, whose tensor blk.0.attn_q.weight says that it is of this type."""
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    return data[:at] + int(kind).to_bytes(4, "little") + data[at + 4 :]


def test_several_models_in_a_folder_or_none(tmp_path):
    with pytest.raises(UsageError, match=r"no checkpoint at none\.gguf"):
        open_model("none.gguf")
    for name in ("a.gguf", "b.gguf"):
        gguf_files.write(built("llama2"), tmp_path / name)
    with pytest.raises(UsageError, match=r"several GGUF models \(a.gguf, b.gguf\): give one of these files"):
        open_model(tmp_path)
    with pytest.raises(UsageError, match="goes to one device: leave out --device-map"):
        open_model(tmp_path / "a.gguf", device_map="auto")


def test_without_the_gguf_package(tmp_path):
    """The rest of the package lives without it, and a GGUF file says what to install."""
    path = written(built("llama2"), tmp_path)
    code = "import sys; sys.modules['gguf'] = None\nfrom theodolite import open_model\nopen_model()\n"
    code += f"open_model({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("pip install '.[gguf]' in the folder of theodolite's source")


def tokenizer_of(folder: Path, pre: str):
    path = written(built("llama2"), folder, more={"tokenizer.ggml.pre": pre}, without=["tokenizer_pre"])
    return open_model(path).tokenizer


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["in", "Ġ1984", "?!", "Ġ(", "it", "'s", ")"]),
        ("smollm", ["in", "Ġ", "1", "9", "8", "4", "?!", "Ġ(", "it", "'s", ")"]),
        ("llama-bpe", ["in", "Ġ", "198", "4", "?!", "Ġ(", "it", "'s", ")"]),
    ],
)
def test_a_text_is_split_as_llama_cpp_splits_it(pre, pieces, tmp_path):
    """By the patterns of `llama-vocab.cpp`, worked out by hand."""
    split = tokenizer_of(tmp_path, pre).backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 1984?! (it's)")
    assert [piece for piece, _ in split] == pieces


def test_beginnings_and_whole_words(tmp_path):
    """Of Llama 3's vocabularies, whose files do not say so; others begin with a word, and merge."""
    gpt2, llama3 = tokenizer_of(tmp_path, "gpt-2"), tokenizer_of(tmp_path, "llama-bpe")
    assert gpt2.convert_ids_to_tokens(gpt2("hello")["input_ids"]) == ["he", "l", "l", "o"]
    assert llama3.convert_ids_to_tokens(llama3("hello")["input_ids"]) == ["<|endoftext|>", "hello"]


@pytest.mark.parametrize(("prefix", "first"), [(True, "▁he"), (False, "he")])
def test_the_space_before_a_text_is_the_file_s(prefix, first, tmp_path):
    """Of a SentencePiece vocabulary, which begins with BOS where the file does not say otherwise."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "h", "e", "he", "▁he"]
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(place) for place in reversed(range(len(tokens)))])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = gguf_tokenizer(tmp_path / "words.gguf")
    ids = tokenizer("he he")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", first, "▁he"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he he"


UNKNOWN_SPLIT = {"more": {"tokenizer.ggml.pre": "viking"}, "without": ["tokenizer_pre"]}


def test_an_unknown_split_is_refused(tmp_path):
    path = written(built("llama2"), tmp_path, **UNKNOWN_SPLIT)
    with pytest.raises(UsageError, match=r"splits a text in a way that is not known here \(viking\)"):
        open_model(path)
    given = checkpoints.byte_tokenizer()
    assert open_model(path, tokenizer=given).tokenizer is given


@pytest.mark.parametrize("options", [{"without": ["tokenizer"]}, UNKNOWN_SPLIT])
def test_a_tokenizer_beside_a_file_without_one(options, tmp_path, capfd):
    """Oracle: what `transformers` makes of the same folder. Nothing is printed."""
    path = written(built("llama2"), tmp_path, **options)
    if "more" not in options:
        with pytest.raises(
            UsageError, match=r"model.gguf has no tokenizer beside its weights .*: save one there"
        ):
            open_model(path).required_tokenizer()
    checkpoints.byte_tokenizer().save_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("hello he")["input_ids"]
    assert len(ids) == 8  # bytes, of which the file's own would merge some
    for opened in (open_model, functools.partial(open_streamed, say=opened_whole)):
        for place in (path, tmp_path):
            assert opened(place).tokenizer("hello he")["input_ids"] == ids
    assert capfd.readouterr() == ("", "")
    gguf_files.write(built("llama2"), path)
    assert len(open_model(path).tokenizer("hello he")["input_ids"]) < 8


def test_a_run_says_how_the_weights_are_stored(tmp_path):
    path = written(
        built("llama2", intermediate_size=64), tmp_path, types=Type.Q4_0, more={"general.file_type": 2}
    )
    status, _, errors = call("survey", path, "--contexts", 4, "--length", 16, "--out", tmp_path / "run")
    assert status == 0, errors
    assert "GGUF, Q4_0 (weights decoded to float32)" in errors
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["model"]
    assert recorded["gguf"] == "Q4_0"
    assert recorded["tensor_types"]["Q4_0"] == 23
    assert recorded["sha256"] == sha256(path.read_bytes()).hexdigest()
    assert (
        "GGUF, Q4_0 (weights decoded to float32)" in (tmp_path / "run" / "report" / "index.html").read_text()
    )


@pytest.mark.parametrize("streamed", [[], ["--stream"]])
def test_pruned_it_is_a_checkpoint_that_transformers_opens(streamed, tmp_path):
    path = written(built("qwen3"), tmp_path)
    out = tmp_path / "pruned"
    status, _, errors = call(
        "prune", path, "--method", "magnitude", "--sparsity", 0.5, "--out", out, *streamed
    )
    assert status == 0, errors
    plain, ours = AutoModelForCausalLM.from_pretrained(out), open_model(out)
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, ours.logits(IDS), rtol=0, atol=0)
    q = plain.model.layers[0].self_attn.q_proj.weight
    assert (q == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    text, tokenizer = "hello, he said", AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == open_model(path).tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.real
@pytest.mark.parametrize(("name", "loss"), [("smollm2", 3.3), ("gemma3", 4.0)])
def test_real_models_predict_text(name, loss, real):
    """Nats per token on an English sentence; what reads positions, norms or words wrongly is above 8."""
    model = open_model(real(name))
    text = "The tower is 324 metres tall, about the same height as an 81-storey building, and the tallest in Paris."
    ids = torch.tensor(model.tokenizer(text)["input_ids"])[None]
    assert torch.nn.functional.cross_entropy(model.logits(ids)[0, :-1], ids[0, 1:]).item() < loss


@pytest.mark.real
def test_the_real_tokenizers(real):
    """SmolLM2's ids are those that its own tokenizer gives; Gemma's texts begin with BOS and come back."""
    smollm2 = open_model(real("smollm2")).tokenizer
    assert smollm2("Hello world! 123")["input_ids"] == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm2("  multiple   spaces")["input_ids"] == [216, 2701, 256, 5600]
    assert "<|im_start|>" in smollm2.chat_template
    gemma = open_model(real("gemma3")).tokenizer
    ids = gemma("Café déjà vu,  1984\n\n")["input_ids"]
    assert ids[0] == gemma.bos_token_id == 2
    assert gemma.decode(ids[1:]) == "Café déjà vu,  1984\n\n"


@pytest.mark.real
@pytest.mark.parametrize(("name", "architecture"), [("smollm2", "llama"), ("gemma3", "gemma3")])
def test_real_weights_are_those_that_gguf_decodes(name, architecture, real):
    """Q4_1 and Q8_0; Q4_K, Q5_0, Q6_K and Q8_0: to the bit. Opening takes the model's memory and one tensor's."""
    code = "import sys\nfrom benchmarks.timing import peak_memory\nfrom theodolite import open_model\n"
    code += "import theodolite.models.stored.gguf\nbefore = peak_memory()\nopen_model(sys.argv[1])\n"
    code += "print(peak_memory() - before)"
    done = subprocess.run(
        [sys.executable, "-c", code, real(name)], capture_output=True, text=True, check=True
    )
    opened = open_model(real(name)).hf
    sizes = [parameter.nbytes for parameter in opened.parameters()]
    assert int(done.stdout) < sum(sizes) + max(sizes)
    tensors = gguf_files.tensors_of(opened, architecture)
    for stored in gguf.GGUFReader(real(name)).tensors:
        decoded = gguf.dequantize(stored.data, stored.tensor_type)
        np.testing.assert_array_equal(tensors.pop(stored.name), decoded, err_msg=stored.name)
    assert not tensors
