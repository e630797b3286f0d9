"""Oracle: Theorem 4.1, and the rate that was derived."""

from __future__ import annotations

import numpy as np
import pytest

from tests.report.drawn import drawn, finite
from theodolite.system.wording import for_plotly
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.catch_tag_release import averaging
from theodolite_papers.catch_tag_release.averaging import BELOW
from theodolite_papers.experiment import Study, of_nothing


def test_figure_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the theorem holds, the rate is the derived one, and attention falls by e a unit of s_tag."""
    monkeypatch.setattr(averaging, "SEQUENCES", 100)
    outcome = Study(of_nothing()).outcome(EXPERIMENTS["sinks/figure6"])
    assert not outcome.verdicts  # it says nothing of any model
    errors = outcome.tables["errors"].query("s_tag == 30")
    np.testing.assert_allclose(errors["median"], errors["derived_median"], rtol=1e-2)
    rest = outcome.tables["attention"].set_index("s_tag")["rest"]
    assert np.log(rest[20.0] / rest[30.0]) == pytest.approx(10, rel=1e-3)
    figures = {exhibit.key: exhibit.figure for exhibit in outcome.exhibits}
    for picture in figures["attention"].data:
        np.testing.assert_allclose(np.nansum(picture.z, axis=1), 1, rtol=1e-5)
    last = np.asarray(figures["attention"].data[-1].z)
    assert (last[averaging.LENGTH // 2 :, averaging.LENGTH // 2] > 0.9).all()
    variants = outcome.tables["errors"].query(f"median > {BELOW}")
    for name, rows in variants.groupby("b_d"):
        shown = drawn(figures["convergence"], name=for_plotly(name))
        np.testing.assert_allclose(shown, finite(rows["median"]), rtol=1e-5)
    shown = drawn(figures["rest"], name="tokens after [SEP]")
    np.testing.assert_allclose(shown, finite(rest[rest > 0]), rtol=1e-5)
