"""Shared fixtures: a fixed seed for every test, and the reference outputs when they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Suites are inherited by design, so one property test runs under several classes.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
)
settings.load_profile("default")


# The tensors of the tests are small: a second thread would only be waited for.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def references() -> Path:
    """The folder of reference material; tests that need it skip when it is missing."""
    folder = os.environ.get("SKYFORMER_TEST_REFERENCES")
    if not folder:
        pytest.skip("SKYFORMER_TEST_REFERENCES is not set: no reference outputs to compare with")
    return Path(folder)
