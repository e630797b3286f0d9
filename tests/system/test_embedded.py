"""Oracles: the model that is opened where none is named; its heads scored with `transformers` alone."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import theodolite
from theodolite.corpus.spec import python_topics
from theodolite.models import open_streamed
from theodolite.system import embedded


def test_the_embedded_model_has_one_name():
    assert theodolite.open_model().id == open_streamed().id == embedded.NAME
    assert (embedded.FOLDER / "model.safetensors").is_file()


def test_it_has_what_the_papers_describe():
    """Induction, a previous-token head, two heads with a first-token sink in half of the contexts, later sinks."""
    model = AutoModelForCausalLM.from_pretrained(embedded.FOLDER, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(embedded.FOLDER)
    read = [tokenizer(topic.text)["input_ids"] for topic in python_topics()]
    text = torch.tensor([ids[:128] for ids in read if len(ids) >= 128][:32])
    random = torch.randint(1, 2048, (4, 127), generator=torch.Generator().manual_seed(0))
    twice = torch.cat([torch.zeros(4, 1, dtype=torch.int64), random, random], dim=1)

    def attention(ids):
        with torch.no_grad():
            return torch.stack(model(input_ids=ids, output_attentions=True).attentions)

    induction = torch.diagonal(attention(twice), -126, -2, -1)[..., -127:].mean((1, 3))
    assert induction.max() > 0.4
    weights = attention(text)
    assert torch.diagonal(weights, -1, -2, -1).mean((1, 3)).max() > 0.5
    # A key is a sink of a context where the queries that see it, 16 or more, pay it 0.3 on average.
    received = weights.sum(-2) / torch.arange(128, 0, -1)
    sinks = (received > 0.3)[..., :-16]
    assert (sinks[..., 0].float().mean(1) >= 0.5).sum() >= 2
    assert sinks[..., 1:].any(-1).float().mean(1).max() > 0.5
