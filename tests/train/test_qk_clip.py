"""QK-Clip, against logits measured again by plain eager attention in float64, and the paper's rule by names."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import PreTrainedModel

from tests import checkpoints
from tests.models.modules import GPT, HEADS, VOCABULARY
from tests.processes import ranks
from tests.slow import slow_but
from tests.train.test_geometry import IDS, eager_logits
from tests.train.test_locater import Adapted, examples, trained
from tests.train.test_sharded import spread
from theodolite import open_module
from theodolite.errors import UsageError
from theodolite.train import GeometryMonitor, QKClip, QKClipCallback

FAMILIES = {
    **{name: {} for name in ("gpt2", "llama3", "gpt_oss")},
    "deepseek_v2": {"q_lora_rank": None, "num_hidden_layers": 2, "first_k_dense_replace": 2},
    "deepseek_v3": {"num_hidden_layers": 2},
}
"""With changes: without latent queries, and without experts, which have no float64."""


def largest_of(logits: list[Tensor]) -> Tensor:
    """(layers, heads), of the keys that queries see; without the column of a learned sink."""
    return torch.stack([x[..., : IDS.shape[1]].amax((0, 2, 3)) for x in logits])


@pytest.mark.parametrize("family", slow_but(["gpt2"], list(FAMILIES)))
def test_the_largest_logit_is_the_threshold_afterwards(family):
    """Oracle: what transformers' eager attention takes the softmax of, in float64, before and after; of layer 1."""
    model = checkpoints.build(family, **FAMILIES[family]).double()
    model.set_experts_implementation("eager")  # the fast ones have no float64
    before = eager_logits(copy.deepcopy(model))
    largest = largest_of(before)
    threshold = float(largest[1].sort().values[1:3].mean())  # two heads of four exceed it
    asked = torch.full_like(largest, threshold)
    asked[1] = largest[1]
    over = asked[1] > threshold
    clipped = QKClip(model, threshold)(asked)
    assert set(clipped["layer"]) == {1}
    assert clipped["head"].tolist() == over.nonzero().flatten().tolist()
    np.testing.assert_allclose(clipped["gamma"], threshold / clipped["largest_logit"])
    after = eager_logits(model)
    torch.testing.assert_close(largest_of(after)[1][over], asked.new_full((2,), threshold), rtol=1e-6, atol=0)
    keys = slice(IDS.shape[1])
    gamma = torch.where(over, threshold / largest[1], 1.0).view(1, -1, 1, 1)
    torch.testing.assert_close(after[1][..., keys], before[1][..., keys] * gamma, rtol=1e-6, atol=1e-6)
    assert torch.equal(after[1][:, ~over], before[1][:, ~over])
    assert torch.equal(after[0], before[0])


GAMMA = torch.tensor([0.25, 1.0, 0.5, 1.0], dtype=torch.float64)
"""Of the four heads of layer 1; those of layer 0 are below the threshold."""


def clip_layer_one(model: PreTrainedModel, layers: int) -> None:
    largest = torch.full((layers, 4), 2.0, dtype=torch.float64)
    largest[1] = 10.0 / GAMMA
    clipped = QKClip(model, 10.0)(largest)
    assert clipped["head"].tolist() == [0, 2]


def expected_gpt2(state: dict[str, Tensor]) -> None:
    """Queries, keys and values side by side in the columns of one matrix."""
    for name in ("weight", "bias"):
        fused = state[f"transformer.h.1.attn.c_attn.{name}"].unflatten(-1, (3, 4, 8))
        fused[..., :2, :, :] *= GAMMA.sqrt().view(4, 1)


def expected_deepseek(state: dict[str, Tensor]) -> None:
    """The paper's: √γ of both parts without rotation, γ of the rotated query; its key and the values as they were."""
    gamma, prefix = GAMMA.view(4, 1, 1), "model.layers.1.self_attn"
    query, key = (state[f"{prefix}.{name}_b_proj.weight"].unflatten(0, (4, 16)) for name in ("q", "kv"))
    query[:, :8] *= gamma.sqrt()
    query[:, 8:] *= gamma
    key[:, :8] *= gamma.sqrt()


@pytest.mark.parametrize(
    ("family", "layers", "expect", "dtype"),
    [("gpt2", 3, expected_gpt2, torch.bfloat16), ("deepseek_v3", 2, expected_deepseek, torch.float64)],
)
def test_the_weights_are_scaled_as_the_paper_scales_them(family, layers, expect, dtype):
    """Oracle: the rule, applied to the parameters by their names; no other entry changes by a bit."""
    model = checkpoints.build(family, **FAMILIES[family]).to(dtype)
    before = copy.deepcopy(model.state_dict())
    expected = {name: tensor.double().clone() for name, tensor in before.items()}
    expect(expected)
    clip_layer_one(model, layers)
    for name, tensor in model.state_dict().items():
        rtol = 1e-2 if dtype.itemsize == 2 else 1e-12
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=rtol, atol=0)
        same = expected[name] == before[name]
        assert torch.equal(tensor[same], before[name][same]), name


def test_layers_that_share_their_weights_are_clipped_by_the_largest_of_all():
    """Oracle: the one matrix, by name."""
    model = checkpoints.build("albert")
    query = model.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.query.weight
    before = query.detach().clone()
    largest = torch.tensor([[1.0] * 4, [1.0, 8.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0], [1.0] * 4])
    clipped = QKClip(model, 2.0)(largest)
    assert clipped.to_numpy().tolist() == [[0, 1, 1, 0.25], [1, 1, 8, 0.25], [2, 1, 4, 0.25], [3, 1, 1, 0.25]]
    expected = before.clone()
    expected[8:16] *= 0.5
    assert torch.equal(query, expected)


@pytest.mark.slow
def test_a_module_of_ones_own():
    """Oracle: the products of its queries and keys, by hand."""
    torch.manual_seed(0)
    model = GPT().double()

    def logits() -> Tensor:
        """Of the first block."""
        block = model.transformer["h"][0]
        query, key, _ = block.attention.qkv(block.norm(model.embedded(IDS[:, :12] % VOCABULARY))).chunk(3, -1)
        query, key = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (query, key))
        products = query @ key.mT / query.shape[-1] ** 0.5
        return products.detach().masked_fill(torch.ones_like(products).triu(1).bool(), -torch.inf)

    before = logits()
    largest = before.amax((0, 2, 3))
    threshold = float(largest.sort().values[1:3].mean())
    opened = open_module(model, vocabulary=VOCABULARY)
    asked = torch.full((opened.layers, opened.heads), threshold / 2, dtype=torch.float64)
    asked[0] = largest
    QKClip(opened, threshold)(asked)
    after = logits()
    torch.testing.assert_close(after.amax((0, 2, 3)), largest.clamp_max(threshold), rtol=1e-6, atol=0)
    assert torch.equal(after[:, largest <= threshold], before[:, largest <= threshold])


def test_a_look_of_the_monitor_clips_once(tmp_path):
    """Oracle: eager attention on the monitor batch; the weights before."""
    model = checkpoints.build("gpt2")
    monitor = GeometryMonitor(model, IDS, every=1, folder=tmp_path)
    before = largest_of(eager_logits(copy.deepcopy(model)))
    threshold = float(before.quantile(0.5))
    clip = QKClip(model, threshold)
    assert not len(clip(monitor.last))  # before the first look
    monitor(0)
    over = before > threshold
    assert len(clip(monitor.last)) == over.sum()
    weights = copy.deepcopy(model.state_dict())
    assert not len(clip(monitor.last))
    resumed = GeometryMonitor(model, IDS, every=2, folder=tmp_path)
    assert resumed(1) == {}
    assert resumed.last is not None
    assert not len(clip(resumed.last))  # of the weights before it clipped
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    largest = largest_of(eager_logits(copy.deepcopy(model)))
    torch.testing.assert_close(
        largest[0][over[0]], largest.new_full((int(over[0].sum()),), threshold), rtol=1e-5, atol=0
    )
    assert not len(clip(torch.full((3, 4), threshold, dtype=torch.float64)))  # not above it


@pytest.mark.slow
def test_the_callback_clips_by_every_look(tmp_path):
    """Oracle: eager attention on the monitor batch; the learning rate is 0, so that clipping alone changes weights."""
    model = checkpoints.build("llama2")
    first = int((largest_of(eager_logits(copy.deepcopy(model))) > 3.0).sum())
    callback = QKClipCallback(3.0, ids=IDS, every=2)
    trainer = trained(model, examples(4), tmp_path, [callback], max_steps=4, learning_rate=0.0)
    logged = {
        row["step"]: row["geometry/clipped"] for row in trainer.state.log_history if "geometry/clipped" in row
    }
    assert logged[0] == first
    assert set(logged) <= {0, 2, 4}
    assert float(largest_of(eager_logits(copy.deepcopy(model)))[0].max()) == pytest.approx(3.0, rel=1e-5)


def test_wrong_calls_are_refused():
    for family, words in (
        (
            "qwen3",
            r"layer 0: model\.layers\.0\.self_attn: .* norms inside: q_norm, k_norm.* cannot be clipped",
        ),
        ("gemma2", "caps its logits: QK-Clip is not defined"),
        ("bloom", r"adds a bias \(ALiBi"),
    ):
        with pytest.raises(UsageError, match=words):
            QKClip(checkpoints.build(family))
    model = checkpoints.build("llama2")
    for threshold in (0, float("nan"), float("inf"), "100"):
        with pytest.raises(UsageError, match=r"threshold is .*: give a number above 0"):
            QKClip(model, threshold)
    clip = QKClip(model)
    not_finite = torch.tensor([[0.0] * 4, [0.0, torch.nan, 0.0, 0.0], [200.0] * 4])
    for largest, words in (
        (torch.zeros(4), r"shape \(4,\): give \(3, 4\), \(layers, heads\)"),
        (not_finite, "largest logits of block 1 are NaN or infinite"),
    ):
        with pytest.raises(UsageError, match=words):
            clip(largest)
    attention = model.model.layers[1].self_attn
    attention.k_proj = Adapted(attention.k_proj)
    with pytest.raises(UsageError, match=r"1\.self_attn\.k_proj\.weight is no longer .* make a new QKClip"):
        clip(torch.zeros(3, 4))


LARGEST = torch.tensor([[9.0, 1.0, 40.0, 1.0], [1.0, 20.0, 1.0, 1.0], [1.0, 1.0, 1.0, 30.0]])


KINDS = ("llama3, FSDP2 before", "gpt2, FSDP2", "llama2, tensor parallel")


def work(rank: int) -> dict[str, dict[str, Tensor]]:
    """One of the processes: clips sharded models, counts what it sends for that, and gathers the weights."""
    whole = {}
    for kind in KINDS:
        family, how = kind.split(", ")
        model = checkpoints.build(family)
        if "before" in how:
            spread(how, model)
        clip = QKClip(model, 5.0)
        if "before" not in how:
            spread(how, model)
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with CommDebugMode() as sent:
            assert len(clip(LARGEST)) == 4
        assert sent.get_total_counts() == 0
        whole[kind] = {
            name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()
        }
    with pytest.raises(UsageError, match="make the QKClip before the model is tensor parallel"):
        QKClip(model)
    return whole


@pytest.mark.slow
def test_sharded_weights_are_scaled_where_they_are():
    """Oracle: the same model in one process, whole; and PyTorch's own count of what was sent."""
    whole, _ = ranks(work)
    for kind in KINDS:
        model = checkpoints.build(kind.split(", ")[0])
        assert len(QKClip(model, 5.0)(LARGEST)) == 4
        for name, parameter in model.named_parameters():
            assert torch.equal(whole[kind][name], parameter), (kind, name)
