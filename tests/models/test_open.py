"""Opening: what is refused, in one line that says what to do, and what an opened model knows of itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import checkpoints
from tests.checkpoints import edited, with_tensors
from tests.models.test_every_family import Seen
from tests.slow import slow_but
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models import OpenModel, open_model, open_streamed, structure_search
from theodolite.models.hooks import hooked
from theodolite.models.stored.loading import Checkpoint
from theodolite.models.structure import NoAttention
from theodolite.system.choices import check_attention
from tools import measured_families


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama3"])
def test_logits_at_some_positions_are_those_of_all(family: str, opened) -> None:
    """Oracle: transformers' own logits; a family that caps them among the three."""
    model = opened(family)
    ids = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(0))
    chosen = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    with torch.no_grad():
        expected = model.hf(input_ids=ids).logits[chosen]
    torch.testing.assert_close(model.logits(ids, chosen), expected)
    torch.testing.assert_close(model.logits(ids)[chosen], expected)


def test_a_pipeline_s_model_is_opened_with_its_tokenizer(checkpoint) -> None:
    pipe = transformers.pipeline("text-generation", model=str(checkpoint("gpt2")))
    model = open_model(pipe)
    assert model.root is pipe.model
    assert model.tokenizer is pipe.tokenizer


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "/",
        "/tree/v2",
        "/blob/v2/config.json",
        "/blob/v2/model.safetensors",
        "?library=transformers",
        "#usage",
    ],
)
@pytest.mark.parametrize("scheme", ["https://", ""])
def test_the_address_of_a_page_on_the_hub_names_its_model(rest: str, scheme: str) -> None:
    found = Checkpoint.at(f"{scheme}huggingface.co/someone/their-model.v1{rest}", None)
    assert (found.place, found.id) == ("someone/their-model.v1",) * 2
    assert found.revision == ("v2" if "v2" in rest else None)
    assert Checkpoint.at("https://huggingface.co/gpt2/tree/refs%2Fpr%2F1", None).revision == "refs/pr/1"


def test_a_file_that_is_cut_short_says_so(checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])
    _refused(str(folder), UsageError, "cut short or damaged, download it again")


@pytest.mark.parametrize("path", ["datasets/o/n", "o/n/blob/main/model-Q4.gguf", "spaces/o/n"])
def test_an_address_of_something_else_is_refused(path: str) -> None:
    _refused(f"https://huggingface.co/{path}", UsageError, "no checkpoint at")


def _refused(source, error: type[TheodoliteError], words: str, opening=open_model, **options) -> None:
    with pytest.raises(error, match=words) as caught:
        opening(source, **options)
    assert "\n" not in str(caught.value)


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _configured(**changes: object) -> Callable[[Path], object]:
    return lambda folder: edited(folder, **changes)


def _holding(value: float) -> Callable[[Path], object]:
    name = "transformer.h.1.attn.c_attn.weight"
    return lambda folder: with_tensors(folder, lambda tensors: tensors[name][3, 5].fill_(value))


def _lacking(name: str) -> Callable[[Path], object]:
    return lambda folder: with_tensors(folder, lambda tensors: tensors.pop(name))


WINDOW = "sliding_window = 0; use a number above 0, or null"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], type[TheodoliteError], str]] = {
    "pickled": ("gpt2", _pickled, UsageError, r"pickled weights \(pytorch_model.bin\).*save_pretrained"),
    "no weights": ("gpt2", lambda at: (at / "model.safetensors").unlink(), UsageError, "holds no weights"),
    "NaN": ("gpt2", _holding(float("nan")), WorkError, r"h.1.attn.c_attn.weight holds NaN"),
    "infinite": ("gpt2", _holding(float("inf")), WorkError, r"h.1.attn.c_attn.weight holds infinite"),
    "a tensor lacks": (
        *("gpt2", _lacking("transformer.h.2.attn.c_attn.weight"), WorkError),
        "lacks 1 of the model's tensors .*h.2.attn.c_attn.weight",
    ),
    "fewer layers": (
        *("gpt2", _configured(n_layer=2), WorkError),
        "tensors of layers that its config.json does not have .*h.2.",
    ),
    "other shapes": ("gpt2", _configured(n_embd=64), UsageError, "cannot open"),
    "truncated": ("gpt2", _truncated, UsageError, "cannot open"),
    "no json": ("gpt2", lambda at: (at / "config.json").write_text("{not json"), UsageError, "cannot open"),
    "unknown family": (
        *("gpt2", _configured(model_type="perceiver9", architectures=["Perceiver9LM"]), UsageError),
        "cannot open",
    ),
    "an empty window": ("mistral", _configured(sliding_window=0), UsageError, WINDOW),
}
ONLY_WHERE_READ = ("NaN", "infinite")
"""Damages that `open_streamed` finds in the block that it reads."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("damage", "opening"),
    [(damage, open_model) for damage in DAMAGES]
    + [(damage, open_streamed) for damage in DAMAGES if "window" not in damage],
)
def test_damaged_checkpoints_are_refused_in_a_line(damage, opening, copied):
    family, damaging, error, words = DAMAGES[damage]
    folder = copied(family)
    damaging(folder)
    if opening is open_streamed and damage in ONLY_WHERE_READ:
        _refused(folder, error, words, lambda at: open_streamed(at).head_weights(1))
    else:
        _refused(folder, error, words, opening)


@pytest.mark.parametrize("opening", [open_model, open_streamed])
def test_what_is_no_checkpoint(tmp_path, opening):
    _refused(str(tmp_path / "nowhere"), UsageError, "no checkpoint at .*nowhere", opening)
    _refused(tmp_path, UsageError, "no checkpoint: theodolite needs a folder with config.json", opening)
    _refused(
        "nobody/no-such-model",
        UsageError,
        "^there is no folder nobody/no-such-model, and it cannot be opened from the hub: ",
        opening,
    )
    _refused(tmp_path, UsageError, "unknown dtype int8", opening, dtype="int8")


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gpt2", {"device": "cpu", "device_map": "auto"}, "--device-map both say where .*: give one"),
        ("gpt2", {"device": "meta"}, "cannot use device meta, which holds no numbers: use --device cpu"),
        ("gpt2", {"attention": "encoder"}, "GPT2LMHeadModel is no encoder-decoder, and attends in one way"),
        ("t5gemma2", {}, "T5Gemma2ForConditionalGeneration has no such attention"),
        ("longcat_flash", {}, "LongcatFlashForCausalLM has a block that attends twice"),
        (
            "xlm",
            {},
            "XLMWithLMHeadModel attends outside of blocks that are modules and run one after the other",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(family, options, words, checkpoint):
    _refused(checkpoint(family), UsageError, words, **options)
    with pytest.raises(UsageError, match="unknown attention both: use decoder, encoder, cross"):
        check_attention("both")


def test_code_that_a_checkpoint_brings_is_not_run(copied, tmp_path):
    marker, folder = tmp_path / "ran", copied("gpt2")
    edited(folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"})
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    _refused(folder, UsageError, "cannot open")
    assert not marker.exists()


def _assert_seen(
    model: OpenModel, ids: Tensor, weights: Sequence[Any], streams: Sequence[Any], close: tuple[float, ...]
) -> None:
    """Attention, and hidden states but for the last, which transformers has behind a norm.

    `close`: relative tolerance, and absolute ones of both.
    """
    seen = Seen()
    with hooked(model, seen):
        model.forward(ids)
    rtol, *atols = close
    pairs = (
        (seen.weights, weights),
        (seen.streams[:-1], streams[:-1] if len(streams) else seen.streams[:-1]),
    )
    for (got, expected), atol in zip(pairs, atols, strict=True):
        torch.testing.assert_close(got, [torch.as_tensor(of) for of in expected], rtol=rtol, atol=atol)


CLOSE = (1e-4, 1e-6, 1e-5)


def _ids(contexts: int = 3, length: int = 12, vocabulary: int = 300) -> Tensor:
    return torch.randint(vocabulary, (contexts, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("t5", "decoder"), ("t5", "cross"), ("bart", "encoder"), ("encoder-decoder", "decoder")],
)
def test_an_encoder_decoder_is_looked_at_in_three_ways(kind, attention, checkpoint):
    """Oracle: the attention that transformers returns, and its encoder's or decoder's hidden states.

    T5's blocks are lists of layers, behind all of which the stream is read.
    """
    model, ids = open_model(checkpoint(kind), attention=attention), _ids()
    hf = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        checkpoint(kind), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        own = hf(input_ids=ids, decoder_input_ids=ids, output_attentions=True, output_hidden_states=True)
    weights = own[{"cross": "cross_attentions"}.get(attention, f"{attention}_attentions")]
    streams = own["encoder_hidden_states" if attention == "encoder" else "decoder_hidden_states"]
    assert model.layers == len(weights)
    _assert_seen(model, ids, weights, streams, CLOSE)
    assert model.source.predict is None
    if kind == "t5":
        assert list(model.structure.blocks) == list(model.hf.decoder.block)
        assert model.positions == "relative bias" or attention == "cross"
        layer = {"cross": "1.EncDecAttention"}.get(attention, "0.SelfAttention")
        module, read = hf.get_submodule(f"decoder.block.1.layer.{layer}"), model.head_weights(1)
        for ours, theirs in ((read.w_q, module.q), (read.w_k, module.k), (read.w_v, module.v)):
            torch.testing.assert_close(ours, theirs.weight.unflatten(0, (model.heads, -1)).mT.double())


def test_an_encoder_of_speech_is_refused():
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.WhisperConfig(**sizes, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16)
    with pytest.raises(UsageError, match="reads input_features, which theodolite cannot make"):
        open_model(transformers.WhisperForConditionalGeneration(config))


@pytest.mark.parametrize(
    "kind",
    slow_but(
        ["xlnet", "deepseek_v32", "nllb-moe"],
        ["diffllama", "gemma3n_text", "xlnet", "zamba", "deberta-v2", "deepseek_v32", "nllb-moe"],
    ),
)
def test_hidden_states_and_attention_wherever_they_are(kind, checkpoint, tmp_path):
    """Oracle: what transformers returns: of several streams, all; of XLNet's, contexts come second.

    DeepSeek's queries choose 4 of the keys; NLLB's router takes the mask for one of padding: both of larger weights.
    """
    folder, close, length = tmp_path, 1e-4, 12
    if kind in ("deepseek_v32", "nllb-moe"):
        close, length = 1e-3, 24
        model = checkpoints.build(kind, index_topk=4)
        torch.manual_seed(0)
        model = type(model)(model.config).eval()
        for parameter in model.parameters():
            parameter.data *= 3 if parameter.ndim > 1 else 1
        model.save_pretrained(folder)
    else:
        folder = checkpoint(kind)
    streams, weights = measured_families.eager(folder, _ids(length=length))
    opened = open_model(folder)
    assert len(weights) == opened.layers - opened.heads_of.count(0)
    _assert_seen(opened, _ids(length=length), weights, streams, (close, close / 10, close))


def test_blocks_without_attention_are_layers_without_heads():
    model = open_model(checkpoints.build("lfm2"))
    assert (model.layers, model.heads_of, model.attending) == (4, (0, 4, 0, 4), (1, 3))
    assert list(model.structure.blocks) == list(model.hf.model.layers)
    with pytest.raises(NoAttention, match=r"layer 2 \(model.layers.2\) does not attend, so it has no heads"):
        model.head_weights(2)
    with pytest.raises(UsageError, match=r"layer 0 .* does not attend"):
        model.check_place(0, 1)


def test_what_configs_say_otherwise():
    """A window hides late keys, and is not causal for that; RoBERTa's positions begin behind its padding."""
    assert not open_model(checkpoints.build("modernbert")).causal
    roberta = open_model(checkpoints.build("roberta"))
    assert (roberta.longest, roberta.tokenizer) == (126, None)


def test_queries_that_are_not_affine_are_refused_by_layer(anew):
    """DeepSeek 2 normalises between its low-rank projections: it has no query-key matrix, with or without."""
    model = anew("llama2")
    model.structure.attention[1].q_proj = nn.Sequential(model.structure.attention[1].q_proj, nn.Tanh())
    for opened in (model, open_model(checkpoints.build("deepseek_v2"))):
        with pytest.raises(WorkError, match="layer 1: queries and keys are no affine function"):
            opened.head_weights(1)
    with pytest.raises(UsageError, match="layers 0 to 2"):
        model.head_weights(3)


@pytest.mark.parametrize(
    ("family", "factor"), [("gpt2", 1.0), ("mistral", 16.0), ("bert", 64.0), ("llama3", 256.0)]
)
def test_attention_that_is_not_recomputed_is_refused_and_large_logits_are_not(family, factor, monkeypatch):
    """Queries so many times longer: softmax weights are off by the rounding of their logits, a wrong tap by more."""
    model = checkpoints.build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "query.weight")):
                parameter *= factor
    assert open_model(model).layers == 3
    true_attend = structure_search.attend
    wrong = [lambda inputs: true_attend(inputs) * 1.01]
    if factor < 64:  # attention that is all on one key does not change with its logits' scale
        wrong.append(lambda inputs: true_attend(replace(inputs, scaling=inputs.scaling * 1.05)))
    for attend in wrong:
        monkeypatch.setattr(structure_search, "attend", attend)
        _refused(model, WorkError, r"layer \d \(.*att.*\): the attention output recomputed from its queries")


def test_a_model_shows_itself_in_a_line(opened):
    """Oracle: the sizes that the checkpoint was made with."""
    model = opened("gpt2")
    assert repr(model) == f"OpenModel({model.id}: gpt2, 3 blocks × 4 heads × width 32, float32 on cpu)"
    with model.intervention("ablated"):
        assert repr(model).endswith("on cpu, ablated)")


@pytest.mark.parametrize("opening", [open_model, open_streamed])
def test_fewer_positions_than_the_sequence_of_verification(opening, checkpoint, copied):
    """Oracle: a model with more positions, of which it keeps the first."""
    few, name = edited(copied("gpt2"), n_positions=9), "transformer.wpe.weight"
    with_tensors(few, lambda tensors: tensors.update({name: tensors[name][:9].clone()}))
    model = opening(few)
    assert model.longest == 9
    assert torch.equal(model.head_weights(1).w_q, opening(checkpoint("gpt2")).head_weights(1).w_q)


def test_what_overflows_in_half_precision_is_told_to_use_more(copied):
    folder, said = copied("gpt2"), ".*: try --dtype float32"
    with_tensors(folder, lambda tensors: tensors["transformer.h.0.attn.c_attn.weight"].mul_(1e7))
    words = r"c_attn\.weight holds infinite values in float16"
    _refused(folder, WorkError, words + said, dtype="float16")
    assert open_model(folder).hf.dtype == torch.float32
    good = torch.ones(1, 4, 8, dtype=torch.float16)
    for bad in (torch.inf, torch.nan):
        with pytest.raises(WorkError, match="layer 0: its attention outputs hold NaN or " + said):
            structure_search.check_recomputed("layer 0", good * bad, good, [1.0])


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_no_depth_and_no_dtype_makes_a_wrong_attention_pass(wrong):
    """Where rounding is 0.8 % a step, a hundred steps in each of forty layers would allow anything."""
    own = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    close = (own.float() * 1.02).bfloat16()
    structure_search.check_recomputed("layer 39", own, close, [1.0] * 40)
    with pytest.raises(WorkError, match=r"layer 39: the attention output recomputed .* is not supported"):
        structure_search.check_recomputed("layer 39", own, wrong * own, [1.0] * 40)


def test_a_model_that_would_change_itself_is_opened_from_its_folder_and_for_short_texts(tmp_path):
    """BigBird turns to full attention on the first short text, and never back."""
    config = checkpoints.build("big_bird", block_size=4, num_random_blocks=1).config
    transformers.BigBirdForMaskedLM(config).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    assert opened.longest == 28  # (5 + 2 · 1) · 4, from where on it would attend to blocks
    model = type(opened.hf).from_pretrained(tmp_path)
    assert model.bert.attention_type == "block_sparse"
    with pytest.raises(UsageError, match="turns itself to full attention for good"):
        open_model(model)
    assert model.bert.attention_type == "block_sparse"
    model.bert.set_attention_type("original_full")
    assert open_model(model).layers == opened.layers
