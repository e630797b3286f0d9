"""Oracles: log-likelihoods of the choices by plain `transformers`, prompts written out, sockets that nobody opens."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")

from tests import checkpoints
from theodolite.errors import UsageError
from theodolite.evaluate import harness as module
from theodolite.evaluate.harness import harness
from theodolite.models import open_model

pytestmark = pytest.mark.slow  # to import lm-eval takes half a minute

YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{dev: dev.jsonl, test: {test}}}
fewshot_split: dev
fewshot_config: {{sampler: first_n}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}="
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
fewshot_delimiter: ";"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 3.0}}
"""

DEV = [("1+2", ["3", "12"], 0), ("2+2", ["five", "4"], 1), ("9+1", ["10", "1"], 0)]


def question(a: int, b: int) -> tuple[str, list[str], int]:
    choices = [str(a + b), str(a * b + 7), f"{a}{b}{a}"]
    return f"{a}+{b}", choices, (a + 2 * b) % 3


TEST = [question(a, b) for a in range(1, 5) for b in range(1, 6)]


def write(path: Path, rows: list[tuple[str, list[str], int]]) -> None:
    names = ("question", "choices", "answer")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two small tasks and a group of both; data are cached where the test is."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    place = tmp_path / "tasks"
    place.mkdir()
    write(place / "dev.jsonl", DEV)
    write(place / "sums.jsonl", TEST)
    write(place / "more.jsonl", TEST[:5])
    (place / "sums.yaml").write_text(YAML.format(name="sums", test="sums.jsonl"))
    (place / "more.yaml").write_text(YAML.format(name="more", test="more.jsonl"))
    aggregate = "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]"
    (place / "both.yaml").write_text(f"group: both\ntask: [sums, more]\n{aggregate}\n")
    return place


def log_likelihood(model, prompt: str, choice: str) -> float:
    """Of the choice after the prompt, in nats, in float64."""
    before, after = (model.tokenizer(text)["input_ids"] for text in (prompt, choice))
    with torch.no_grad():
        logits = model.hf(torch.tensor([before + after])).logits[0].double().log_softmax(-1)
    return float(sum(logits[len(before) + i - 1, token] for i, token in enumerate(after)))


def answers(model, shots: int, rows=TEST) -> dict[str, np.ndarray]:
    """Whether each question is right by log-likelihood, and by log-likelihood a character."""
    examples = "".join(f"{text}={choices[answer]};" for text, choices, answer in DEV[:shots])
    found = {"acc": [], "acc_norm": []}
    for text, choices, answer in rows:
        each = np.array([log_likelihood(model, f"{examples}{text}=", choice) for choice in choices])
        lengths = np.array([len(choice) for choice in choices])
        found["acc"].append(each.argmax() == answer)
        found["acc_norm"].append((each / lengths).argmax() == answer)
    return {name: np.array(values, dtype=float) for name, values in found.items()}


def test_values_are_those_of_plain_transformers(opened, folder):
    """Oracle: the log-likelihood of every choice, prompt by prompt, at 0, 1 and 2 examples."""
    model = opened("llama3")
    scores = harness(model, ["sums"], range(3), folder=folder, batch=4)
    assert [(s.shots, s.metric) for s in scores] == [(k, m) for k in range(3) for m in ("acc", "acc_norm")]
    for score in scores:
        wanted = answers(model, score.shots)[score.metric]
        assert np.array_equal(score.each, wanted)
        assert score.value == pytest.approx(wanted.mean())
        assert score.error == pytest.approx(wanted.std(ddof=1) / math.sqrt(len(wanted)))
        assert (score.count, score.batch, score.version) == (20, 4, "3.0")
        assert score.model == model.id


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def test_questions_in_conversations_are_those_of_the_tokenizers_template(anew, folder):
    """Oracle: log-likelihoods behind what `apply_chat_template` of transformers writes, examples as turns."""
    model = anew("llama3")
    with pytest.raises(UsageError, match=f"of {model.id} has no chat template: leave out --chat-template"):
        harness(model, ["sums"], [0], folder=folder, chat_template=True)
    model.tokenizer.chat_template = TEMPLATE
    asked = {"folder": folder, "batch": 4, "limit": 8}
    (score, _) = harness(model, ["sums"], [2], **asked, chat_template=True, system="Add.")
    examples = [
        turn
        for text, choices, answer in DEV[:2]
        for turn in (("user", f"{text}="), ("assistant", choices[answer]))
    ]
    wanted = []
    for text, choices, answer in TEST[:8]:
        turns = [("system", "Add."), *examples, ("user", f"{text}=")]
        messages = [{"role": role, "content": content} for role, content in turns]
        written = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        wanted.append(
            float(np.argmax([log_likelihood(model, written, choice) for choice in choices]) == answer)
        )
    assert score.each.tolist() == wanted
    assert (score.chat_template, score.system) == (True, "Add.")
    (plain, _) = harness(model, ["sums"], [2], **asked)
    assert (plain.chat_template, plain.system) == (False, "")
    assert plain.questions != score.questions  # so that they are never paired


def test_a_group_is_the_mean_over_all_its_documents(opened, folder):
    """Oracle: both tasks' answers side by side; its parts are not shown, those asked for by name are."""
    model = opened("gpt2")
    (group,) = harness(model, ["both"], [0], folder=folder)
    wanted = np.concatenate([answers(model, 0)["acc"], answers(model, 0, TEST[:5])["acc"]])
    assert (group.task, group.metric, group.count) == ("both", "acc", 25)
    assert group.value == pytest.approx(wanted.mean())
    assert np.array_equal(np.sort(group.each), np.sort(wanted))
    tasks = harness(model, [], [0], folder=folder)
    assert {score.task for score in tasks} == {"sums", "more"}
    limited = harness(model, ["sums"], [0], folder=folder, limit=6)[0]
    assert limited.count == 6


def test_prompts_that_turn_with_the_length_of_a_pass_are_read_one_by_one(folder, tmp_path):
    """Oracle: each choice by itself; eight in a batch would be turned as the longest of them is."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 5, **factors}
    model = open_model(checkpoints.write("llama2", tmp_path / "longrope", rope_parameters=rope))
    with pytest.raises(UsageError, match=r"by the length of a pass beyond 5 tokens.*use --batch 1"):
        harness(model, ["sums"], [0], folder=folder)
    for score in harness(model, ["sums"], [0], folder=folder, batch=1):
        assert np.array_equal(score.each, answers(model, 0)[score.metric])


def test_the_network_is_left_alone(opened, folder, monkeypatch):
    """Oracle: sockets, none of which may be opened; the flags of `datasets` are put back."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def refuse(*_, **__):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert harness(opened("gpt2"), ["sums"], [0], folder=folder)
    far = YAML.format(name="far", test="x").replace("dataset_path: json", "dataset_path: nobody/has-this")
    (folder / "far.yaml").write_text(far)
    with pytest.raises(
        UsageError, match=r"cannot load far: .*missing data are only downloaded with --download"
    ):
        harness(opened("gpt2"), ["far"], [0], folder=folder)
    assert datasets.config.HF_HUB_OFFLINE is False


def test_what_cannot_be_asked_is_said_in_a_line(opened, folder, tmp_path, monkeypatch):
    """Oracle: the words."""
    model = opened("gpt2")
    from lm_eval.tasks import TaskManager

    few = TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(module, "_all_tasks", lambda place: few)  # to read all of lm-eval's takes a minute
    (tmp_path / "cache").mkdir()
    for call, says in (
        ({"tasks": ["sum"], "folder": folder}, r"lm-eval knows no task sum: did you mean sums\?"),
        ({"tasks": ["qqq"], "folder": folder}, "lm-eval knows no task qqq: `lm-eval ls tasks` lists"),
        ({"tasks": ["sums"], "folder": tmp_path / "none"}, "there is no folder .*none"),
        ({"tasks": [], "folder": None}, "no task given"),
        ({"tasks": [], "folder": tmp_path / "cache"}, "holds no task of lm-eval"),
        ({"tasks": ["sums"], "folder": folder, "batch": 0}, "batch is 0: use 1 or more"),
        ({"tasks": ["sums"], "folder": folder, "limit": 0}, "limit is 0: use 1 or more"),
    ):
        with pytest.raises(UsageError, match=says):
            harness(model, shots=[0], **call)
    (folder / "sums.yaml").write_text(YAML.format(name="sums", test="sums.jsonl") + "num_fewshot: 0\n")
    with pytest.raises(UsageError, match="sums is a task without examples in its prompt"):
        harness(model, ["sums"], [2], folder=folder)
    with pytest.raises(UsageError, match="sees later tokens too"):
        harness(opened("bert"), ["sums"], [0], folder=folder)
