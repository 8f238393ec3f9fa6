"""Errors say what they said wherever they are read, also in another process."""

from __future__ import annotations

import pickle

import pytest

from skyformer.errors import InputError, InterruptedRunError, MissingExtraError, SkyformerError, UnknownNameError


@pytest.mark.parametrize(
    "error",
    [
        InputError("x must be 1; got 2"),
        UnknownNameError("kernel", "gausian", ["gaussian"]),
        InterruptedRunError("stopped", 15),
        MissingExtraError("ray", "ray"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_between_processes(error: SkyformerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.exit_code == error.exit_code
