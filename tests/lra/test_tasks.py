"""The specifications of the five tasks."""

from __future__ import annotations

import pytest

from skyformer.errors import UnknownNameError
from skyformer.lra.tasks import TASKS, Split, round_up, task_spec


@pytest.mark.parametrize(
    ("name", "classes", "vocabulary", "length", "paired", "sizes"),
    [
        ("listops", 10, 16, 2000, False, [96_000, 2_000, 2_000]),
        ("text", 2, 257, 4000, False, [22_500, 2_500, 25_000]),
        ("retrieval", 2, 257, 4000, True, [147_086, 18_090, 17_437]),
        ("pathfinder", 2, 257, 1024, False, [160_000, 20_000, 20_000]),
        ("image", 10, 257, 1024, False, [45_000, 5_000, 10_000]),
    ],
)
def test_specifications(name: str, classes: int, vocabulary: int, length: int, paired: bool, sizes: list[int]) -> None:
    spec = task_spec(name)
    assert (spec.name, spec.num_classes, spec.vocab_size) == (name, classes, vocabulary)
    assert (spec.max_length, spec.paired, spec.padding_id) == (length, paired, 0)
    assert [spec.sizes[split] for split in Split] == sizes


def test_order_and_unknown_names() -> None:
    assert list(TASKS) == ["listops", "text", "retrieval", "pathfinder", "image"]
    with pytest.raises(UnknownNameError, match="Did you mean 'listops'"):
        task_spec("lstops")


def test_rounding_up_to_multiples_of_64() -> None:
    assert [round_up(length) for length in (0, 1, 64, 65, 2000)] == [64, 64, 64, 128, 2048]
    assert task_spec("text").padded_length == 4032
