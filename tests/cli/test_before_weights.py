"""What configuration, tokenizer and options can refuse is refused before weights are read.

Oracle: whoever reads weights raises, so that a call which comes so far ends in another line.
"""

from __future__ import annotations

import json

import pytest
import transformers

from tests import checkpoints
from tests.calls import call, error_of
from theodolite.models.stored import loading
from theodolite.models.stored.checkpoint_tensors import CheckpointTensors


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints and texts, by name."""
    folder = tmp_path_factory.mktemp("before_weights")
    made = {name: checkpoints.write(name, folder / name) for name in ("llama2", "bert")}
    made["bare"] = checkpoints.write("llama2", folder / "bare")
    (made["bare"] / "tokenizer.json").unlink()
    (made["bare"] / "tokenizer_config.json").unlink()
    made["unknown"] = checkpoints.edited(checkpoints.write("gpt2", folder / "unknown"), model_type="gpt7")
    made["headless"] = checkpoints.edited(
        checkpoints.write("gpt2", folder / "headless"), architectures=["GPT2Model"]
    )
    (folder / "table.jsonl").write_text(json.dumps({"body": "some words " * 40, "kind": "a"}) + "\n")
    (folder / "text.txt").write_text("some words " * 400)
    (folder / "short.txt").write_text("ab")
    (folder / "old").mkdir()
    (folder / "old" / "run.json").write_text(json.dumps({"schema_version": 99, "kind": "survey"}))
    (folder / "tasks").mkdir()
    made |= {
        name: folder / name
        for name in ("table.jsonl", "text.txt", "short.txt", "old", "tasks", "none", "out")
    }
    return {name: str(path) for name, path in made.items()}


def _calls() -> list[tuple[str, str]]:
    """The words of a call, in which a place's name is in braces, and what its line says."""
    opened = {
        "survey": "survey {model}",
        "stream": "survey {model} --stream",
        "trace": "trace {model}",
        "evaluate": "evaluate {model}",
        "prune": "prune {model} --out {out}",
        "explore": "explore {model} --no-browser",
        "compare": "compare {model} {model} --out {out}",
    }
    prune, evaluate = (
        "prune {llama2} --out {out} --corpus {text.txt}",
        "evaluate {llama2} --corpus {text.txt}",
    )
    calls = []
    for command in opened.values():
        of = lambda name: command.replace("model", name)  # noqa: E731, B023
        calls += [
            (of("bare") + " --corpus {text.txt}", "has no tokenizer beside its weights"),
            (of("llama2") + " --corpus {text.txt} --length 500", "longer than the 128"),
            (of("llama2") + " --corpus {short.txt}", "shorter than one context"),
            (of("llama2") + " --corpus {table.jsonl}", "text"),
        ]
    calls += [
        ("survey {unknown}", "gpt7"),
        ("trace {llama2} --device abacus", "cannot use device abacus"),
        ("spectra {unknown}", "gpt7"),
        ("spectra {llama2} --attention encoder", "is no encoder-decoder"),
        ("survey {llama2} --attention encoder", "is no encoder-decoder"),
        ("explore {llama2} --no-browser --run {old}", "is damaged"),
        ("evaluate {bert} --corpus {text.txt}", "only causal models are evaluated"),
        ("evaluate {headless} --corpus {text.txt}", "predicts no tokens"),
        (evaluate + " --stride 200 --length 64", "a stride of 200 leaves tokens out"),
        (evaluate + " --stride 32 --length 500", "longer than the 128"),
        ("evaluate {llama2} --task few-shot --prompts 1", "1 prompts with seed 0"),
        ("evaluate {llama2} --task few-shot --shots 0-90", "takes up to"),
        ("evaluate {llama2} --tasks {tasks}", "holds no task of lm-eval"),
        ("evaluate {llama2} --tasks {none}", "there is no folder"),
        (evaluate + " --batch 0", "a batch of 0"),
        (prune + " --sparsity 0.5,0.5", "2 sparsities for 3 blocks"),
        (prune + " --batch 0", "a batch of 0"),
        ("survey {llama2} --batch 0", "a batch of 0"),
    ]
    return calls


@pytest.mark.parametrize(("words", "says"), _calls())
def test_refused_before_weights_are_read(words, says, places, monkeypatch):
    def read(*_: object, **more: object) -> None:
        raise Exception("weights were read")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", read)
    monkeypatch.setattr(CheckpointTensors, "load", read)
    monkeypatch.setattr(loading, "hash_checkpoint", read)
    status, _, stderr = call(*(places.get(word.strip("{}"), word) for word in words.split()))
    assert status == 2, stderr
    assert says in error_of(stderr)
