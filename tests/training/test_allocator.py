"""Memory that is kept: a process that frees and takes large tensors again does not fault its pages in again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from skyformer.training.allocator import keep_freed_memory

ROUNDS = """
import resource, sys
import torch
from skyformer.training.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(10):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that ten tensors of 64 MB make the system clear, once ten others have come and gone."""
    done = subprocess.run([sys.executable, "-c", ROUNDS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep what is freed")
def test_large_tensors_find_their_old_pages() -> None:
    assert 10 * faults("keep") < faults("leave")


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
