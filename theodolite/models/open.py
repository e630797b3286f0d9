"""Open a checkpoint, whole or block by block, or a module in memory; find a model in training in its wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models.calls import Calls, capture_calls
from theodolite.models.guard import between_passes, guarded, known_state
from theodolite.models.opened import OpenModel
from theodolite.models.source import Source, device_of
from theodolite.models.stored import loading
from theodolite.models.stored.checkpoint_tensors import (
    CannotReadLazily,
    StreamedBlocks,
    checkpoint_tensors,
    filled_with_rows,
)
from theodolite.models.stored.dequantised import holds_quantised_layers
from theodolite.models.structure import Structure, first_output
from theodolite.models.structure_search import VERIFIED_LENGTH, find_structure, verify_attention
from theodolite.models.sweep import Sweep
from theodolite.models.training.shards import as_sharded, gathering_entry, is_spread, register_spread
from theodolite.system.choices import Attention, check_dtype, check_one_place
from theodolite.system.processor import say_if_slow

if TYPE_CHECKING:
    from transformers import Pipeline


@known_state()
def open_model(
    path_or_id: str | Path | nn.Module | Pipeline | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention: Attention | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    tower: loading.Tower | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> OpenModel:
    """Open and verify a checkpoint from a folder, a GGUF file or the hub; the embedded model where no path is given.

    Args:
        path_or_id: a folder with `config.json` and safetensors weights, a GGUF file or a folder with one (needs
            `pip install '.[gguf]'`), or a name on the hub. Or a model of `transformers` that is in memory, a
            pipeline's, or one of PEFT: it stays as and where it is, and only a tokenizer may be given with it.
        attention: of an encoder-decoder: "decoder" (its own, as None), "encoder", or "cross" (the decoder's to the
            encoder). Encoder and decoder read the same tokens.
        dtype: "auto" keeps the checkpoint's own (of a GGUF file float32); else "float32", "bfloat16" and so on.
        device: where the model goes; a CUDA device if there is one, else the CPU.
        device_map: spread the model over devices in place of `device` (needs `pip install '.[accelerate]'`).
        revision: a branch, tag or commit on the hub.
        tower: of a checkpoint with two (CLIP): "text" or "vision", None: text.
        say: told in a line which tower it is, and of a dtype in which this processor is slow.

    Raises:
        UsageError: no such checkpoint, pickled weights, an unknown or unsupported family.
        WorkError: weights missing, NaN or infinite, or the tapped attention is not the model's own.
    """
    piped = None if isinstance(path_or_id, nn.Module) else getattr(path_or_id, "model", None)
    if isinstance(piped, nn.Module):
        path_or_id, tokenizer = piped, tokenizer or getattr(path_or_id, "tokenizer", None)
    if isinstance(path_or_id, nn.Module):
        if (dtype, device, device_map, revision, tower) != ("auto", None, None, None, None):
            raise UsageError(
                f"{type(path_or_id).__name__} is in memory: move or convert it before, and give no dtype or device"
            )
        inner = unwrap(path_or_id)
        register_spread(path_or_id)
        if is_spread(inner):
            raise UsageError(
                f"the weights of {type(inner).__name__} are spread over ranks: give the model itself to "
                "GeometryMonitor or Locater, and survey its checkpoints"
            )
        return _opened(Source.of_transformers(inner, attention), tokenizer)
    check_dtype(dtype)
    check_one_place(device, device_map)
    target = loading.usable_device(device)
    checkpoint = loading.Checkpoint.at(path_or_id, revision)  # type: ignore[arg-type]
    place = checkpoint.place
    try:
        with loading.without_progress_bars():
            checkpoint = checkpoint.of_one_commit()
            config = loading.tower_of(loading.config_of(place, checkpoint.revision), tower, say)
            model = loading.load(place, config, dtype, device_map, checkpoint.revision)
    except TheodoliteError:
        raise
    except loading.LOADING_ERRORS as error:
        raise UsageError(f"cannot open {place}: {loading.reason_of(error)}") from error
    if device_map is None:
        model = model.to(target)  # type: ignore[arg-type]
    model = model.eval().requires_grad_(False)
    loading.refuse_nonfinite_weights(model)
    say_if_slow(model.dtype, model.device, say)
    source = Source.of_transformers(model, attention)
    if tokenizer is None and source.vocabulary is not None:
        tokenizer = loading.load_tokenizer(place, checkpoint.revision)
    with guarded(model):
        parts = verified_parts(source)
    return OpenModel.of(source, *parts, tokenizer=tokenizer, **checkpoint.identity())


def before_weights(
    path_or_id: str | None, attention: Attention | None, revision: str | None, tower: loading.Tower | None
) -> OpenModel | None:
    """Describe a checkpoint by its configuration and tokenizer alone, to check options before weights are read.

    None: the configuration does not say enough, or `open_model` says why.
    """
    checkpoint = loading.Checkpoint.at(path_or_id, revision)
    try:
        checkpoint = checkpoint.of_one_commit()
        place, revision = checkpoint.place, checkpoint.revision
        config = loading.tower_of(loading.config_of(place, revision), tower, lambda line: None)
        skeleton = loading.on_meta(place, loading.architecture_of(place, config), config)
        source, text = Source.of_transformers(skeleton, attention), config.get_text_config()
        heads = (text.num_attention_heads,) * text.num_hidden_layers
    except loading.LOADING_ERRORS:
        return None
    structure: Any = SimpleNamespace(
        attention=heads, heads_of=heads, attention_at=lambda layer: None, cross=source.attention == "cross"
    )
    name = type(skeleton).__name__  # classes that fill in words read those after them, too
    fills_in = name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    causal = not fills_in or name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    loading.HANDED_ON.clear()
    tokenizer = None if source.vocabulary is None else loading.load_tokenizer(place, revision)
    loading.HANDED_ON[place, revision] = tokenizer
    return OpenModel(source, structure, 0, causal, "unknown", checkpoint.id, {}, tokenizer)


def open_module(
    module: nn.Module,
    *,
    vocabulary: int | None = None,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    blocks: str | Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    longest: int | None = None,
    image: tuple[int, int, int] | None = None,
    attention: str | None = None,
) -> OpenModel:
    """Open and verify any PyTorch module that reads token ids, or images, and attends.

    Attention is intercepted in `scaled_dot_product_attention`, `MultiheadAttention` and `flex_attention`, and where it
    is computed by hand: a product of queries and keys, a softmax, a product with values. The module stays as and where
    it is: modes, hooks, gradients.

    Args:
        vocabulary: ids go from 0 to this, exclusive; None: as many as the tokenizer has.
        forward: runs the module on ids (contexts, positions), as `lambda module, ids: …`; None: it is called with them.
            For what is predicted it must return logits (contexts, positions, vocabulary), or a tuple that begins so.
        blocks: the name of the list of its blocks, "transformer.h" say, or those of all blocks; None: they are found.
        tokenizer: anything that behaves like those of `transformers`, for texts.
        longest: tokens that it has positions for, if there is a limit.
        image: it reads images of so many channels, rows and columns; then there is no vocabulary.
        attention: of blocks that attend several times, the name of the attention modules that are looked at,
            "self_attn" say; None: all are.

    Raises:
        UsageError: no attention can be intercepted, or it is not within a list of blocks; or it cannot run on ids.
        WorkError: weights are NaN or infinite, or the intercepted attention is not the module's own.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"open_module takes a torch.nn.Module, not {type(module).__name__}")
    names = (blocks,) if isinstance(blocks, str) else blocks
    if vocabulary is None and tokenizer is not None:
        vocabulary = len(tokenizer)
    if vocabulary is None and image is None:
        raise UsageError(
            "say how many token ids there are, vocabulary=…, or give a tokenizer; for images, image=…"
        )
    if vocabulary is not None and image is not None:
        raise UsageError("a module reads tokens or images: give vocabulary=… or image=…, not both")
    inner: nn.Module = getattr(module, "_orig_mod", module)
    register_spread(inner)
    of_blocks = None if names is None else tuple(names)
    source = Source.of_module(inner, vocabulary, forward, longest, image, of_blocks, attention)
    return _opened(source, tokenizer)


def _opened(source: Source, tokenizer: PreTrainedTokenizerBase | None) -> OpenModel:
    loading.usable_device(source.device)
    with guarded(source.root), as_sharded(source.root):
        loading.refuse_nonfinite_weights(source.root)
        return OpenModel.of(source, *verified_parts(source), tokenizer=tokenizer, id=source.name)


@contextmanager
def on_a_few_tokens(source: Source) -> Iterator[None]:
    """Raise errors of a model's own code in small passes as `UsageError`."""
    try:
        yield
    except TheodoliteError:
        raise
    except loading.RUNNING_ERRORS as error:
        raise UsageError(f"{source.name} cannot run on a few tokens: {loading.reason_of(error)}") from error


def verified_parts(
    source: Source, length: int = VERIFIED_LENGTH, skip_overflow: bool = False
) -> tuple[Structure, Calls, Sequence[AttentionInputs]]:
    """Find the structure and the calls of a model in evaluation mode, and verify its attention, on small inputs."""
    with on_a_few_tokens(source):
        if source.predict is not None and holds_quantised_layers(source.root):
            source.predict(source.sample(1))  # compressed-tensors unpacks when the whole model is first run
        structure = find_structure(source)
        calls = capture_calls(source.root, structure, source.small_pass(1))
        run = source.small_pass(length)
        inputs = verify_attention(source.root, structure, run, skip_overflow=skip_overflow)
    for layer, of_layer in zip(structure.attending, inputs, strict=True):
        if of_layer.mask is not None and not bool(of_layer.mask.any(dim=-1).all()):
            line = f"some tokens of {structure.names[layer]} see no token, not even themselves"
            if isinstance(source.root, PreTrainedModel):
                window = getattr(source.root.config.get_text_config(), "sliding_window", None)
                line += f": its config.json says sliding_window = {window}; use a number above 0, or null for none"
            raise UsageError(line)
    positions, tokens = inputs[0].query.shape[2], source.sample(length).shape[1]
    if source.vocabulary is not None and positions != tokens:
        raise UsageError(
            f"{source.name} attends from {positions} positions where it reads {tokens} tokens: theodolite needs one "
            "position a token"
        )
    return structure, calls, inputs


def sharing_weights(model: OpenModel) -> OpenModel:
    """Make a second model that shares the weights in memory, for another thread to measure meanwhile."""
    with between_passes(model.root):
        held = [*model.root.parameters(), *model.root.buffers()]
        source = copy.deepcopy(model.source, {id(tensor): tensor for tensor in held})
        parts = verified_parts(source)
    named = {name: getattr(model, name) for name in ("id", "tokenizer", "revision", "sha256", "stored")}
    return OpenModel.of(source, *parts, **named).only(model.chosen)


@known_state()
def open_streamed(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    attention: Attention | None = None,
    say: Callable[[str], None] = lambda line: None,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OpenModel:
    """Open a checkpoint whose blocks are read from its files as they run, for `survey`, `spectra` and `prune_model`.

    The attention of the first and the last block that attend is verified on opening. That weights are finite is seen
    when a block is first read. A checkpoint that cannot be read so is opened whole.

    Args:
        path_or_id, dtype, device, revision, attention: as in `open_model`.
        say: told in a line why the model was opened whole, if it was, and of a dtype in which this processor is slow.
        show_progress: told (bytes done, bytes in all) while the files are hashed; it may raise to stop.

    Raises:
        UsageError, WorkError: as `open_model` does.
    """
    check_dtype(dtype)
    target = loading.usable_device(device)
    try:
        with loading.without_progress_bars():
            checkpoint = loading.Checkpoint.at(path_or_id, revision).of_one_commit()
            tensors = checkpoint_tensors(checkpoint.place, dtype, checkpoint.revision)
            if tensors.model.config.is_encoder_decoder:
                raise CannotReadLazily("encoder and decoder read each other")
            model = OpenModel.of(
                *_streamed_parts(tensors, Source.of_transformers(tensors.model, attention), target),
                tokenizer=loading.load_tokenizer(checkpoint.place, checkpoint.revision),
                **checkpoint.identity(show_progress),
            )
    except (CannotReadLazily, *loading.LOADING_ERRORS) as error:
        how: dict[str, Any] = {"device": device, "revision": revision, "attention": attention}
        model = open_model(path_or_id, dtype=dtype, say=say, **how)
        say(f"opened whole, since {loading.reason_of(error)}")
        return model
    say_if_slow(model.hf.dtype, target, say)
    return model


def _streamed_parts(tensors: Any, source: Source, device: torch.device) -> Any:
    """Return what `OpenModel.of` takes of a skeleton, verified; its blocks are read as they run from then on."""
    model = tensors.model
    with filled_with_rows(model, 0.0):
        structure = find_structure(source)
    blocks = StreamedBlocks(tensors, structure, device)
    blocks.load_rest()
    with filled_with_rows(model, 0.0, device):
        calls = capture_calls(model, structure, source.small_pass(1))
    for layer in (structure.attending[0], structure.attending[-1]):
        with blocks.present(layer), filled_with_rows(model, 2**-6, device):
            try:
                inputs = verify_attention(model, structure, source.small_pass(VERIFIED_LENGTH))
            except WorkError as error:
                raise CannotReadLazily(str(error)) from error
            blocks.unswept = _why_not_swept(source, structure)
    blocks.readings = [0] * len(blocks.names)
    blocks.read_as_they_run()
    return source, structure, calls, inputs, blocks


def _why_not_swept(source: Source, structure: Structure) -> str | None:
    """Say why passes through one block at a time differ from a whole pass; None where they agree."""
    run, sweep = source.small_pass(VERIFIED_LENGTH), Sweep(structure.blocks)
    with torch.no_grad():
        whole = first_output(run())
        try:
            for layer in range(len(structure.blocks)):
                with sweep.block(layer):
                    swept = first_output(run())
        except (WorkError, *loading.RUNNING_ERRORS) as error:
            return loading.reason_of(error)
    return None if torch.equal(swept, whole) else "its blocks need more than what the ones before them leave"


def training_source(model: nn.Module | OpenModel) -> Source:
    """Return the `Source` of a model in training, which is run by all ranks together, if it is sharded."""
    if isinstance(model, OpenModel):
        register_spread(model.root)  # it may have been spread since it was opened
        return model.source
    register_spread(model)
    inner = unwrap(model)
    source = Source.of_transformers(inner, entry=gathering_entry(model, inner))
    loading.usable_device(source.device)
    return source


def unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the `transformers` model inside DDP, FSDP, DeepSpeed, DataParallel, `torch.compile` or PEFT."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        elif callable(getattr(inner, "get_base_model", None)):
            if prompts := [c for c in inner.peft_config.values() if getattr(c, "is_prompt_learning", False)]:
                raise UsageError(
                    f"{type(inner).__name__} has learned prompts ({prompts[0].peft_type.value}), which are outside of "
                    "the model that theodolite reads: give model.get_base_model() to measure it without them"
                )
            inner = inner.get_base_model()
        else:
            raise UsageError(
                f"{type(model).__name__} holds no model of transformers: give open_module(model, vocabulary=…)"
            )
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in inner.modules()):
        raise UsageError(
            f"{type(inner).__name__} turns itself to full attention for good as it reads a short text: call its "
            'set_attention_type("original_full") first'
        )
    return inner


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype that products are rounded to in training: by autocast, or by accelerate's around `forward`."""
    device = device_of(model).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if not hasattr(model, "_original_forward"):
        return None
    from accelerate.state import AcceleratorState

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Guard the model (`guarded`), and restore PyTorch's random state on leaving."""
    devices = {parameter.device for parameter in model.parameters()}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), guarded(model), as_sharded(model):
        yield
