"""The interface to a model: a root to hook and tap, a way to run it, and what it reads."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.cutting import NO_TOKEN
from theodolite.corpus.images import PicturedIds
from theodolite.errors import UsageError, WorkError, first_line
from theodolite.models.one_row import reading
from theodolite.models.structure import Layout, Run, first_output, removed_on_leaving
from theodolite.system.choices import DECODER, Attention, check_attention

Inputs = Int[Tensor, "contexts positions"] | Float[Tensor, "contexts channels height columns"] | PicturedIds
"""Token ids, the pixel values of images, or ids with what is read of the pictures among them."""


@dataclass(frozen=True, eq=False)
class Source:
    """How a model is run, hooked and tapped, and what it reads.

    Attributes:
        root: the whole model, which is hooked and tapped.
        trunk: the module that a pass begins with, which runs the blocks.
        run: the trunk on a batch, without an output head where it has one.
        predict: the next-token logits of a batch, or (tokens, vocabulary) of the positions that a mask (contexts,
            positions) chooses, which saves what the head costs for the others; None where there is no output head.
        reads: the name of what it reads: "input_ids", or "pixel_values" and the like.
        vocabulary: tokens that it has an embedding for; None where it reads images, of the shape `image`.
        longest: tokens that it has positions for; None where it sets no limit (ALiBi).
        probe: `run` so that the structure shows: of two such contexts, or with one token more for an encoder.
        of_copy: the same of a copy of the root.
        attends: which of its attention is looked at, in such a pass; `attention`: the name of that.
        blocks: names of its blocks, or of the one list that holds them; None: they are found.
    """

    root: nn.Module
    trunk: nn.Module
    run: Callable[[Inputs], Any]
    predict: Callable[..., Float[Tensor, "*positions vocabulary"]] | None
    reads: str
    vocabulary: int | None
    image: tuple[int, ...] | None
    longest: int | None
    probe: Callable[[Tensor], Any]
    of_copy: Callable[[Any], Source]
    attends: Callable[[nn.Module, AttentionInputs], bool] = lambda module, inputs: True
    attention: str | None = None
    blocks: tuple[str, ...] | None = None

    @classmethod
    def of_transformers(
        cls, model: PreTrainedModel, attention: Attention | None = None, entry: nn.Module | None = None
    ) -> Source:
        """Describe a model of `transformers`; `UsageError` where it reads other things, or has no such attention."""
        if model.config.is_encoder_decoder:
            return _of_encoder_decoder(model, attention or DECODER, entry)
        if attention is not None:
            raise UsageError(f"{type(model).__name__} is no encoder-decoder, and attends in one way only")
        name, trunk = model.main_input_name, model.base_model
        if name not in inspect.signature(trunk.forward).parameters:  # DINOv3's is its encoder alone
            trunk = model
        reads_ids = name == "input_ids"
        options: dict[str, Any] = {"use_cache": False} if reads_ids else {}
        # An entry may be the whole model, whose logits nobody reads in a run.
        chooses = entry is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
        fewest = {"logits_to_keep": 1} if chooses else {}

        def given(batch: Inputs) -> dict[str, Any]:
            read = {name: batch.ids, **batch.pictures} if isinstance(batch, PicturedIds) else {name: batch}
            device, dtype = device_of(model), model.dtype
            placed = {
                of: it.to(device, dtype if it.is_floating_point() else it.dtype) for of, it in read.items()
            }
            return placed | options

        def run(batch: Inputs) -> Any:
            return (entry or trunk)(**given(batch), **fewest)

        def predict(batch: Tensor, chosen: Tensor | None = None) -> Tensor:
            if chosen is None:
                return model(**given(batch)).logits
            read = False

            def choose(module: nn.Module, args: tuple[Any, ...]) -> Any:
                nonlocal read
                read = bool(args) and args[0].shape[:2] == chosen.shape
                return (args[0][chosen.to(args[0].device)][None], *args[1:]) if read else None

            head: Any = model.get_output_embeddings()
            with removed_on_leaving([head.register_forward_pre_hook(choose)]):
                logits = model(**given(batch)).logits
            return logits[0] if read else logits[chosen.to(logits.device)]

        return cls(
            root=model,
            trunk=trunk,
            run=run,
            predict=None if model.get_output_embeddings() is None else predict,
            reads=name,
            vocabulary=embedded_tokens(model) if reads_ids else None,
            image=None if reads_ids else _image_shape(model),
            longest=longest_of(model),
            probe=run,
            of_copy=cls.of_transformers,
        )

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        vocabulary: int | None,
        forward: Callable[[nn.Module, Tensor], Any] | None = None,
        longest: int | None = None,
        image: tuple[int, int, int] | None = None,
        blocks: tuple[str, ...] | None = None,
        attention: str | None = None,
    ) -> Source:
        """Describe any module that reads token ids, or pixel values."""
        trunk = _Trunk(module, forward)
        chosen = {
            inner
            for name, inner in module.named_modules(remove_duplicate=False)
            if attention is None or f".{name}".endswith(f".{attention}")
        }

        def predict(batch: Tensor, chosen: Tensor | None = None) -> Tensor:
            logits = first_output(trunk(batch))
            layout = Layout.of(logits.shape, *batch.shape) if isinstance(logits, Tensor) else None
            if layout is not None and layout.is_row:
                with reading((batch.shape[0], batch.shape[1])):
                    logits = layout.ordered(logits)
            if not isinstance(logits, Tensor) or logits.shape[:2] != batch.shape or logits.ndim != 3:
                raise UsageError(
                    f"{type(module).__name__} gives no logits (contexts, positions, vocabulary): give open_module a "
                    "forward that returns them"
                )
            return logits if chosen is None else logits[chosen.to(logits.device)]

        return cls(
            root=module,
            trunk=trunk,
            run=trunk,
            predict=None if vocabulary is None else predict,
            reads="pixel_values" if vocabulary is None else "input_ids",
            vocabulary=vocabulary,
            image=image,
            longest=longest,
            # Two contexts tell whether they are apart or in a row; an image is one.
            probe=trunk if vocabulary is None else lambda ids: trunk(ids.repeat(2, 1)),
            attends=lambda inner, inputs: inner in chosen,
            attention=attention,
            blocks=blocks,
            of_copy=lambda copy: cls.of_module(copy, vocabulary, forward, longest, image, blocks, attention),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        """Copy the model, with functions that run the copy."""
        return self.of_copy(copy.deepcopy(self.root, memo))

    def sample(self, length: int) -> Tensor:
        """Draw a batch of one context: so many token ids, or fewer where it has no positions for them; or an image."""
        generator = torch.Generator().manual_seed(0)
        if self.vocabulary is None:
            assert self.image is not None
            return torch.randn(1, *self.image, generator=generator).to(self.device, self.dtype)
        shape = 1, min(length, self.longest or length)
        return torch.randint(self.vocabulary, shape, generator=generator).to(self.device)

    def small_pass(self, length: int) -> Run:
        """Make a pass over `sample(length)`, all of it."""
        return lambda: self.run(self.sample(length))

    @property
    def target_start(self) -> int:
        """The token that the decoder's text begins with, where the encoder may read another one; or `UsageError`."""
        if self.attention not in (DECODER, "cross"):
            line = "reads one text: a source beside the text is for the decoder of an encoder-decoder"
            raise UsageError(f"{self.name} {line}")
        configs = (self.root.config, getattr(self.root, "generation_config", None))
        starts = [getattr(config, "decoder_start_token_id", None) for config in configs]
        start = next((start for start in starts if isinstance(start, int)), None)
        if start is None:
            raise UsageError(f"the config.json of {self.name} has no decoder_start_token_id: add it")
        return start

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.root).__name__

    @property
    def family(self) -> str:
        """The name of the model's family."""
        return self.root.config.model_type if isinstance(self.root, PreTrainedModel) else self.name

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its first floating-point parameter."""
        return dtype_of(self.root)

    @property
    def device(self) -> torch.device:
        """The device for inputs."""
        return device_of(self.root)


def _of_encoder_decoder(model: PreTrainedModel, attention: Attention, entry: nn.Module | None) -> Source:
    """Let encoder and decoder read the same tokens."""
    check_attention(attention)
    if model.main_input_name != "input_ids":
        raise _reads_something_else(model)
    trunk = model.get_encoder() if attention == "encoder" else model.base_model

    def run(ids: Any, more: int = 0) -> Any:
        ids = source = ids.to(device_of(model))
        if ids.ndim == 3:  # contexts with sources (`Corpus.inputs`)
            ids, source = (of[:, of[0] != NO_TOKEN] for of in ids.unbind(dim=1))
        if attention == "encoder":
            return trunk(input_ids=ids)
        source = torch.cat([source, source[:, :more]], dim=1)
        return (entry or trunk)(input_ids=source, decoder_input_ids=ids, use_cache=False)

    of_decoder = frozenset() if attention == "encoder" else frozenset(model.get_decoder().modules())

    def attends(module: nn.Module, inputs: AttentionInputs) -> bool:
        if attention == "encoder":
            return True
        more = inputs.key.shape[2] - inputs.query.shape[2]
        return module in of_decoder and more == (0 if attention == DECODER else 1)

    return Source(
        root=model,
        trunk=trunk,
        run=run,
        predict=None,
        reads="input_ids",
        vocabulary=embedded_tokens(model),
        image=None,
        longest=longest_of(model),
        probe=functools.partial(run, more=1),
        attends=attends,
        attention=attention,
        of_copy=functools.partial(Source.of_transformers, attention=attention),
    )


class _Trunk(nn.Module):
    """Wraps a module and the function that runs it, so that a pass begins with the call of one module."""

    def __init__(self, module: nn.Module, forward: Callable[[nn.Module, Tensor], Any] | None) -> None:
        super().__init__()
        self._run = functools.partial(forward or nn.Module.__call__, module)

    def forward(self, ids: Tensor) -> Any:
        """Run the module on token ids, or images; `UsageError` where it has no place for them."""
        module = self._run.args[0]
        is_image = ids.is_floating_point()
        ids = ids.to(device_of(module), dtype_of(module) if is_image else ids.dtype)
        try:
            # Of an image no more is known than that it is one context.
            with reading(None if is_image else (ids.shape[0], ids.shape[1])):
                return self._run(ids)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
            if is_image:
                raise UsageError(f"{type(module).__name__} cannot run on images: {reason}") from error
            raise UsageError(
                f"{type(module).__name__} cannot run on contexts of {ids.shape[1]} tokens: {reason}; give shorter ones "
                "if it has no positions for so many (longest=…), or a smaller vocabulary=… if it has fewer token ids"
            ) from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device for inputs: the first that holds a parameter, or the CPU where all are offloaded."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def longest_of(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model has positions for, or None where it sets no limit."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1  # RoBERTa counts from its padding index
    config = model.config
    names = ("max_target_positions", "max_position_embeddings")  # Whisper's decoder has its own
    limits = (getattr(config, name, None) for name in names)
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if longest is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "yarn"):  # the others give it in full
        # The length that is scaled: most configs that name none give the original one for the longest.
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, int(rope.get("factor", 1.0) * original))
    if getattr(config, "attention_type", None) != "block_sparse":
        return longest
    # BigBird attends in full to texts up to here, and turns itself to that for good as it is opened.
    return min(longest, (5 + 2 * config.num_random_blocks) * config.block_size)


def turned_alike_up_to(config: Any) -> int | None:
    """Return the longest pass that rotates positions as every shorter one does; None: any length."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [of_kind for of_kind in rope.values() if isinstance(of_kind, dict)] or [rope]
    long = [of_kind for of_kind in kinds if of_kind.get("rope_type") == "longrope"]
    limits = (of_kind.get("original_max_position_embeddings") for of_kind in long)
    return min(filter(None, limits), default=None)


def embedded_tokens(model: PreTrainedModel) -> int:
    """Count the rows of a model's token embedding; `UsageError` where it has no one such (CLIP's towers, CANINE)."""
    try:
        embedding: Any = model.get_input_embeddings()
        # ZeRO keeps it flat.
        return len(embedding.weight) if embedding.weight.ndim > 1 else embedding.num_embeddings
    except (AttributeError, NotImplementedError) as error:
        raise UsageError(
            f"{type(model).__name__} has no one embedding of tokens: open the part of it that attends (text_model, "
            "say), or its folder"
        ) from error


def _reads_something_else(model: PreTrainedModel) -> UsageError:
    return UsageError(f"{type(model).__name__} reads {model.main_input_name}, which theodolite cannot make")


def _image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return channels, rows and columns of an image; `UsageError` where the model reads something else."""
    size = getattr(model.config, "image_size", None)
    if model.main_input_name != "pixel_values" or size is None:
        raise _reads_something_else(model)
    return (model.config.num_channels, *((size, size) if isinstance(size, int) else size))


@torch.no_grad()
def decode_greedily(
    source: Source, ids: Int[Tensor, "contexts positions"], count: int
) -> Int[Tensor, "contexts more_positions"]:
    """Append `count` tokens to contexts of one length by greedy decoding with the model's own cache.

    `WorkError` where the first context's logits differ from those of one pass over the finished text.
    """
    assert source.predict is not None
    root = source.root
    if not (isinstance(root, PreTrainedModel) and root.can_generate()):
        for _ in range(count):  # no cache is known of a module of one's own
            ids = torch.cat([ids, source.predict(ids)[:, -1:].argmax(dim=-1).to(ids)], dim=1)
        return ids
    model: Any = root
    steps: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        steps.append(output.logits[0, -1])

    # A checkpoint may ask for sampling, for penalties of what was said, and for an end.
    plain = GenerationConfig(cache_implementation=model.generation_config.cache_implementation)
    placed, hooks = ids.to(source.device), [model.register_forward_hook(keep)]
    with removed_on_leaving(hooks), ExitStack() as undo:
        undo.callback(setattr, model, "generation_config", model.generation_config)
        model.generation_config = plain
        options = {"max_new_tokens": count, "do_sample": False, "use_cache": True}
        finished: Tensor = model.generate(placed, attention_mask=torch.ones_like(placed), **options).cpu()
    at_once = source.predict(finished[:1])[0, ids.shape[1] - 1 : -1]
    error = float((torch.stack(steps) - at_once).abs().max() / at_once.abs().max())
    # Cached decoding and a pass over the whole text round differently, in any dtype.
    if not error <= max(1e-3, 16 * torch.finfo(source.dtype).eps):
        raise WorkError(
            f"{source.name} writes by logits that differ by {error:.1e} from those of the finished text read at once "
            "(its positions depend on the length, say): give a shorter text, or fewer tokens to write"
        )
    return finished
