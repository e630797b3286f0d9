"""`Locater` on models and `LocaterCallback` in the Trainer, against plain loops with the d×d penalty by name.

On LoRA it is the penalty of W + s·BA, with its gradient in A and B.
"""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import peft
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments

from tests import checkpoints
from tests.processes import ranks
from tests.slow import slow_but
from theodolite.errors import UsageError
from theodolite.theory import qk_moments
from theodolite.train import (
    GeometryCallback,
    GeometryMonitor,
    Locater,
    LocaterCallback,
    locater_penalty,
    warm_up,
)
from theodolite.train.geometry import GeometryReader

# Which PEFT asks for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

SCALE, MEAN, RATE = 0.02, 0.5, 0.1


def dense_penalty(model: PreTrainedModel, layers: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    """The definition with d×d matrices in float64, from a Llama's parameters by name; 2 or 4 key heads of 4."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        w_q = attention.q_proj.weight.double().unflatten(0, (4, 8))
        w_k = attention.k_proj.weight.double().unflatten(0, (-1, 8))
        for head in range(4):
            matrix = w_q[head].T @ w_k[head * len(w_k) // 4]
            total = total + SCALE * matrix.square().sum() + MEAN * (torch.trace(matrix) - 1) ** 2
    return total


def examples(count: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Random tokens; how many of them count in the loss differs from one to the next."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        ids = torch.randint(checkpoints.VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def batch(data: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([example[name] for example in data]) for name in data[0]}


def trained(model: PreTrainedModel, data, folder, callbacks, **arguments) -> Trainer:
    """The model after training on `data` with plain gradient descent; one step unless told otherwise."""
    options = {"use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    options |= {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "report_to": "none"}
    options |= {"max_steps": 1, "per_device_train_batch_size": len(data), "max_grad_norm": 0.0} | arguments
    trainer = Trainer(model, TrainingArguments(output_dir=str(folder), **options), train_dataset=data)
    for callback in callbacks:
        callback.attach(trainer)
    trainer.train()
    return trainer


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, of the parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "layers"), [("llama2", (0, 1, 2)), ("llama3", (1,))])
def test_penalty_of_a_model_and_its_gradient(family, layers):
    """Oracle: the d×d matrices in float64 from the parameters by name, and autograd through them."""
    model = checkpoints.build(family)
    dense = dense_penalty(model, layers)
    dense.backward()
    expected = gradients(model)
    model.zero_grad()
    penalty = Locater(model, SCALE, MEAN, layers=layers)()
    penalty.backward()
    torch.testing.assert_close(penalty.double(), dense, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", slow_but(["gpt2"], ["gpt2", "gpt_neox", "phi3", "vit"]))
def test_table_holds_the_moments_of_the_survey(family, opened):
    """Oracle: `qk_moments` of the weights that a survey reads."""
    model = opened(family)
    table = Locater(copy.deepcopy(model.hf).requires_grad_(), 1.0, 1.0).table()
    for layer, rows in table.groupby("layer"):
        weights = model.head_weights(layer)
        moments = qk_moments(weights.w_q, weights.w_k)
        np.testing.assert_allclose(rows["trace"], moments.trace, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rows["frobenius_squared"], moments.frobenius_squared, rtol=1e-5)
    assert len(table) == model.layers * model.heads


def test_strengths_may_be_functions_of_the_step():
    """Oracle: the warm-up's line, in numbers; the penalty is linear in both strengths."""
    model = checkpoints.build("llama2")
    rising = warm_up(SCALE, 4)
    assert [rising(step) for step in (0, 1, 4, 9)] == [0.0, SCALE / 4, SCALE, SCALE]
    scheduled = Locater(model, rising, MEAN)
    at_zero, at_end = Locater(model, 0.0, MEAN)(), Locater(model, SCALE, MEAN)()
    torch.testing.assert_close(scheduled(0), at_zero)
    torch.testing.assert_close(scheduled(1), at_zero + (at_end - at_zero) / 4)
    with pytest.raises(UsageError, match="scale is a function of the step"):
        scheduled()
    with pytest.raises(UsageError, match=r"mean is -1\.0: give a number of 0 or more"):
        Locater(model, SCALE, lambda step: -1.0)(0)
    with pytest.raises(UsageError, match="scale is None: give a number of 0 or more"):
        Locater(model, lambda step: None, MEAN)(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": [3]}, "layer 3 does not exist or does not attend: choose of "),
        ({"layers": [1, 1]}, "each once"),
        ({"layers": []}, "one layer or more"),
        ({"layers": [0.5]}, r"layer 0\.5 does not exist"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "a"}, "scale is 'a': give a number of 0 or more"),
        ({"mean": 1j}, "mean is 1j: give a number"),
    ],
)
def test_a_wrong_call_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        Locater(checkpoints.build("llama2"), **({"scale": SCALE, "mean": MEAN} | arguments))


class Adapted(nn.Module):
    """As an adapter does it: the old layer is kept inside the new one, and so still belongs to the model."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = base, base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


def test_a_model_that_cannot_be_penalised_or_was_changed_afterwards_is_refused():
    """Replaced modules hold other weights than those found; moved, loaded and cast ones are the same modules."""
    with pytest.raises(UsageError, match="holds no model of transformers"):
        Locater(nn.Linear(3, 3), SCALE, MEAN)
    with pytest.raises(UsageError, match="frozen"):
        Locater(checkpoints.build("llama2").requires_grad_(False), SCALE, MEAN)
    model = checkpoints.build("llama3")
    locater = Locater(model, SCALE, MEAN)
    parent, name = model.model.layers[1].self_attn, "k_proj"
    old = getattr(parent, name)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.double().train()
    expected = locater()
    for new in (Adapted(old), copy.deepcopy(old)):
        setattr(parent, name, new)
        for use in (locater, locater.table):
            with pytest.raises(UsageError, match=rf"{name}\.weight is no longer .* make a new Locater"):
                use()
    setattr(parent, name, old)
    assert torch.equal(locater(), expected)
    for each, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in each)
    assert locater().requires_grad
    model.requires_grad_(False)
    with pytest.raises(UsageError, match=r"frozen .*: unfreeze those .* or make a new Locater"):
        locater()
    assert len(locater.table()) == 12  # reading them needs no gradient
    torch.nn.utils.parametrize.register_parametrization(old, "weight", nn.Identity())
    with pytest.raises(UsageError, match="is no longer the weight"):
        locater()


@pytest.mark.parametrize(("clip", "micro_batches"), [(0.0, 1), (0.5, 4)])
def test_a_step_of_the_trainer_is_that_of_the_whole_objective(clip, micro_batches, tmp_path):
    """Oracle: a plain loop with one batch, loss + d×d penalty, joint clipping. With 4 micro-batches as with 1."""
    start, data = checkpoints.build("llama3"), examples(8)
    expected = copy.deepcopy(start).train()
    loss = expected(**batch(data), use_cache=False).loss + dense_penalty(expected)
    loss.backward()
    if clip:
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), clip)
        assert norm > 2 * clip  # else clipping would not be tested
    torch.optim.SGD(expected.parameters(), RATE).step()
    batches = {
        "per_device_train_batch_size": 8 // micro_batches,
        "gradient_accumulation_steps": micro_batches,
    }
    trained(start, data, tmp_path, [LocaterCallback(SCALE, MEAN)], **batches, max_grad_norm=clip)
    torch.testing.assert_close(start.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    slow_but([{"bf16": True}], [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}]),
    ids=["bfloat16", "compiled"],
)
def test_the_penalty_moves_the_weights_by_its_exact_gradient(arguments, tmp_path):
    """Oracle: of one step with and one without it, the difference is −rate times the float64 d×d gradient."""
    models = [checkpoints.build("llama3") for _ in range(2)]
    before = copy.deepcopy(models[0])
    dense_penalty(before).backward()
    for model, callbacks in zip(models, ([LocaterCallback(SCALE, MEAN)], []), strict=True):
        trained(model, examples(4), tmp_path, callbacks, **arguments)
    without = dict(models[1].named_parameters())
    slopes = {name: p.grad for name, p in before.named_parameters()}
    for name, parameter in models[0].named_parameters():
        slope = torch.zeros_like(parameter) if slopes[name] is None else slopes[name]
        torch.testing.assert_close(parameter - without[name], -RATE * slope, rtol=1e-4, atol=1e-6)


def test_steps_drive_the_schedule_and_the_penalty_is_logged_apart(tmp_path, capsys):
    """Oracle: the strengths that the callback asked for; the penalty of a copy at the first step; TensorBoard."""
    model, asked = checkpoints.build("llama2"), []
    first = dense_penalty(model).item()

    def scale(step: int) -> float:
        asked.append(step)
        return SCALE

    options = {"max_steps": 3, "learning_rate": 0.01, "report_to": "tensorboard"}
    trainer = trained(model, examples(4), tmp_path, [LocaterCallback(scale, MEAN)], **options)
    assert asked == [0, 1, 2]
    logged = [row["locater"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 3
    assert logged[0] == pytest.approx(first, rel=1e-5)
    assert logged[2] < logged[0]
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir()))).Reload()
    assert [event.value for event in events.Scalars("train/locater")] == pytest.approx(logged, rel=1e-6)
    assert capsys.readouterr().out.count("'locater':") == 3


def test_gradients_are_scaled_with_the_loss_in_float16():
    """Oracle: a GradScaler's factor, 1024. (The Trainer's float16 needs a GPU, so the callback is called by hand.)"""
    model = checkpoints.build("llama2")
    dense_penalty(model).backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    callback = LocaterCallback(SCALE, MEAN)
    arguments = SimpleNamespace(deepspeed=None, fsdp=None, report_to=[])
    callback.on_train_begin(arguments, TrainerState(), None, model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for times in (1, 2):  # the second adds to what is there
        callback.on_step_begin(None, TrainerState(), None, optimizer=SimpleNamespace(scaler=scaler))
        got = model.model.layers[0].self_attn.q_proj.weight.grad
        torch.testing.assert_close(got, times * 1024 * expected, rtol=1e-5, atol=1e-3)


def test_weights_in_bfloat16_go_through_float32_a_layer_at_a_time():
    """Oracle: the penalty of the same numbers in float64, and its gradient."""
    model = checkpoints.build("llama3").bfloat16()
    exact = copy.deepcopy(model).double()
    dense_penalty(exact).backward()
    penalty = Locater(model, SCALE, MEAN)()
    followed = [function.name() for function, _ in penalty.grad_fn.next_functions if function]
    assert followed == ["torch::autograd::AccumulateGrad"] * 6  # no graph of a layer is kept
    penalty.backward()
    assert penalty.item() == pytest.approx(dense_penalty(exact).item(), rel=1e-5)
    expected = gradients(exact)
    assert gradients(model).keys() == expected.keys()
    for name, gradient in gradients(model).items():
        atol = 0.01 * expected[name].abs().max().item()
        torch.testing.assert_close(gradient.double(), expected[name], rtol=0.02, atol=atol)


def factors(*shape: int, key_heads: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian factors in float64 that ask for gradients; the third last size is the number of heads."""
    generator = torch.Generator().manual_seed(seed)
    key_shape = (*shape[:-3], shape[-3] if key_heads is None else key_heads, *shape[-2:])
    return tuple(
        (0.4 * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
        for size in (shape, key_shape)
    )


def dense(w_q: Tensor, w_k: Tensor, scale: float, mean: float) -> Tensor:
    """The definition, head by head, with the d×d matrix."""
    total = torch.zeros((), dtype=torch.float64)
    repeated = w_k.repeat_interleave(w_q.shape[-3] // w_k.shape[-3], dim=-3)
    for query, key in zip(w_q.flatten(0, -3), repeated.flatten(0, -3), strict=True):
        matrix = query @ key.T
        total = total + scale * torch.trace(matrix.T @ matrix) + mean * (torch.trace(matrix) - 1) ** 2
    return total


@pytest.mark.parametrize(("shape", "key_heads"), [((3, 12, 4), 3), ((4, 12, 5), 2), ((2, 4, 9, 9), 1)])
def test_value_and_gradient_are_those_of_the_dense_computation(shape, key_heads):
    """Oracle: the d×d matrices in float64, and autograd through them; grouped keys and leading layers too."""
    w_q, w_k = factors(*shape, key_heads=key_heads)
    ours, theirs = locater_penalty(w_q, w_k, 100.0, 0.3), dense(w_q, w_k, 100.0, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    for got, expected in zip(*(torch.autograd.grad(p, (w_q, w_k)) for p in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_published_gradient_of_the_second_term_is_the_printed_one_and_the_value_is_not_changed():
    """Oracle: section 6 as printed, (tr − 1) tr W_K and (tr − 1) tr W_Q, head by head."""
    w_q, w_k = factors(3, 12, 4)
    published = locater_penalty(w_q, w_k, 0.0, 0.7, gradient="published")
    torch.testing.assert_close(published, dense(w_q, w_k, 0.0, 0.7), rtol=1e-13, atol=0)
    trace = (w_q * w_k).sum((-2, -1), keepdim=True)
    got_q, got_k = torch.autograd.grad(published, (w_q, w_k))
    torch.testing.assert_close(got_q, 0.7 * (trace - 1) * trace * w_k)
    torch.testing.assert_close(got_k, 0.7 * (trace - 1) * trace * w_q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_and_autocast_do_not_round_the_products(dtype):
    """Oracle: the float64 value of the same rounded weights; bfloat16 products would be off by about 1e-3."""
    w_q, w_k = (w.detach().to(dtype).requires_grad_() for w in factors(3, 64, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        penalty = locater_penalty(w_q, w_k, 2.0, 0.5)
    assert penalty.dtype == torch.float32
    expected = dense(w_q.double(), w_k.double(), 2.0, 0.5)
    torch.testing.assert_close(penalty.double(), expected, rtol=1e-6, atol=0)
    assert torch.autograd.grad(penalty, w_q)[0].dtype == dtype


def test_what_does_not_fit_is_refused():
    ones = torch.ones(1, 3, 2)
    for query, key, gradient, words in (
        ((12, 4), (12, 4), "exact", r"\(12, 4\)"),
        ((3, 12, 4), (3, 12, 5), "exact", r"\(3, 12, 5\)"),
        ((3, 12, 4), (2, 12, 4), "exact", "multiple"),
        ((2, 3, 12, 4), (1, 3, 12, 4), "exact", "same leading layers"),
        ((3, 12, 4), (3, 12, 4), "printed", "choose exact or published"),
    ):
        with pytest.raises(UsageError, match=words):
            locater_penalty(torch.ones(query), torch.ones(key), 1.0, 1.0, gradient=gradient)
    for wrong in (-1, float("nan"), "a", None, 1j, torch.tensor(-1.0), torch.ones(2)):
        with pytest.raises(UsageError, match=r"scale is .*: give a number of 0 or more"):
            locater_penalty(ones, ones, wrong, 1.0)
        with pytest.raises(UsageError, match="mean is "):
            locater_penalty(ones, ones, 1.0, wrong)
    with pytest.raises(UsageError, match="w_k is complex: give real numbers"):
        locater_penalty(ones, ones * 1j, 1.0, 1.0)
    with pytest.raises(UsageError, match="w_q is a ndarray: give a tensor"):
        locater_penalty(np.ones((1, 3, 2)), ones, 1.0, 1.0)


CLIP = 0.5
IDS = torch.stack([example["input_ids"] for example in examples(4)])


def in_two_processes(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """One of the processes: the weights after a step of a plain loop, and after one of the Trainer."""
    # Gradients in another layout would cost DDP copies.
    warnings.filterwarnings("error", message=".*strides.*")
    plain = checkpoints.build("llama3").train()
    parallel = DistributedDataParallel(plain)
    locater = Locater(parallel, SCALE, MEAN)
    mine = batch(examples(8)[rank::2])
    mine["labels"] = mine["input_ids"]
    for number, half in enumerate(range(0, 4, 2)):  # two micro-batches, of which only the last one is reduced
        part = {name: values[half : half + 2] for name, values in mine.items()}
        parallel.require_backward_grad_sync = number == 1
        ((parallel(**part, use_cache=False).loss + locater()) / 2).backward()
    torch.optim.SGD(plain.parameters(), RATE).step()
    model = checkpoints.build("llama3")
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": CLIP}
    trained(
        model, examples(8), folder, [LocaterCallback(SCALE, MEAN), GeometryCallback(IDS, every=1)], **options
    )
    return {"plain": plain.state_dict(), "trainer": model.state_dict()}


def test_two_processes_make_the_step_of_one(tmp_path):
    """DDP. Oracle: in one process, the whole batch and the d×d penalty once; clipped in the Trainer's case."""
    start, data = checkpoints.build("llama3"), examples(8)
    results = ranks(in_two_processes, str(tmp_path))
    for name in ("plain", "trainer"):
        expected, whole = copy.deepcopy(start).train(), batch(data)
        if name == "plain":
            whole["labels"] = whole["input_ids"]
        (expected(**whole, use_cache=False).loss + dense_penalty(expected)).backward()
        if name == "trainer":
            torch.nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
        torch.optim.SGD(expected.parameters(), RATE).step()
        for got in results:
            torch.testing.assert_close(got[name], expected.state_dict(), rtol=0, atol=1e-6)
    heads = pd.read_json(tmp_path / "geometry" / "heads.jsonl", lines=True)
    assert heads.groupby("step").size().to_dict() == {0: 12, 1: 12}  # the first process alone writes
    for step, model in ((0, start), (1, expected)):
        alone = GeometryReader(model, IDS).look().heads
        for name in ("entropy", "at_distance"):
            written = heads[name][heads["step"] == step]
            np.testing.assert_allclose(written, alone[name], rtol=1e-5)


def adapted(family: str = "llama3", modules: Any = ("q_proj", "v_proj"), **options: Any) -> Any:
    """A model with an adapter whose B is not zero, as after some steps."""
    torch.manual_seed(3)
    options |= {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "init_lora_weights": False}
    config = peft.LoraConfig(target_modules=list(modules), **options)
    return peft.get_peft_model(checkpoints.build(family).double(), config)


def merged(model: Any) -> nn.Module:
    return copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize(
    ("modules", "options"),
    [(("q_proj", "v_proj"), {"use_rslora": True}), (("q_proj", "k_proj"), {"layers_to_transform": [1]})],
)
def test_the_penalty_is_that_of_the_merged_weights(modules, options):
    """Oracle: PEFT's own merged model, and the d×d penalty of its weights."""
    model = adapted(modules=modules, **options).train()
    penalty = Locater(model, SCALE, MEAN)()
    torch.testing.assert_close(penalty, dense_penalty(merged(model)), rtol=1e-10, atol=0)


def test_the_gradient_reaches_the_adapter_and_nothing_else():
    """Oracle: W + (α/r)·BA written out, and differentiated by autograd through d×d matrices."""
    model = adapted(modules=("q_proj", "k_proj")).train()
    written = checkpoints.build("llama3").double()
    parts = {}
    for layer, block in enumerate(written.model.layers):
        for name in ("q_proj", "k_proj"):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            lora, linear = model.get_submodule(where), block.self_attn.get_submodule(name)
            a, b = (
                part["default"].weight.detach().clone().requires_grad_()
                for part in (lora.lora_A, lora.lora_B)
            )
            base = linear.weight.detach()
            del linear.weight
            linear.weight = base + 5 / 3 * b @ a
            parts |= {f"{where}.lora_A.default.weight": a, f"{where}.lora_B.default.weight": b}
    dense_penalty(written).backward()
    for way in ("in the loss", "added"):
        model.zero_grad()
        locater = Locater(model, SCALE, MEAN)
        if way == "added":
            locater.add_gradient()
        else:
            locater().backward()
        torch.testing.assert_close(gradients(model), {name: part.grad for name, part in parts.items()})


@pytest.mark.slow
def test_fused_projections_and_adapters_that_are_switched():
    """GPT-2's matrix is transposed, and holds queries, keys and values; two adapters, one at a time, or none."""
    model = adapted("gpt2", ("c_attn",), fan_in_fan_out=True).eval()
    torch.manual_seed(4)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model.add_adapter("other", config)
    model.double()
    locater = Locater(model, SCALE, MEAN)
    for name in ("default", "other"):
        model.set_adapter(name)
        torch.testing.assert_close(locater(), Locater(merged(model).requires_grad_(), SCALE, MEAN)())
    plain = Locater(checkpoints.build("gpt2").double(), SCALE, MEAN)
    other = locater().item()
    with model.disable_adapter():
        model.base_model.requires_grad_(True)
        torch.testing.assert_close(locater(), plain())
    model.merge_adapter()
    assert locater().item() == pytest.approx(other)


def test_what_is_no_matrix_added_is_refused():
    with pytest.raises(UsageError, match=r"self_attn.q_proj carries an adapter that is no matrix added"):
        Locater(adapted(use_dora=True), SCALE, MEAN)
    model = peft.get_peft_model(
        checkpoints.build("llama3"), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(UsageError, match=r"self_attn.k_proj carries an adapter that is no matrix added"):
        Locater(model, SCALE, MEAN)


@pytest.mark.slow
def test_an_adapter_is_monitored():
    """Oracle: the merged model."""
    model = adapted().eval()
    ids = torch.randint(1, checkpoints.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    looks = [GeometryMonitor(which, ids, every=1) for which in (model, merged(model))]
    columns = ["entropy", "trace", "spectral_norm"]
    first, second = (monitor(0) and monitor.last.heads[columns] for monitor in looks)
    pd.testing.assert_frame_equal(first, second, rtol=1e-6, atol=1e-8)
