"""The table of families: of those that the tests are about, each is measured anew."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import transformers

from tests.conftest import FAMILIES
from tools import measured_families, small_models
from tools.measured_families import Measured, measure

FACTS, TABLE = measured_families.read()
CASES = {case.name: case for case in small_models.cases()}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(CASES.keys() & (FAMILIES | {"llama"})))
def test_a_family_is_what_the_table_says(family, tmp_path):
    """Oracle: its own eager attention and hidden states, and what was committed."""
    if FACTS["versions"]["transformers"] != transformers.__version__:
        pytest.skip(f"measured with transformers {FACTS['versions']['transformers']}")
    (committed,) = (row for row in TABLE if row.name == family)
    assert _without_errors(measure(CASES[family], tmp_path)) == _without_errors(committed)


def _without_errors(measured: Measured) -> Measured:
    """Rounding is another one on another machine."""
    return replace(measured, why=re.sub(r"\d\.\de[+-]\d\d", "…", measured.why))


def test_every_family_is_in_the_table_and_none_crashed():
    assert [family.name for family in TABLE] == list(CASES)
    assert [family.name for family in TABLE if family.outcome == "crashed"] == []


def test_other_attention_and_other_streams_are_found(tmp_path):
    """Of one head, and of one position: a comparison that cannot fail would say that all is well."""
    small_models.build(CASES["llama"]).save_pretrained(tmp_path)
    ids = measured_families.random_ids(tmp_path)
    streams, attention = measured_families.eager(tmp_path, ids)
    uniform = [weights.copy() for weights in attention]
    uniform[1][:, 2] = np.tri(ids.shape[1]) / np.arange(1, ids.shape[1] + 1)[:, None]
    louder = [*streams[:2], streams[2] * 1.01, *streams[3:]]
    for given, column in (((streams, uniform), "entropy"), ((louder, attention), "norm")):
        off = measured_families.surveyed(tmp_path, ids, *given)
        assert off["outcome"] == "crashed"
        assert column in off["why"]
