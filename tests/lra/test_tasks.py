"""The table of tasks says what the tasks are."""

from __future__ import annotations

import pytest

from skyformer.errors import UnknownNameError
from skyformer.lra.tasks import TASKS, Split, round_up, task_spec


def test_five_tasks() -> None:
    assert list(TASKS) == ["listops", "text", "retrieval", "pathfinder", "image"]


@pytest.mark.parametrize(
    ("name", "classes", "vocabulary", "length", "paired"),
    [
        ("listops", 10, 16, 2000, False),
        ("text", 2, 257, 4000, False),
        ("retrieval", 2, 257, 4000, True),
        ("pathfinder", 2, 257, 1024, False),
        ("image", 10, 257, 1024, False),
    ],
)
def test_specifications(name: str, classes: int, vocabulary: int, length: int, paired: bool) -> None:
    spec = task_spec(name)
    assert (spec.num_classes, spec.vocab_size, spec.max_length, spec.paired) == (
        classes,
        vocabulary,
        length,
        paired,
    )
    assert spec.padding_id == 0
    assert len(spec.label_names) == classes


def test_sizes() -> None:
    assert [TASKS["listops"].sizes[split] for split in Split] == [96_000, 2_000, 2_000]
    assert [TASKS["pathfinder"].sizes[split] for split in Split] == [160_000, 20_000, 20_000]
    assert [TASKS["image"].sizes[split] for split in Split] == [45_000, 5_000, 10_000]


def test_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'listops'"):
        task_spec("lstops")


@pytest.mark.parametrize(("length", "rounded"), [(0, 64), (1, 64), (64, 64), (65, 128), (2000, 2048)])
def test_round_up(length: int, rounded: int) -> None:
    assert round_up(length) == rounded


def test_padded_length_of_text() -> None:
    assert task_spec("text").padded_length == 4032
