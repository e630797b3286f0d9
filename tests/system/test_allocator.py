"""Memory that is kept; oracle: the page faults that the system counts for a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from theodolite.system.allocator import keep_pages

if sys.argv[1] == "kept":
    keep_pages()
import numpy as np

for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(8 << 20)  # 64 MB, which glibc asks the system for each time
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    given_back, kept = faults("given back"), faults("kept")
    assert given_back > 20  # 32 if pages are huge
    assert kept <= given_back / 5
