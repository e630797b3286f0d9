"""What tokens are called. Oracle: the text that was typed."""

from __future__ import annotations

import pytest
import torch

from theodolite import open_model
from theodolite.models.token_texts import token_texts


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("a 😀ש", ["a", " ", "😀₁", "😀₂", "😀₃", "😀₄", "ש₁", "ש₂"]),
        ("日", ["日₁", "日₂", "日₃"]),
        ("is it", ["is", " it"]),
    ],
)
def test_parts_of_a_character_have_its_name(typed, shown):
    model = open_model()
    assert token_texts(model, torch.tensor(model.tokenizer(typed)["input_ids"])) == shown


def test_what_is_no_character_is_shown_as_the_vocabulary_has_it():
    model = open_model()
    half = torch.tensor(model.tokenizer("😀")["input_ids"])[:2]
    assert token_texts(model, half) == model.tokenizer.convert_ids_to_tokens(half.tolist())
