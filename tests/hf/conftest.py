"""The attentions that the tests ask for by name."""

from __future__ import annotations

import pytest

import skyformer.hf

ALL_LANDMARKS = 400
"""More than queries and keys together in any test, so that the approximation is exact."""


@pytest.fixture(autouse=True, scope="session")
def _registered() -> None:
    skyformer.hf.register()
    skyformer.hf.register("few", num_landmarks=8)
    skyformer.hf.register("all-of-softmax", kernel="softmax", num_landmarks=ALL_LANDMARKS)
    skyformer.hf.register("exact-softmax", attention="kernelized", kernel="softmax")
