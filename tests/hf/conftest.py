"""The attentions that the tests use by name."""

from __future__ import annotations

import pytest

import skyformer.hf
from tests.hf.families import LENGTH

ALL_LANDMARKS = 400
"""More than queries and keys together in any test, so that the approximation is exact."""


@pytest.fixture(autouse=True, scope="session")
def _registered() -> None:
    skyformer.hf.register()
    skyformer.hf.register("few", num_landmarks=8)
    skyformer.hf.register("few-of-softmax", kernel="softmax", num_landmarks=8)
    skyformer.hf.register("few-tilted", attention="tilted", num_blocks=2, num_exact=2, num_cells=2)
    # All queries but not all rows of [Q; K], so that the approximation runs instead of the exact computation.
    skyformer.hf.register("every-query", kernel="softmax", num_landmarks=LENGTH + 5, gamma=1e-6)
    skyformer.hf.register("all-of-softmax", kernel="softmax", num_landmarks=ALL_LANDMARKS)
    skyformer.hf.register("exact-softmax", attention="kernelized", kernel="softmax")
