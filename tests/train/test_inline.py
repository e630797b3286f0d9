"""Looks at what training computes anyway. Oracles: a look of its own at the same tokens, whose columns are held against
the dense computation elsewhere; and the bytes of a training that nobody looked at."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface

from tests import checkpoints
from tests.models.modules import GPT, Attention, gpt_of, opened
from tests.processes import ranks
from tests.slow import slow_but
from tests.train.test_locater import trained as in_trainer
from tests.train.test_sharded import spread
from theodolite import open_module
from theodolite.errors import UsageError
from theodolite.train import GeometryCallback, GeometryMonitor
from theodolite.train.geometry import GeometryReader
from theodolite.train.monitor import GeometryWarning

IDS = torch.randint(3, 40, (6, 24), generator=torch.Generator().manual_seed(0))


def model_of(family: str, attention: str = "sdpa") -> Any:
    model = checkpoints.build(family)
    model.set_attn_implementation(attention)
    return dropping(model, 0.0).train()


def dropping(model: Any, share: float = 0.1) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = share
    return model


def assert_same(look: Any, other: Any) -> None:
    for name in ("heads", "layers"):
        pd.testing.assert_frame_equal(getattr(look, name), getattr(other, name), rtol=1e-4, atol=1e-5)


def inline_look(model: nn.Module, forward: Callable[[], Any], **options: Any) -> Any:
    monitor = GeometryMonitor(model, inline=True, every=1, **options)
    assert monitor(0) == {}
    forward()
    assert monitor(0) == {}
    numbers = monitor(1)
    assert numbers["entropy_mean"] == pytest.approx(monitor.last.heads["entropy"].mean())
    assert monitor.last.step == 0
    return monitor.last


@pytest.mark.parametrize(
    ("family", "attention"),
    slow_but(
        [("gpt2", "eager")], [("gpt2", "eager"), ("llama3", "sdpa"), ("bert", "sdpa"), ("bloom", "eager")]
    ),
)
def test_columns_are_those_of_a_look(family, attention):
    model = model_of(family, attention)
    expected = GeometryReader(model, IDS).look()
    assert_same(inline_look(model, lambda: model(input_ids=IDS)), expected)


@pytest.mark.slow
def test_a_module_of_one_s_own_that_attends_by_hand():
    module = GPT(by_hand=True).train()
    opened, ids = open_module(module, vocabulary=50), IDS[:, :20]
    expected = GeometryReader(opened, ids).look()
    assert_same(inline_look(opened, lambda: module(ids)), expected)


def trained(change: str, inline: bool) -> tuple[dict[str, Tensor], int]:
    """Four steps of two micro-batches each; how many looks there were."""
    model = dropping(model_of("gpt2", "eager" if "eager" in change else "sdpa"))
    if change.startswith("checkpointing"):
        model.activation_checkpointing_enable({"use_reentrant": change.endswith("reentrant")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = GeometryMonitor(model, inline=True, every=2, spectra_every=2) if inline else None
    looks = 0
    torch.manual_seed(0)
    for step in range(4):
        if monitor is not None:
            looks += bool(monitor(step))
        for ids in IDS.split(3):
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in change):
                model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), looks


@pytest.mark.parametrize(
    "change", ["eager, autocast", pytest.param("checkpointing, reentrant", marks=pytest.mark.slow)]
)
def test_training_is_the_same_to_the_bit(change):
    plain, _ = trained(change, inline=False)
    looked_at, looks = trained(change, inline=True)
    assert looks == 2
    assert all(torch.equal(tensor, looked_at[name]) for name, tensor in plain.items())


def test_the_micro_batches_of_a_step_are_one_look_at_what_is_not_padded():
    model = model_of("gpt2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[:, :32] *= 30  # logits far from 0
    mask = torch.ones_like(IDS)
    mask[1, -3:] = 0
    mask[4, :2] = 0

    def forward() -> None:
        for part in torch.arange(6).split([1, 3, 2]):
            model(input_ids=IDS[part], attention_mask=mask[part])

    expected = GeometryReader(model, IDS[[0, 2, 3, 5]]).look()
    assert_same(inline_look(model, forward), expected)


def test_a_pass_of_padded_contexts_only_is_no_look():
    model = model_of("gpt2")
    monitor = GeometryMonitor(model, inline=True, every=2)
    monitor(0)
    mask = torch.ones_like(IDS).index_fill(1, torch.tensor([23]), 0)
    model(input_ids=IDS, attention_mask=mask)
    assert monitor(0) == {}
    words = r"every context of the step was padded.* give the monitor token ids"
    with pytest.warns(GeometryWarning, match=words):
        assert monitor(1) == {}
    model(input_ids=IDS, attention_mask=mask)
    assert monitor(2) == {}  # armed at 1 or 2, and not warned again
    model(input_ids=IDS)
    assert monitor(3)
    assert monitor.last.step == 2


@pytest.mark.slow
def test_of_micro_batches_of_other_lengths_the_largest_logits_count():
    model = model_of("gpt2")
    parts = [IDS[:2], IDS[2:, :17], IDS[2:, :9].flip(1)]
    first, *others = (GeometryReader(model, ids).look() for ids in parts)
    largest = pd.concat([look.heads["largest_logit"] for look in (first, *others)], axis=1).max(axis=1)
    assert (largest > first.heads["largest_logit"]).any()
    first.heads["largest_logit"] = largest
    assert_same(inline_look(model, lambda: [model(input_ids=ids) for ids in parts]), first)


@pytest.mark.slow
def test_neither_evaluations_nor_a_broken_pass_are_the_look():
    model = model_of("gpt2")
    expected = GeometryReader(model, IDS).look()
    hooks = len(nn.modules.module._global_forward_hooks)
    monitor = GeometryMonitor(model, inline=True, every=1)
    monitor(0)
    model.eval()(input_ids=IDS + 1)
    with torch.no_grad():
        model.train()(input_ids=IDS + 1)
    broken = model.transformer.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=IDS + 1)
    broken.remove()
    model(input_ids=IDS)
    assert monitor(1)
    assert_same(monitor.last, expected)
    model(input_ids=IDS)
    monitor(2)
    assert len(nn.modules.module._global_forward_hooks) == hooks
    assert not torch.overrides._get_current_function_mode_stack()


def warned(model: nn.Module, forward: Callable[[], Any]) -> str:
    """What the monitor says, once, of passes that are no look."""
    monitor = GeometryMonitor(model, inline=True, every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            assert monitor(step) == {}
            forward()
    (warning,) = [one for one in caught if issubclass(one.category, GeometryWarning)]
    return str(warning.message)


@pytest.mark.slow
def test_what_is_no_look_is_said_once():
    model = model_of("gpt2")
    embedded = model.get_input_embeddings()(IDS).detach()
    packed = torch.cat([torch.arange(10), torch.arange(14)])[None].expand(6, -1)
    assert "without token ids" in warned(model, lambda: model(inputs_embeds=embedded))
    assert "packs several texts" in warned(model, lambda: model(input_ids=IDS, position_ids=packed))
    assert "call the monitor before the pass" in warned(model, lambda: None)

    def diverge() -> None:
        with torch.no_grad():
            model.transformer.wte.weight[:] = torch.nan
        model(input_ids=IDS)

    assert "hidden states before block 0" in warned(model, diverge)


@pytest.mark.slow
def test_what_cannot_be_observed_is_refused_by_name():
    class Fused(torch.autograd.Function):
        """Computes where nothing that PyTorch calls is heard, as kernels of one's own do."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, gradient, gradient

    def fused(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return Fused.apply(q, k, v).transpose(1, 2), None

    AttentionInterface.register("fused_for_a_test", fused)
    gpt2 = model_of("gpt2")
    for model, options, words in (
        (model_of("gpt2", "fused_for_a_test"), {}, r"GPT2LMHeadModel cannot be observed.*place of inline"),
        (model_of("gpt_oss", "eager"), {}, "GptOssForCausalLM cannot be observed"),  # sinks are columns
        (checkpoints.build("t5"), {}, "T5.* is an encoder-decoder, which reads two texts"),
        (torch.compile(gpt2, backend="eager"), {}, "is compiled"),
        (gpt2, {"ids": IDS}, "and not both"),
        (gpt2, {"inline": False}, r"a monitor batch, or inline=True$"),
        (gpt2, {"look_dtype": torch.float32}, "look_dtype"),
    ):
        with pytest.raises(UsageError, match=words):
            GeometryMonitor(model, **{"inline": True} | options)


def over_two(kind: str) -> nn.Module:
    """A Mistral whose contexts, weights or heads two processes have some of each."""
    model = model_of("mistral")
    return nn.parallel.DistributedDataParallel(model) if kind == "DDP" else spread(kind, model)[0]


def looked_at_together(rank: int, kind: str) -> Any:
    model = over_two(kind)
    monitor = GeometryMonitor(model, inline=True, every=1, over_ranks=True)
    monitor(0)
    own = IDS[:4] if rank == 0 else IDS[4:]
    model(input_ids=IDS if kind == "tensor parallel" else own).logits.sum().backward()
    monitor(1)
    look = monitor.last
    if kind == "DDP":
        model(input_ids=IDS[:, : 24 - rank]).logits.sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", GeometryWarning)
            assert monitor(2) == {}
        assert ["different lengths" in str(one.message) for one in caught] == [True] * (rank == 0)
    return look


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["DDP", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("FSDP2", "tensor parallel"))]
)
def test_the_micro_batches_of_two_processes_are_one_look(kind):
    expected = GeometryReader(model_of("mistral"), IDS).look()
    for found in ranks(looked_at_together, kind):
        assert_same(found, expected)


@pytest.mark.slow
def test_the_trainer_logs_looks_at_its_own_passes(tmp_path):
    """At the end of the fourth step a look is waited for."""
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS.repeat(4, 1)]

    def final(*callbacks: GeometryCallback) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        model = dropping(model_of("gpt2"))
        trainer = in_trainer(model, rows, tmp_path, callbacks, max_steps=4, per_device_train_batch_size=3)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        return trainer.state.log_history, model.state_dict()

    plain = final()[1]
    logs, weights = final(GeometryCallback(every=2, inline=True))
    assert [log["step"] for log in logs if "geometry/entropy_mean" in log] == [0, 2]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.items())


class Flexible(Attention):
    """PyTorch's flex_attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_what_has_no_backward_pass_is_refused_before_a_step():
    """A look of its own needs none."""
    model = opened(gpt_of(Flexible))
    with pytest.raises(UsageError, match="GPT cannot be trained on a CPU: FlexAttention does not support"):
        GeometryMonitor(model, inline=True)
    assert GeometryMonitor(model, IDS % 20)(0)
