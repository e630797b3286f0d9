"""What the monitor costs: a look as a share of the training steps between looks, measured in one run.

`python -m benchmarks.monitor` times, in turns, an AdamW step of a random model of GPT-2's width, a look at it, and a
look that also reads every head's weights; and a step that is a look itself (`inline`), which makes no second pass. The
monitor batch has its default size.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
import transformers

from benchmarks.ratios import Ratio, seconds, where
from theodolite.train.geometry import GeometryReader
from theodolite.train.inline import InlineReader
from theodolite.train.monitor import CONTEXTS, LENGTH

EVERY, SPECTRA_EVERY = 100, 5
"""Defaults of the monitor."""


def main(given: Sequence[str] | None = None) -> list[Ratio]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    options = parser.parse_args(given)
    device = options.device
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=options.vocabulary,
        n_layer=options.layers,
        n_embd=options.width,
        n_head=options.heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(options.vocabulary, (options.batch, options.length), device=device)
    reader = GeometryReader(model, torch.randint(options.vocabulary, (CONTEXTS, LENGTH)))

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    inline = InlineReader(model)

    def looked_at_step(spectra: bool) -> None:
        inline.arm(0, spectra)
        step()
        inline.take(1)

    works = {
        "step": step,
        "look": lambda: reader.look(spectra=False),
        "look with spectra": lambda: reader.look(spectra=True),
        "inline": lambda: looked_at_step(False),
        "inline with spectra": lambda: looked_at_step(True),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds + 1):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    steps, looks, spectral, *inlines = (values[1:] for values in times.values())
    # What a step costs more that is a look.
    inlines = [[value - own for value, own in zip(values, steps, strict=True)] for values in inlines]
    print(
        f"GPT-2 of {options.layers} layers, d = {options.width}, {options.heads} heads; steps of {options.batch} × "
        f"{options.length} tokens, monitor batch of {CONTEXTS} × {LENGTH}; {where(device)}, "
        f"{options.rounds} rounds in turns"
    )
    print(f"step {statistics.median(steps):.3f} s")
    for name, values in zip(list(works)[1:], (looks, spectral, *inlines), strict=True):
        ratios = [value / own for value, own in zip(values, steps, strict=True)]
        print(f"{name:20} {statistics.median(ratios):.2f} steps ({min(ratios):.2f} to {max(ratios):.2f})")
    shares = [
        ((SPECTRA_EVERY - 1) * look + full) / SPECTRA_EVERY / (EVERY * own)
        for look, full, own in zip(looks, spectral, steps, strict=True)
    ]
    print(
        f"share of time at every = {EVERY}, spectra_every = {SPECTRA_EVERY}: {statistics.median(shares):.2%} "
        f"({min(shares):.2%} to {max(shares):.2%})"
    )
    of_look = [look / own for look, own in zip(looks, steps, strict=True)]
    return [
        Ratio.of("monitor: a look / a training step", of_look),
        Ratio.of(
            "monitor: what an inline look adds / a look",
            [a / b for a, b in zip(inlines[0], looks, strict=True)],
        ),
        Ratio.of(f"monitor: share of time at every = {EVERY}", shares),
    ]


if __name__ == "__main__":
    main()
