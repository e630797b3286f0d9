"""The small, seeded trainer that made the embedded model, and can make others like it.

`train_tiny` takes text, trains a byte-level BPE tokenizer and a GPT-2-architecture model (learned positions, no
dropout) on it with plain PyTorch, and writes a folder that `transformers` opens. It is made for a few million
parameters on a few processor cores: no distribution, no mixed schedules, no options beyond `TinyConfig`. The same
seed gives the same bytes on the same machine, number of threads and package versions, also when the training was
killed and begun again in between: the order of batches follows from (seed, step) alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from theodolite.errors import UsageError, WorkError
from theodolite.texts import Document, python_topics, stdlib_docstrings, stdlib_sources

END_OF_TEXT = "<|endoftext|>"
HELD_OUT = 0.06  # share of each source's characters that is kept for validation
LINKING_CHARACTERS = (
    120  # documents that share a paragraph at least this long stay on the same side of the split
)
WARM_UP = 0.04  # share of the steps
FINAL_RATE = 0.1  # of the peak learning rate, where the cosine ends
CLIP = 1.0  # Euclidean norm of the whole gradient
EVALUATED_CONTEXTS = 64  # a source, for the losses shown during training; the last ones use every context


@dataclass(frozen=True)
class TinyConfig:
    """What is trained and for how long. The defaults made the embedded model."""

    layers: int = 6
    heads: int = 4
    width: int = 128
    length: int = 256  # tokens a context, and learned positions
    vocabulary: int = 2048
    batch: int = 16  # contexts a step
    steps: int = 7000
    learning_rate: float = 2e-3  # the peak
    weight_decay: float = 0.1  # on matrices only
    bfloat16: bool = True  # products in bfloat16 (torch.autocast); weights and optimizer stay in float32
    checkpoint_every: int = 500  # steps
    seed: int = 0


@dataclass(frozen=True)
class Source:
    """Documents of one kind, and the share of each batch that is drawn from them."""

    name: str
    share: float
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class TinyResult:
    """What a training gave: losses in nats a token, by source for the held-out documents.

    `bigram` is the best interpolated bigram model of the same training tokens on the same validation tokens.
    """

    folder: Path
    parameters: int
    steps: int
    tokens_seen: int
    training_tokens: dict[str, int]  # distinct tokens to draw from
    validation_tokens: dict[str, int]
    train_loss: float
    validation_loss: dict[str, float]
    bigram_loss: dict[str, float]


@dataclass(frozen=True)
class _Data:
    """Token streams by source: documents joined by the end-of-text token; contexts are windows of length+1."""

    names: tuple[str, ...]
    shares: np.ndarray
    train: tuple[np.ndarray, ...]
    validation: tuple[Int[Tensor, "contexts tokens"], ...]

    def batch(self, config: TinyConfig, step: int) -> Int[Tensor, "batch tokens"]:
        """The batch of a step: windows at random starts, a source drawn by its share for each."""
        random = np.random.default_rng([config.seed, step])
        window = config.length + 1
        rows = []
        for source in random.choice(len(self.train), size=config.batch, p=self.shares):
            stream = self.train[source]
            start = int(random.integers(0, len(stream) - window + 1))
            rows.append(stream[start : start + window].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def sha256(self) -> str:
        """Hash of every training and validation token."""
        digest = hashlib.sha256()
        for name, stream, contexts in zip(self.names, self.train, self.validation, strict=True):
            digest.update(f"{name} {stream.shape} {tuple(contexts.shape)}".encode())
            digest.update(stream.tobytes())
            digest.update(contexts.numpy().tobytes())
        return digest.hexdigest()


def python_sources() -> list[Source]:
    """The text that every CPython carries: language reference, docstrings and source of the standard library."""
    return [
        Source("topics", 0.15, tuple(python_topics())),
        Source("docstrings", 0.35, tuple(stdlib_docstrings())),
        Source("code", 0.5, tuple(stdlib_sources())),
    ]


def train_tiny(
    out: str | Path,
    *,
    sources: Sequence[Source] | None = None,
    config: TinyConfig | None = None,
    threads: int = 2,
    console: Console | None = None,
) -> TinyResult:
    """Train a tokenizer and a model on `sources` (default: `python_sources()`) and write both to the folder `out`.

    A training that was killed goes on from its last checkpoint (`<out>.partial`) when it is called again with the
    same arguments. Raises `UsageError` when `out` exists, when the text is too short, or when `<out>.partial`
    belongs to another training; `WorkError` when the loss stops being a number.
    """
    out, config, console = Path(out), config or TinyConfig(), console or Console(stderr=True)
    _check(out, config)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    training, validation = split_sources(sources if sources is not None else python_sources(), config.seed)
    tokenizer = _tokenizer(partial / "tokenizer.json", training, config)
    data = _tokenise(tokenizer, training, validation, config)
    with _threads(threads):
        torch.manual_seed(config.seed)
        model = GPT2LMHeadModel(_model_config(config))
        _fit(model, data, config, partial, console)
        result = _result(out, model, data, config)
    _save(partial, out, model, tokenizer, config)
    return result


# --- the text --------------------------------------------------------------------------------------------------


def split_sources(sources: Sequence[Source], seed: int) -> tuple[list[Source], list[Source]]:
    """Split documents into training and validation, about `HELD_OUT` of each source's characters in the latter.

    Documents with the same label, or with a paragraph of `LINKING_CHARACTERS` in common (white space aside), go to
    the same side, in whatever source they are: what is held out was not read under another name.
    """
    groups = _linked([document for source in sources for document in source.documents])
    sizes: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(len(sources)))
    placed = iter(groups)
    of_document = [[next(placed) for _ in source.documents] for source in sources]
    for index, source in enumerate(sources):
        for document, group in zip(source.documents, of_document[index], strict=True):
            sizes[group][index] += len(document.text)
    wanted = HELD_OUT * sum(sizes.values(), np.zeros(len(sources)))
    held, taken = set(), np.zeros(len(sources))
    order = sorted(sizes)
    for position in np.random.default_rng(seed).permutation(len(order)):
        group = order[position]
        if ((sizes[group] > 0) & (taken < wanted)).any() and (taken + sizes[group] <= 1.5 * wanted).all():
            held.add(group)
            taken += sizes[group]
    sides: tuple[list[Source], list[Source]] = ([], [])
    for source, document_groups in zip(sources, of_document, strict=True):
        for side, inside in zip(sides, (False, True), strict=True):
            pairs = zip(source.documents, document_groups, strict=True)
            kept = tuple(document for document, group in pairs if (group in held) == inside)
            side.append(Source(source.name, source.share, kept))
    return sides


def _linked(documents: Sequence[Document]) -> list[int]:
    """The group of each document: documents that share a label or a long paragraph are in one group."""
    parent = list(range(len(documents)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, document in enumerate(documents):
        paragraphs = (" ".join(paragraph.split()) for paragraph in document.text.split("\n\n"))
        keys = [paragraph for paragraph in paragraphs if len(paragraph) >= LINKING_CHARACTERS]
        if document.label is not None:
            keys.append("label " + document.label)
        for key in keys:
            parent[root(index)] = root(first.setdefault(key, index))
    return [root(index) for index in range(len(documents))]


def _tokenizer(path: Path, training: Sequence[Source], config: TinyConfig) -> PreTrainedTokenizerFast:
    """The tokenizer at `path`, trained first when it is not there yet: each source gives text by its share."""
    if not path.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocabulary,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(_by_share(training, config.seed), trainer)
        if bpe.get_vocab_size() != config.vocabulary:
            raise UsageError(
                f"The text gives only {bpe.get_vocab_size()} tokens of the {config.vocabulary} asked for; "
                "use a smaller vocabulary or more text."
            )
        temporary = path.with_suffix(".temporary")
        bpe.save(str(temporary))
        os.replace(temporary, path)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, model_max_length=config.length
    )


def _by_share(sources: Sequence[Source], seed: int) -> Iterator[str]:
    """Whole documents of each source in a seeded order, as many characters as its share allows."""
    lengths = [sum(len(document.text) for document in source.documents) for source in sources]
    total = min(length / source.share for length, source in zip(lengths, sources, strict=True))
    for source in sources:
        left = total * source.share
        for index in np.random.default_rng(seed).permutation(len(source.documents)):
            if left <= 0:
                break
            text = source.documents[index].text
            left -= len(text)
            yield text


def _tokenise(
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[Source],
    validation: Sequence[Source],
    config: TinyConfig,
) -> _Data:
    """Token streams for training, and non-overlapping windows cut within each held-out document."""
    window = config.length + 1
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    train, held = [], []
    for source in training:
        streams = _encode(tokenizer, source.documents)
        train.append(
            np.concatenate([np.append(ids, end) for ids in streams] or [np.zeros(0)]).astype(np.int32)
        )
        if len(train[-1]) < window:
            raise UsageError(
                f"Source '{source.name}' is shorter than one context of {window} tokens; add text."
            )
    for source in validation:
        cut = [
            ids[: len(ids) // window * window].reshape(-1, window)
            for ids in _encode(tokenizer, source.documents)
        ]
        held.append(torch.from_numpy(np.concatenate(cut or [np.zeros((0, window))]).astype(np.int64)))
    shares = np.array([source.share for source in training])
    return _Data(tuple(source.name for source in training), shares / shares.sum(), tuple(train), tuple(held))


def _encode(tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]) -> Iterator[np.ndarray]:
    for document in documents:
        yield np.array(
            tokenizer.backend_tokenizer.encode(document.text, add_special_tokens=False).ids, dtype=np.int64
        )


# --- the model -------------------------------------------------------------------------------------------------


def _model_config(config: TinyConfig) -> GPT2Config:
    return GPT2Config(
        vocab_size=config.vocabulary,
        n_positions=config.length,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def _fit(model: GPT2LMHeadModel, data: _Data, config: TinyConfig, partial: Path, console: Console) -> None:
    """Train `model` in place from its last checkpoint in `partial`, if there is one."""
    optimizer = _optimizer(model, config)
    identity = {"config": json.dumps(asdict(config)), "data": data.sha256()}
    checkpoint = partial / "checkpoint.safetensors"
    begin = _restore(checkpoint, model, optimizer, identity)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=config.steps, completed=begin)
        for step in range(begin, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            loss = _loss(model, data.batch(config, step), config).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if not math.isfinite(loss.item()):
                raise WorkError(f"The loss was {loss.item()} at step {step}; lower the learning rate.")
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                _checkpoint(checkpoint, model, optimizer, identity | {"step": str(step + 1)})
                losses = _validate(model, data, config, EVALUATED_CONTEXTS)
                shown = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
                console.print(f"step {step + 1}: training {loss.item():.3f}; validation {shown}")


def learning_rate(config: TinyConfig, step: int) -> float:
    """Linear warm-up, then a cosine from `config.learning_rate` down to `FINAL_RATE` of it."""
    warm_up = max(1, round(WARM_UP * config.steps))
    if step < warm_up:
        return config.learning_rate * (step + 1) / warm_up
    done = (step - warm_up) / max(1, config.steps - warm_up)
    return config.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def _optimizer(model: GPT2LMHeadModel, config: TinyConfig) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def _loss(
    model: GPT2LMHeadModel, tokens: Int[Tensor, "batch window"], config: TinyConfig
) -> Float[Tensor, "batch length"]:
    """Negative log-likelihood, in nats, of every token of a window but its first."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def _validate(model: GPT2LMHeadModel, data: _Data, config: TinyConfig, most: int | None) -> dict[str, float]:
    """Mean loss of the held-out contexts of each source (the first `most` of them)."""
    losses = {}
    for name, contexts in zip(data.names, data.validation, strict=True):
        if len(contexts):
            batches = contexts[:most].split(config.batch)
            losses[name] = float(torch.cat([_loss(model, batch, config) for batch in batches]).mean())
    return losses


# --- checkpoints and results -----------------------------------------------------------------------------------


def _checkpoint(
    path: Path, model: GPT2LMHeadModel, optimizer: torch.optim.AdamW, metadata: dict[str, str]
) -> None:
    """Write weights and both moments to one file, whole or not at all."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        tensors[f"{name}/exp_avg"] = optimizer.state[parameter]["exp_avg"]
        tensors[f"{name}/exp_avg_sq"] = optimizer.state[parameter]["exp_avg_sq"]
    temporary = path.with_suffix(".temporary")
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)


def _restore(
    path: Path, model: GPT2LMHeadModel, optimizer: torch.optim.AdamW, identity: dict[str, str]
) -> int:
    """Load a checkpoint into model and optimizer; the number of steps it had done (0: there is none)."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        if any(metadata[key] != value for key, value in identity.items()):
            raise UsageError(
                f"{path.parent} holds a training of other settings or text; remove it to begin anew."
            )
        step = int(metadata["step"])
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(name))
            moments = {key: file.get_tensor(f"{name}/{key}") for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


def bigram_loss(
    streams: Sequence[Int[np.ndarray, " tokens"]],
    shares: Float[np.ndarray, " sources"],
    contexts: Int[Tensor, "contexts window"],
    vocabulary: int,
) -> float:
    """Loss, in nats a token, of the best interpolated bigram model on `contexts`.

    P(b|a) = (n(a,b) + κ P(b)) / (n(a) + κ), P(b) add-one smoothed; counts of `streams` weighted by how often a
    batch draws from each. κ is chosen on `contexts` themselves, which favours the bigram.
    """
    counts = np.zeros((vocabulary, vocabulary))
    total = sum(len(stream) for stream in streams)
    for stream, share in zip(streams, shares, strict=True):
        pairs = np.bincount(stream[:-1].astype(np.int64) * vocabulary + stream[1:], minlength=vocabulary**2)
        counts += (share * total / len(stream)) * pairs.reshape(vocabulary, vocabulary)
    single = (counts.sum(0) + 1) / (counts.sum() + vocabulary)
    first, second = contexts[:, :-1].numpy().ravel(), contexts[:, 1:].numpy().ravel()
    pair, alone, row = counts[first, second], single[second], counts.sum(1)[first]
    return min(float(-np.log((pair + k * alone) / (row + k)).mean()) for k in 2.0 ** np.arange(-4, 16))


def _result(out: Path, model: GPT2LMHeadModel, data: _Data, config: TinyConfig) -> TinyResult:
    # Batches of steps that were never trained on, but of the training text.
    batches = [data.batch(config, step) for step in range(config.steps, config.steps + 16)]
    with torch.no_grad():
        train_loss = float(torch.stack([_loss(model, batch, config).mean() for batch in batches]).mean())
    pairs = list(zip(data.names, data.validation, strict=True))
    return TinyResult(
        folder=out,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=config.steps,
        tokens_seen=config.steps * config.batch * config.length,
        training_tokens={name: len(stream) for name, stream in zip(data.names, data.train, strict=True)},
        validation_tokens={name: contexts[:, 1:].numel() for name, contexts in pairs},
        train_loss=train_loss,
        validation_loss=_validate(model, data, config, None),
        bigram_loss={
            name: bigram_loss(data.train, data.shares, contexts, config.vocabulary)
            for name, contexts in pairs
            if len(contexts)
        },
    )


def _save(
    partial: Path, out: Path, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, config: TinyConfig
) -> None:
    """Write the finished folder beside the checkpoint and rename it to `out`."""
    finished = partial / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    model.save_pretrained(finished)
    tokenizer.save_pretrained(finished)
    (finished / "training.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    os.replace(finished, out)
    shutil.rmtree(partial)


def _check(out: Path, config: TinyConfig) -> None:
    if out.exists():
        raise UsageError(f"{out} exists; give another folder or remove it.")
    if config.width % config.heads:
        raise UsageError(f"A width of {config.width} does not divide into {config.heads} heads.")
    for name, value in asdict(config).items():
        if name not in ("seed", "weight_decay", "bfloat16") and value <= 0:
            raise UsageError(f"{name} is {value}; it must be positive.")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use `count` threads: how sums are split over threads changes their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
