"""Peak memory of fresh processes: doubling the length doubles it, for every attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyformer.attention import list_attentions
from skyformer.bench.contenders import Setting
from skyformer.bench.measure import measure_fresh

SHORT = Setting(length=16384, heads=2, head_dim=16, landmarks=64)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_attentions())
def test_peak_memory_is_linear_in_length(name: str) -> None:
    short = measure_fresh(name, SHORT, threads=2)
    long = measure_fresh(name, replace(SHORT, length=2 * SHORT.length), threads=2)
    # Page granularity and library buffers allow a little more than twice.
    assert long.added_bytes < 2.4 * max(short.added_bytes, short.input_bytes)
