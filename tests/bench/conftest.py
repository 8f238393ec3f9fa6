"""Lets a benchmark measure memory without starting a process for every contender and length."""

from __future__ import annotations

import pytest

from skyformer.bench import study
from skyformer.bench.contenders import Setting
from skyformer.bench.fresh import measure_here
from skyformer.bench.measure import Fresh


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fresh process would do is done in this one; that it is a process has tests of its own."""

    def measure(name: str, setting: Setting, threads: int) -> Fresh:
        return measure_here(name, setting)

    monkeypatch.setattr(study, "measure_fresh", measure)
