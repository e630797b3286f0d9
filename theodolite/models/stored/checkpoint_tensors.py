"""A checkpoint read in parts: a model without its weights, and the tensors of some modules at a time put into it.

The parameters of this skeleton are on the meta device. To see who calls the attention, and with what, a forward pass is
run while each is one row repeated (stride 0), which takes no memory.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import get_checkpoint_shard_files

from theodolite.errors import WorkError
from theodolite.models.stored import loading
from theodolite.models.stored.dequantised import FLOATS
from theodolite.models.stored.factored import is_factored
from theodolite.models.structure import Structure
from theodolite.system.checkpoint_folders import adapter_in, is_gguf
from theodolite.system.files import write_text


class CannotReadLazily(WorkError):
    """A part of the model cannot be read without the rest, and why."""


@dataclass(frozen=True)
class CheckpointTensors:
    """A skeleton, and where the checkpoint keeps its tensors.

    `kinds` has of each of its names the file and the type there, `names` the model's name; `changes` are what
    `transformers` does to names and tensors of this architecture on loading.
    """

    model: PreTrainedModel
    kinds: dict[str, tuple[str, str]]
    names: dict[str, str]
    changes: list[Any]

    def load(self, wanted: Callable[[str], bool], what: str, device: torch.device | str = "cpu") -> None:
        """Load the tensors whose names in the model are wanted; `CannotReadLazily` where `what` cannot be read."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        # Numbers of 64 bits are positions and counts that older files keep beside the weights.
        kept = (source for source in self.names if self.kinds[source][1] != "I64")
        sources = [source for source in kept if wanted(self.names[source])]
        if any(self.kinds[source][1] not in FLOATS for source in sources):
            raise CannotReadLazily(f"{what} is quantised")
        to = LoadStateDictConfig(
            device_map={"": str(device)},
            dtype=self.model.dtype,
            dtype_plan=self.model._get_dtype_plan(self.model.dtype),
            weight_mapping=self.changes,
        )
        with loading.without_progress_bars(), ExitStack() as stack:
            # Opened anew every time: what was read of a mapped file counts as memory until it is closed.
            paths = {self.kinds[source][0] for source in sources}
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
            tensors = {source: files[self.kinds[source][0]].get_slice(source) for source in sources}
            outcome, _ = convert_and_load_state_dict_in_model(self.model, tensors, to)
        missing = filter(wanted, sorted(outcome.missing_keys - self.model.all_tied_weights_keys.keys()))
        lacking = next(missing, what if outcome.mismatched_keys or outcome.conversion_errors else None)
        if lacking is not None:
            raise CannotReadLazily(f"the weights do not hold {lacking} in the shape that config.json says")
        if outcome.unexpected_keys and getattr(self.model.config, "quantization_config", None):
            raise CannotReadLazily(f"{what} is quantised ({min(outcome.unexpected_keys)})")


def checkpoint_tensors(source: str | Path, dtype: str | torch.dtype, revision: str | None) -> Any:
    """Make the skeleton of a checkpoint, with the places of its tensors, named as `transformers`' own loader does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    config = loading.config_of(source, revision)
    if is_gguf(source):
        return loading.gguf_tensors(Path(source), loading.architecture_of(source, config), config, dtype)
    if loading.tower_of(config, None, lambda line: None) is not config:
        raise CannotReadLazily("it has two towers, of which this is the one of text")
    if is_factored(Path(source)):
        raise CannotReadLazily("its matrices are factored")
    if loading.file_of(source, "adapter_config.json", revision) or adapter_in(Path(source)):
        raise CannotReadLazily("an adapter lies beside its weights")
    kinds: dict[str, tuple[str, str]] = {}
    for path in _files(source, config, revision):
        with safe_open(path, framework="pt") as file:
            kinds |= {name: (path, file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    auto = config.dtype or next((FLOATS[kind] for _, kind in kinds.values() if kind in FLOATS), torch.float32)
    wanted = loading.dtype_named(dtype, auto)
    architecture = loading.architecture_of(source, config)
    model = loading.build_skeleton(loading.on_meta(source, architecture, config, wanted))
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    known, names = model.state_dict(), {}
    for source_name in kinds:
        name, _ = rename_source_key(source_name, renamings, converters, model.base_model_prefix, known)
        if name not in known and source_name in known:
            name, _ = rename_source_key(source_name, [], [], model.base_model_prefix, known)
        names[source_name] = name
    loading.refuse_left_over(source, model, sorted(set(names.values()) - known.keys()))
    return CheckpointTensors(model, kinds, names, changes)


def _files(source: str | Path, config: Any, revision: str | None) -> list[str]:
    """List the files that `from_pretrained` would load."""
    if getattr(config, "transformers_weights", None):
        raise CannotReadLazily("its config names other files than model.safetensors")
    if one := loading.file_of(source, SAFE_WEIGHTS_NAME, revision):
        return [one]
    if index := loading.file_of(source, SAFE_WEIGHTS_INDEX_NAME, revision):
        return get_checkpoint_shard_files(source, index, revision=revision)[0]
    raise CannotReadLazily(f"there is neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")


@contextmanager
def filled_with_rows(model: nn.Module, scale: float, device: torch.device | str = "cpu") -> Iterator[None]:
    """Fill every tensor that is not there yet with one row repeated, of numbers up to `scale`, while open."""
    filled_with: dict[Tensor, Tensor] = {}  # parameters that are tied stay so
    with put_back(model) as stored, _OneRow():
        for tensors, name, tensor in stored:
            if tensor.is_meta:
                tensors[name] = filled_with.setdefault(tensor, _repeated(tensor, scale, device))
        yield


@contextmanager
def put_back(module: nn.Module) -> Iterator[list[tuple[dict[str, Any], str, Tensor]]]:
    """Restore a module's stored floating-point tensors on leaving; yields (who holds it, name, tensor) of each."""
    stored: list[tuple[dict[str, Any], str, Tensor]] = [
        (tensors, name, tensor)
        for child in module.modules()
        for tensors in (child._parameters, child._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and name not in child._non_persistent_buffers_set and tensor.is_floating_point()
    ]
    try:
        yield stored
    finally:
        for tensors, name, tensor in stored:
            tensors[name] = tensor


def _repeated(tensor: Tensor, scale: float, device: torch.device | str) -> Tensor:
    # Cosines: norms would take a constant out.
    row = scale * torch.arange(tensor.shape[-1] if tensor.ndim else 1, device=device).cos()
    filled = row.to(tensor.dtype).expand(tensor.shape) if tensor.ndim else row[0].to(tensor.dtype)
    return nn.Parameter(filled, requires_grad=False) if isinstance(tensor, nn.Parameter) else filled


class _OneRow(TorchFunctionMode):
    """Computes one output of a product with a matrix that is one row repeated, of which BLAS would make a copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) >= 2 and args[1].ndim == 2 and not args[1].stride(0):
            row = functional.linear(args[0], args[1][:1])
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            rows = row.expand(*row.shape[:-1], len(args[1]))
            return rows.clone() if bias is None else rows + bias
        return func(*args, **kwargs)


class StreamedBlocks:
    """The blocks of a skeleton, which have their tensors while they are `present`.

    `readings` says how often each was read, `unswept` why passes cannot go through them together (`Sweep`), if so.
    """

    def __init__(self, tensors: Any, structure: Structure, device: torch.device) -> None:
        self._tensors, self._structure, self._device = tensors, structure, device
        name_of = {module: name for name, module in tensors.model.named_modules()}
        if len(set(structure.blocks)) < len(structure.blocks):
            raise CannotReadLazily("its layers are no modules of their own")
        self.names = [name_of[block] for block in structure.blocks]
        self.readings = [0] * len(self.names)
        self.unswept: str | None = None
        self._present = set[int]()
        self._change: Callable[[int], None] | None = None

    @contextmanager
    def present(self, layer: int) -> Iterator[None]:
        """Load the tensors of a block while open; `WorkError` where they are no numbers."""
        if layer in self._present:
            yield
            return
        block, name = self._structure.blocks[layer], self.names[layer]
        with put_back(block), ExitStack() as undo:
            # What is read within a pass without gradients is written to after it, too.
            with torch.inference_mode(False), torch.no_grad():
                self._tensors.load(lambda of: of.startswith(name + "."), name, self._device)
                self.readings[layer] += 1
                if self.readings[layer] == 1:
                    loading.refuse_nonfinite_weights(block, name + ".")
                self._present.add(layer)
                undo.callback(self._present.remove, layer)
                if self._change is not None:
                    self._change(layer)
            yield

    def load_rest(self) -> None:
        """Read, for good, what lies outside the blocks."""
        model = self._tensors.model
        self._tensors.load(self._is_outside, "what is outside of its blocks", self._device)
        model.tie_weights()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)
        loading.refuse_nonfinite_weights(model)

    def _is_outside(self, name: str) -> bool:
        return not name.startswith(tuple(block + "." for block in self.names))

    def read_as_they_run(self) -> None:
        """Let a pass of the model read each block as it gets there, from now on."""

        def run(forward: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
            with self.present(layer):
                return forward(*args, **kwargs)

        for layer, block in enumerate(self._structure.blocks):
            block.__dict__["forward"] = functools.partial(run, block.forward, layer)

    @contextmanager
    def changed(self, change: Callable[[int], None]) -> Iterator[None]:
        """Call `change` while open with every layer whose tensors have just been read."""
        self._change = change
        try:
            yield
        finally:
            self._change = None

    def tensors(self, layer: int, without: Container[str] = ()) -> dict[str, Tensor]:
        """Copy what a checkpoint holds of a block, by the model's names, but for some of them."""
        with self.present(layer):
            block = self._structure.blocks[layer].state_dict()
            named = {f"{self.names[layer]}.{name}": tensor for name, tensor in block.items()}
            return {name: tensor.cpu().clone() for name, tensor in named.items() if name not in without}

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `transformers` opens into a folder, a file of each block and one of the rest."""
        from transformers.core_model_loading import revert_weight_conversion

        model, files = self._tensors.model, len(self.names) + 1
        tied = model.all_tied_weights_keys  # of tied tensors, the one is written that others follow
        save_config(model, folder)
        places, size = dict[str, str](), 0
        for number in range(files):
            name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
            if number < len(self.names):
                own = self.tensors(number)
            else:
                rest = model.state_dict().items()
                own = {n: tensor.cpu() for n, tensor in rest if self._is_outside(n) and n not in tied}
            tensors = {name: t.contiguous() for name, t in revert_weight_conversion(model, own).items()}
            save_file(tensors, folder / name, {"format": "pt"})
            places |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_text(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model in memory as `transformers` does, which would import DeepSpeed, for seconds, to unwrap it."""
    with patch.object(modeling_utils, "unwrap_model", lambda model: model):
        model.save_pretrained(folder)


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what a checkpoint says of the model beside its weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
