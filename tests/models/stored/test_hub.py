"""Names of the hub, as its own client keeps them on disk: HF_HOME, revisions, and no network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

NAME = "some-lab/tiny"

# Where a hub's cache lies is read when its client is imported, so that this needs a process of its own.
SCRIPT = """
import json, sys
from theodolite.errors import TheodoliteError
from theodolite.models import open_model, open_streamed
from theodolite.passes.survey import spectra

NAME, said = "some-lab/tiny", {}
for revision in (None, "v2", sys.argv[1], "absent", "elsewhere"):
    try:
        model = open_model(NAME, device="cpu", revision=revision)
        weights = open_streamed(NAME, revision=revision, say=sys.exit)
        rows = spectra(weights).heads
        assert rows.equals(spectra(model).heads)
        said[str(revision)] = [model.id, model.revision, weights.revision, rows.frobenius_squared.sum()]
    except TheodoliteError as error:
        said[str(revision)] = str(error)
try:
    open_model("some-lab/other")
except TheodoliteError as error:
    said["other"] = str(error)
print(json.dumps(said))
"""


def _published(checkpoint: Path, cache: Path, branch: str) -> str:
    """Add a checkpoint to the cache as a commit: its files by their content, and links to them by their names."""
    commit = hashlib.sha1(branch.encode()).hexdigest()
    repository = cache / "hub" / ("models--" + NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    for path in checkpoint.iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return commit


@pytest.fixture(scope="module")
def said(tmp_path_factory, checkpoint):
    """What the script prints where the cache holds two commits, and the commits."""
    cache = tmp_path_factory.mktemp("cache")
    shards = tmp_path_factory.mktemp("shards")
    AutoModelForCausalLM.from_pretrained(checkpoint("qwen3")).save_pretrained(shards, max_shard_size="30KB")
    commits = [_published(checkpoint("llama3"), cache, "main"), _published(shards, cache, "v2")]
    index = shards / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "../model-00001-of"))
    _published(shards, cache, "elsewhere")
    apart = os.environ | {"HF_HOME": str(cache), "TRANSFORMERS_OFFLINE": "1"}
    apart.pop("HF_HUB_CACHE", None)
    apart.pop("HF_HUB_OFFLINE")  # the older of the two names counts, too
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, commits[1]], env=apart, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), commits


def test_names_and_revisions_come_from_the_cache_without_a_network(said):
    found, (main, second) = said
    assert found["None"][:3] == [NAME, main, main]
    assert found["v2"][:3] == [NAME, second, second]
    assert found["None"][3] != found["v2"][3]
    assert found[second][:3] == [NAME, second, second]


@pytest.mark.parametrize(
    ("asked", "named"),
    [("absent", NAME), ("other", "some-lab/other"), ("elsewhere", "names '../model-00001-of")],
)
def test_what_is_not_there_or_lies_elsewhere_is_one_line(said, asked, named):
    message = said[0][asked]
    assert named in message
    assert len(message.splitlines()) == 1
