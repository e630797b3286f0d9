"""Opening: what is refused, in one line that says what to do, and what an opened model knows of itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests import checkpoints
from tests.models.test_every_family import Seen
from tests.slow import slow_but
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models import OpenModel, open_model, open_weights, verification
from theodolite.models.hooks import hooked
from theodolite.models.structure import NoAttention
from theodolite.system.choices import check_attention
from tools import measured_families, small_models


def _refused(source, error: type[TheodoliteError], words: str, opening=open_model, **options) -> None:
    with pytest.raises(error, match=words) as caught:
        opening(source, **options)
    assert "\n" not in str(caught.value)


def _edited(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def _with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _holding(value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors["transformer.h.1.attn.c_attn.weight"][3, 5].fill_(value)


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


LACKED = "transformer.h.2.attn.c_attn.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], type[TheodoliteError], str]] = {
    "pickled": (_pickled, UsageError, r"pickled weights \(pytorch_model.bin\).*save_pretrained"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), UsageError, "holds no weights"),
    "NaN": (
        lambda folder: _with_tensors(folder, _holding(float("nan"))),
        WorkError,
        r"transformer.h.1.attn.c_attn.weight holds NaN",
    ),
    "infinite": (
        lambda folder: _with_tensors(folder, _holding(float("inf"))),
        WorkError,
        r"transformer.h.1.attn.c_attn.weight holds infinite",
    ),
    "a tensor lacks": (
        lambda folder: _with_tensors(folder, lambda tensors: tensors.pop(LACKED)),
        WorkError,
        "lacks 1 of the model's tensors .*h.2.attn.c_attn.weight",
    ),
    "fewer layers": (
        lambda folder: _edited(folder, n_layer=2),
        WorkError,
        "tensors of layers that its config.json does not have .*h.2.",
    ),
    "other shapes": (lambda folder: _edited(folder, n_embd=64), UsageError, "cannot open"),
    "truncated": (_truncated, UsageError, "cannot open"),
    "no json": (lambda folder: (folder / "config.json").write_text("{not json"), UsageError, "cannot open"),
    "unknown family": (
        lambda folder: _edited(folder, model_type="perceiver9", architectures=["Perceiver9LM"]),
        UsageError,
        "cannot open",
    ),
}
ONLY_WHERE_READ = ("NaN", "infinite")
"""Damages that `open_weights` finds in the layer that it reads."""


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of the GPT-2 checkpoint to break."""
    return shutil.copytree(checkpoint("gpt2"), tmp_path / "broken")


@pytest.mark.parametrize("opening", [open_model, open_weights])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused_in_a_line(damage, opening, broken):
    damaging, error, words = DAMAGES[damage]
    damaging(broken)
    if opening is open_weights and damage in ONLY_WHERE_READ:
        with pytest.raises(error, match=words):
            open_weights(broken).head_weights(1)
    else:
        _refused(broken, error, words, opening)


@pytest.mark.parametrize("opening", [open_model, open_weights])
def test_what_is_no_checkpoint(tmp_path, opening):
    _refused(str(tmp_path / "nowhere"), UsageError, "no checkpoint at .*nowhere", opening)
    _refused(tmp_path, UsageError, "no checkpoint: theodolite needs a folder with config.json", opening)
    _refused("nobody/no-such-model", UsageError, "cannot open nobody/no-such-model", opening)
    _refused(tmp_path, UsageError, "unknown dtype int8", opening, dtype="int8")


def test_code_that_a_checkpoint_brings_is_not_run(broken, tmp_path):
    marker = tmp_path / "ran"
    _edited(broken, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"})
    (broken / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    _refused(broken, UsageError, "cannot open")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("t5", "decoder"), ("t5", "cross"), ("bart", "encoder"), ("encoder-decoder", "decoder")],
)
def test_an_encoder_decoder_is_looked_at_in_three_ways(kind, attention, tmp_path):
    """Oracle: the attention that transformers returns, and its encoder's or decoder's hidden states."""
    folder = _small(kind, tmp_path)
    model = open_model(folder, attention=attention)
    hf = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(300, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = hf(input_ids=ids, decoder_input_ids=ids, output_attentions=True, output_hidden_states=True)
    seen = Seen()
    with hooked(model, seen):
        model.forward(ids)
    weights = own[{"cross": "cross_attentions"}.get(attention, f"{attention}_attentions")]
    streams = own["encoder_hidden_states" if attention == "encoder" else "decoder_hidden_states"]
    assert len(seen.weights) == len(weights) == model.layers
    for got, expected in zip(seen.weights, weights, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    for got, expected in zip(seen.streams[:-1], streams[:-1], strict=True):  # the last one is behind a norm
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert model.source.predict is None
    name = (
        "decoder.block.1.layer.1.EncDecAttention"
        if attention == "cross"
        else "decoder.block.1.layer.0.SelfAttention"
    )
    if kind == "t5":
        module = hf.get_submodule(name)
        for ours, theirs in (("w_q", "q"), ("w_k", "k"), ("w_v", "v")):
            expected = getattr(module, theirs).weight.unflatten(0, (model.heads, -1)).mT.double()
            torch.testing.assert_close(getattr(model.head_weights(1), ours), expected)


def test_the_text_side_of_whisper():
    """Oracle: the decoder's attention that transformers returns, over silence."""
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8, "vocab_size": 40}
    lengths = {"max_source_positions": 15, "max_target_positions": 20}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sides, **sizes, **lengths, **special)
    hf = transformers.WhisperForConditionalGeneration(config).eval()
    ids, seen = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0)), Seen()
    model = open_model(hf)
    with hooked(model, seen):
        model.forward(ids)
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        own = hf(torch.zeros(2, 8, 30), decoder_input_ids=ids, output_attentions=True).decoder_attentions
    for got, expected in zip(seen.weights, own, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(UsageError, match="hears speech: only its decoder's own attention is looked at"):
        open_model(hf, attention="cross")


def test_attention_is_asked_for_where_there_are_several(tmp_path):
    words = "T5Gemma2ForConditionalGeneration has no attention of the kind that is asked for"
    _refused(_small("t5gemma2", tmp_path), UsageError, words)
    with pytest.raises(UsageError, match="unknown attention both: use decoder, encoder, cross"):
        check_attention("both")


@pytest.mark.parametrize(
    "kind",
    slow_but(
        ["xlnet", "deepseek_v32", "nllb-moe"],
        ["diffllama", "gemma3n_text", "xlnet", "xlm", "zamba", "deberta-v2", "deepseek_v32", "nllb-moe"],
    ),
)
def test_hidden_states_and_attention_wherever_they_are(kind, tmp_path):
    """Oracle: what transformers returns: of several streams, all; of XLNet's, contexts come second.

    DeepSeek's queries choose 4 of the keys; NLLB's router takes the mask for one of padding: both of larger weights.
    """
    case = next(case for case in small_models.cases() if case.name == kind)
    config, close, length = small_models.small_config(case), 1e-4, 12
    model = small_models.build(case)
    if kind in ("deepseek_v32", "nllb-moe"):
        config.index_topk, close, length = 4, 1e-3, 24
        torch.manual_seed(0)
        model = getattr(transformers, case.model_class)(config).eval()
        for parameter in model.parameters():
            parameter.data *= 3 if parameter.ndim > 1 else 1
    model.save_pretrained(tmp_path)
    ids = torch.randint(300, (3, length), generator=torch.Generator().manual_seed(0))
    streams, weights = measured_families.eager(tmp_path, ids)
    opened, seen = open_model(tmp_path), Seen()
    with hooked(opened, seen):
        opened.forward(ids)
    for got, expected in zip(seen.streams[:-1], streams[:-1], strict=True):
        torch.testing.assert_close(got, torch.from_numpy(expected), rtol=close, atol=close)
    assert len(seen.weights) == opened.layers - opened.heads_of.count(0)
    for got, expected in zip(seen.weights, weights, strict=True):
        torch.testing.assert_close(got, torch.from_numpy(expected), rtol=close, atol=close / 10)


def _small(name, folder):
    case = next(case for case in small_models.cases() if case.name == name)
    small_models.build(case).save_pretrained(folder)
    return folder


def test_blocks_that_attend_twice_are_refused(tmp_path):
    words = "LongcatFlashForCausalLM has a block that attends twice"
    _refused(_small("longcat_flash", tmp_path), UsageError, words)


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}


def _opened(kind: str, family: str, folder: Path, **options: Any) -> OpenModel:
    config = getattr(transformers, f"{family}Config")(**{"vocab_size": 300, **SIZES, **options})
    getattr(transformers, family + kind)(config).save_pretrained(folder)
    return open_model(folder)


def test_blocks_without_attention_are_layers_without_heads(tmp_path):
    kinds = ["conv", "full_attention", "conv"]
    model = _opened("ForCausalLM", "Lfm2", tmp_path, num_hidden_layers=3, layer_types=kinds)
    assert (model.layers, model.heads_of, model.attending) == (3, (0, 2, 0), (1,))
    assert list(model.structure.blocks) == list(model.hf.model.layers)
    with pytest.raises(NoAttention, match=r"layer 2 \(model.layers.2\) does not attend, so it has no heads"):
        model.head_weights(2)
    with pytest.raises(UsageError, match=r"layer 0 .* does not attend"):
        model.check_place(0, 1)


def test_blocks_that_are_lists_of_layers(tmp_path):
    """T5's encoder: the stream is read behind the whole block, feed-forward part included."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = _opened("EncoderModel", "T5", tmp_path, **sizes)
    assert model.positions == "relative bias"
    assert list(model.structure.blocks) == list(model.hf.encoder.block)


def test_causal_is_about_all_layers(tmp_path):
    """A window on the first layer hides late keys on a short sequence, and is not causal for that."""
    windows = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    assert not _opened("ForMaskedLM", "ModernBert", tmp_path, num_hidden_layers=2, **windows).causal


def test_norms_between_projections_are_not_taken_out(tmp_path):
    """DeepSeek 2 normalises inside its low-rank projections: it has no query-key matrix, with or without."""
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    ranks |= {"v_head_dim": 6}
    model = _opened(
        "ForCausalLM", "DeepseekV2", tmp_path, num_hidden_layers=1, first_k_dense_replace=1, **ranks
    )
    with pytest.raises(WorkError, match="no affine function"):
        model.head_weights(0)


def test_roberta_positions_start_after_its_padding(tmp_path):
    model = _opened("ForMaskedLM", "Roberta", tmp_path, num_hidden_layers=1, max_position_embeddings=40)
    assert model.longest == 38
    assert model.tokenizer is None


def test_attention_that_is_not_recomputed_is_refused_by_layer(checkpoint, monkeypatch):
    """A family that does something to its logits which the tap does not know must not pass."""
    true_attend = verification.attend

    def wrong(inputs):
        return true_attend(inputs) * 1.01

    monkeypatch.setattr(verification, "attend", wrong)
    _refused(
        checkpoint("gpt2"), WorkError, r"layer 0 \(transformer.h.0.attn\): the attention output recomputed"
    )


def _with_large_logits(family: str, factor: float, folder: Path) -> Path:
    """A random model whose queries are so many times longer, so that its attention hangs on the logits' rounding."""
    model = checkpoints.build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "query.weight")):
                parameter *= factor
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "factor"), [("mistral", 16.0), ("bert", 64.0), ("llama3", 256.0)])
def test_large_logits_are_no_other_family(family, factor, tmp_path, monkeypatch):
    """Softmax weights are off by the rounding of their logits; a tap that is wrong is off by more, and is refused."""
    folder = _with_large_logits(family, factor, tmp_path)
    assert open_model(folder).layers == 3
    true_attend = verification.attend

    def scaled(inputs):
        return true_attend(replace(inputs, scaling=inputs.scaling * 1.05))

    by_one_per_cent = lambda inputs: true_attend(inputs) * 1.01  # noqa: E731
    # Attention that is all on one key does not change with its logits' scale.
    for wrong in (by_one_per_cent, scaled)[: 2 if factor < 64 else 1]:
        monkeypatch.setattr(verification, "attend", wrong)
        _refused(folder, WorkError, r"the attention output recomputed from its queries")


def test_a_layer_that_does_not_exist(opened):
    with pytest.raises(UsageError, match="layers 0 to 2"):
        opened("gpt2").head_weights(3)


def test_queries_that_are_not_affine_are_refused_by_layer(checkpoint):
    model = open_model(checkpoint("llama2"))
    attention = model.structure.attention[1]
    attention.q_proj = nn.Sequential(attention.q_proj, nn.Tanh())
    with pytest.raises(WorkError, match="layer 1: queries and keys are no affine function"):
        model.head_weights(1)


def test_a_model_shows_itself_in_a_line(opened):
    """Oracle: the sizes that the checkpoint was made with."""
    model = opened("gpt2")
    assert repr(model) == f"OpenModel({model.id}: gpt2, 3 layers × 4 heads × width 32, float32 on cpu)"
    with model.intervention("ablated"):
        assert repr(model).endswith("on cpu, ablated)")


@pytest.mark.parametrize("opening", [open_model, open_weights])
def test_fewer_positions_than_the_sequence_of_verification(tmp_path, opening):
    """Oracle: a model with more positions, of which it keeps the first."""
    folder = checkpoints.write("gpt2", tmp_path / "whole")
    few = _edited(shutil.copytree(folder, tmp_path / "few"), n_positions=9)
    tensors = load_file(few / "model.safetensors")
    name = next(name for name in tensors if name.endswith("wpe.weight"))
    save_file(tensors | {name: tensors[name][:9].clone()}, few / "model.safetensors", {"format": "pt"})
    model = opening(few)
    assert model.longest == 9
    assert torch.equal(model.head_weights(1).w_q, opening(folder).head_weights(1).w_q)


ROPE = {"rope_type": "magic", "rope_theta": 10_000.0}
KNOWN = r"rope_type = 'magic'; transformers .* knows default, .*llama3"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("opening", "family", "changes", "words"),
    [
        (open_model, "mistral", {"sliding_window": 0}, "sliding_window = 0; use a number above 0, or null"),
        (open_model, "mistral", {"sliding_window": -3}, "sliding_window = -3; use a number above 0, or null"),
        (open_model, "llama3", {"rope_parameters": ROPE}, KNOWN),
        (open_weights, "llama3", {"rope_parameters": ROPE}, KNOWN),
    ],
)
def test_configs_that_cannot_be_are_refused(opening, family, changes, words, tmp_path):
    """Windows in which tokens see nothing, and an unknown kind of RoPE, named beside those that are known."""
    _refused(_edited(checkpoints.write(family, tmp_path / "m"), **changes), UsageError, words, opening)


def test_what_overflows_in_half_precision_is_told_to_use_more(tmp_path):
    folder = checkpoints.write("gpt2", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("0.attn.c_attn.weight"))
    save_file(tensors | {name: tensors[name] * 1e7}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        WorkError, match=r"c_attn\.weight holds infinite values in float16: try --dtype float32"
    ):
        open_model(folder, dtype="float16")
    assert open_model(folder).hf.dtype == torch.float32
    good = torch.ones(1, 4, 8, dtype=torch.float16)
    for bad in (torch.inf, torch.nan):
        with pytest.raises(
            WorkError, match=r"layer 0: its attention outputs hold NaN or .*: try --dtype float32"
        ):
            verification.check_recomputed("layer 0", good * bad, good, [1.0])


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_no_depth_and_no_dtype_makes_a_wrong_attention_pass(wrong):
    """Where rounding is 0.8 % a step, a hundred steps in each of forty layers would allow anything."""
    own = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    close = (own.float() * 1.02).bfloat16()
    verification.check_recomputed("layer 39", own, close, [1.0] * 40)
    with pytest.raises(WorkError, match=r"layer 39: the attention output recomputed .* is not supported"):
        verification.check_recomputed("layer 39", own, wrong * own, [1.0] * 40)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"device": "cpu", "device_map": "auto"},
            "--device and --device-map both say where the model goes: give one",
        ),
        ({"device": "meta"}, "cannot use device meta, which holds no numbers: use --device cpu"),
        ({"attention": "encoder"}, "GPT2LMHeadModel is no encoder-decoder, and attends in one way only"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words, checkpoint):
    _refused(checkpoint("gpt2"), UsageError, words, **options)


def test_a_model_that_would_change_itself_is_opened_from_its_folder_and_for_short_texts(tmp_path):
    """BigBird turns to full attention on the first short text, and never back."""
    case = next(case for case in small_models.cases() if case.name == "big_bird")
    config = small_models.small_config(case)
    config.block_size, config.num_random_blocks = 4, 1
    folder = tmp_path
    transformers.BigBirdForMaskedLM(config).save_pretrained(folder)
    opened = open_model(folder)
    assert opened.longest == 28  # (5 + 2 · 1) · 4, from where on it would attend to blocks
    model = type(opened.hf).from_pretrained(folder)
    assert model.bert.attention_type == "block_sparse"
    with pytest.raises(UsageError, match="turns itself to full attention for good"):
        open_model(model)
    assert model.bert.attention_type == "block_sparse"
    model.bert.set_attention_type("original_full")
    assert open_model(model).layers == opened.layers
