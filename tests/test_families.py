"""The table of families: a tenth of it is measured anew in every full run, another tenth each day."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import transformers

from tools import measured_families, small_models
from tools.measured_families import Measured, measure_all

FACTS, TABLE = measured_families.read()


@pytest.mark.slow
def test_a_tenth_of_the_families_is_what_the_table_says():
    """Oracle: each family's own eager attention and hidden states, and what was committed."""
    if FACTS["versions"]["transformers"] != transformers.__version__:
        pytest.skip(f"measured with transformers {FACTS['versions']['transformers']}")
    committed = {family.name: family for family in TABLE}
    assert [family.name for family in TABLE if family.outcome == "crashed"] == []
    for measured in measure_all(measured_families.tenth(date.today())):
        assert _without_errors(measured) == _without_errors(committed[measured.name])


def _without_errors(measured: Measured) -> Measured:
    """Rounding is another one on another machine."""
    return replace(measured, why=re.sub(r"\d\.\de[+-]\d\d", "…", measured.why))


def test_every_family_is_in_the_table():
    assert [family.name for family in TABLE] == [case.name for case in small_models.cases()]


def test_other_attention_and_other_streams_are_found(tmp_path):
    """Of one head, and of one position: a comparison that cannot fail would say that all is well."""
    case = next(case for case in small_models.cases() if case.name == "llama")
    small_models.build(case).save_pretrained(tmp_path)
    ids = measured_families.random_ids(tmp_path)
    streams, attention = measured_families.eager(tmp_path, ids)
    assert measured_families.surveyed(tmp_path, ids, streams, attention)["outcome"] == "surveyed"
    uniform = [weights.copy() for weights in attention]
    uniform[1][:, 2] = np.tri(ids.shape[1]) / np.arange(1, ids.shape[1] + 1)[:, None]
    off = measured_families.surveyed(tmp_path, ids, streams, uniform)
    assert off["outcome"] == "crashed"
    assert "entropy" in off["why"]
    louder = [*streams[:2], streams[2] * 1.01, *streams[3:]]
    assert "norm" in measured_families.surveyed(tmp_path, ids, louder, attention)["why"]
