"""LocAteR and the monitor on weights that are spread over ranks (gloo), against one process: four steps of training.

Oracle: the same model in one process, with the d×d penalty in its loss and the whole batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from tests import checkpoints
from tests.models.modules import GPT, LONGEST, VOCABULARY
from tests.processes import ranks
from tests.train.test_locater import MEAN, SCALE, adapted, dense_penalty, gradients
from theodolite import OpenModel, open_module
from theodolite.errors import UsageError, WorkError
from theodolite.train import Locater, QKClip
from theodolite.train.geometry import Geometry, GeometryReader

IDS = torch.randint(1, checkpoints.VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
STEPS, RATE = 4, 1e-2


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in blocks_of(model):
        parallelize_module(block, mesh, plan)


def fsdp2(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    for block in blocks_of(model):
        if hasattr(block, "self_attn"):
            fully_shard(block.self_attn, mesh=mesh, **options)  # a unit within a unit
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def spread(how: str, model: nn.Module) -> tuple[nn.Module, slice]:
    """The model as a kind of training has it, and this rank's rows of a batch; "": all in one process."""
    if not how:
        return model, slice(None)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mine = slice(rank, None, world)
    if how == "tensor parallel":
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
        return model, slice(None)
    if how == "FSDP2 of tensor parallel":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "heads"))
        tensor_parallel(model, mesh["heads"])
        return fsdp2(model, mesh["data"]), slice(rank // 2, None, world // 2)
    return fsdp2(model, reshard_after_forward="kept" not in how), mine


def numbers(look: Geometry) -> dict[str, list[float]]:
    tables = (look.heads.drop(columns="regime"), look.layers)
    return {name: column.tolist() for table in tables for name, column in table.items()}


def work(rank: int, hows: dict[str, str]) -> list[dict[str, Any]]:
    """One of the processes: trains as each says, with looks before and between; what it then has."""
    return [trained(how, added) for how, added in hows.items()]


def trained(how: str, added: str) -> dict[str, Any]:
    model, mine = spread(how, checkpoints.build("llama3").double().train())
    reader = GeometryReader(model, IDS)
    first = reader.look()
    locater = Locater(model, SCALE, MEAN)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    penalties = []
    for step in range(STEPS):
        ids = IDS.roll(step, 1)[mine]
        if added == "before":  # as the Trainer's callback does
            penalty = locater.add_gradient()
        loss = model(input_ids=ids, labels=ids).loss
        if added in ("in the loss", "dense"):
            penalty = dense_penalty(model) if added == "dense" else locater()
            loss = loss + penalty
        loss.backward()
        if added == "after":
            penalty = locater.add_gradient()
        optimizer.step()
        optimizer.zero_grad()
        penalties.append(penalty.item())
    return {
        "first": numbers(first),
        "last": numbers(reader.look()),
        "penalties": penalties,
        "state": {n: getattr(p, "full_tensor", p.clone)().detach() for n, p in model.named_parameters()},
        "table": locater.table().to_dict("list"),
    }


RUNS = [
    (2, {"FSDP2": "in the loss", "FSDP2, kept after forward": "before", "tensor parallel": "after"}),
    (4, {"FSDP2 of tensor parallel": "in the loss"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "hows"), RUNS, ids=["two", "four"])
def test_ranks_train_and_see_what_one_process_does(world, hows):
    expected = trained("", "dense")
    for results in ranks(work, hows, processes=world):
        for got in results:
            compare(got, expected)


def compare(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(got, expected, **close)


def in_wrappers(rank: int) -> dict[str, Any]:
    """One of the processes: what is sharded is around the model, or a module of one's own, or came later."""
    own = opened(fsdp2(GPT()))
    results: dict[str, Any] = {"module": [*seen(own), Locater(own, SCALE, MEAN).add_gradient().item()]}
    results |= looked_at(fsdp2(adapted().double()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    results["mixed"] = first_entropies(fsdp2(checkpoints.build("llama3"), mp_policy=policy))
    model = checkpoints.build("llama3")
    locater = Locater(model, SCALE, MEAN)
    fsdp2(model)
    for act in (locater, locater.add_gradient, locater.table):
        with pytest.raises(UsageError, match="spread over ranks since this Locater was made"):
            act()
    flat = FullyShardedDataParallel(checkpoints.build("llama3"), device_id=torch.device("cpu"))
    for take in (lambda: GeometryReader(flat, IDS), lambda: Locater(flat, SCALE, MEAN), lambda: QKClip(flat)):
        with pytest.raises(UsageError, match=r"FSDP1\) keeps weights in flat tensors.*: shard the model"):
            take()
    return results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which PEFT asks for
def test_modules_of_one_s_own_and_wrappers_that_are_sharded():
    """Oracle: the same in one process, which is that of other tests."""
    results = ranks(in_wrappers)
    torch.manual_seed(0)
    own = opened(GPT())
    expected = looked_at(adapted().double()) | {"module": [*seen(own), Locater(own, SCALE, MEAN)().item()]}
    expected["mixed"] = first_entropies(checkpoints.build("llama3").bfloat16())
    whole = torch.tensor(first_entropies(checkpoints.build("llama3")))
    assert (torch.tensor(expected["mixed"]) - whole).abs().max() > 1e-4  # so the precision of a look shows
    for got in results:
        compare(got, expected, 1e-5)


def first_entropies(model: nn.Module) -> list[float]:
    """Of layer 0, before which no roundings add up."""
    return GeometryReader(model, IDS).look().heads["entropy"].tolist()[:4]


def opened(module: nn.Module) -> OpenModel:
    return open_module(module, vocabulary=VOCABULARY, longest=LONGEST)


def seen(model: OpenModel) -> list[float]:
    return GeometryReader(model, IDS % VOCABULARY).look().heads["entropy"].tolist()


def by_plan(rank: int, folder: Path, world: int) -> dict[str, Any]:
    """One of the processes: looks at, and penalises, what transformers has spread by its own plan."""
    mesh, results = init_device_mesh("cpu", (world,)), {}
    for family in PLANS[world]:
        model = AutoModelForCausalLM.from_pretrained(folder / family, tp_plan="auto", device_mesh=mesh)
        assert any(hasattr(p, "full_tensor") for p in model.parameters())
        results[family] = looked_at(model)
    reader = GeometryReader(model, IDS)
    model.base_model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(WorkError, match=r"layer 1 .*: to 24 tokens it attends otherwise than to a few"):
        reader.look()
    return results


def looked_at(model: nn.Module) -> dict[str, Any]:
    locater = Locater(model, SCALE, MEAN)
    penalty = locater.add_gradient()
    whole = {name: getattr(grad, "full_tensor", grad.clone)() for name, grad in gradients(model).items()}
    return {"look": numbers(GeometryReader(model, IDS).look()), "penalty": penalty.item()} | whole


PLANS = {2: ("mistral", "phi3", "gpt_oss"), 4: ("llama2",)}
"""By ranks. Heads of each; weights split, and queries and keys gathered again; attention that each has whole."""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.chaos)])
def test_the_plans_of_transformers(world, tmp_path):
    """Oracle: the checkpoint in one process, which is that of `test_ranks_train_and_see_what_one_process_does`."""
    expected = {}
    for family in PLANS[world]:
        checkpoints.build(family).save_pretrained(tmp_path / family)
        expected[family] = looked_at(AutoModelForCausalLM.from_pretrained(tmp_path / family))
    for got in ranks(by_plan, tmp_path, world, processes=world):
        compare(got, expected, 1e-5)
