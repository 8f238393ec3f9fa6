"""Shared fixtures: a fixed seed for every test, the folder of reference data, and bfloat16 that works everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from skyformer.processes import ISA_VARIABLE, ISA_WITHOUT_AMX, half_precision_crashes

# Suites are inherited by design, so one property test runs under several classes.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
)
settings.load_profile("default")


# Triton reads this when it is imported. `make test-gpu` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# The tensors of the tests are small, so a second thread would cost more than it saves.
torch.set_num_threads(1)


def pytest_configure() -> None:
    """Exclude AMX where using it kills the process; torch reads the variable at its first matrix product."""
    if half_precision_crashes("bfloat16"):
        os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX


def pytest_report_header() -> str | None:
    allowed = os.environ.get(ISA_VARIABLE)
    if allowed is None:
        return None
    return f"{ISA_VARIABLE}={allowed} (the tests set it where AMX is advertised but using it kills the process)"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    # A command that ran in this process may have changed it, and results are bit-identical only for equal numbers.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def references() -> Path:
    """The folder of reference data; tests that need it are skipped without it."""
    folder = os.environ.get("SKYFORMER_TEST_REFERENCES")
    if not folder:
        pytest.skip("SKYFORMER_TEST_REFERENCES is not set: there is no reference data to compare with")
    return Path(folder)
