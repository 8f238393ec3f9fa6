"""One world of four processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()
