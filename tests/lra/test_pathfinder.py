"""Pathfinder: the drawings look like LRA's, and their labels are true."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from skyformer.lra import pathfinder_files
from skyformer.lra.paddles import DEGREES, marker, paddle_table
from skyformer.lra.pathfinder import Drawing, Level, Paddle, draw

from .path_follower import are_connected, find_dots

REFERENCE_MEAN_PIXEL = 20.3
REFERENCE_BRIGHT_PIXELS = 142
REFERENCE_DISTRACTORS = 1.25
# The references are 200 images, so that their own mean is known to within this only.
REFERENCE_DISTRACTORS_ERROR = 0.075


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    return [draw(np.random.default_rng([11, number])) for number in range(250)]


def bright_pixels(images: np.ndarray) -> float:
    return float((images > 40).sum(axis=(1, 2)).mean())


def test_statistics_are_the_references(drawings: list[Drawing]) -> None:
    images = np.stack([drawing.pixels for drawing in drawings])
    assert images.mean() == pytest.approx(REFERENCE_MEAN_PIXEL, rel=0.05)
    assert bright_pixels(images) == pytest.approx(REFERENCE_BRIGHT_PIXELS, rel=0.05)
    assert (images.max(axis=(1, 2)) == 255).all()
    assert (images.min(axis=(1, 2)) == 0).all()


@pytest.mark.slow
def test_distractors_and_balance_over_many_drawings() -> None:
    many = [draw(np.random.default_rng([12, number])) for number in range(10_000)]
    distractors = np.mean([len(drawing.distractors) for drawing in many])
    assert distractors == pytest.approx(REFERENCE_DISTRACTORS, abs=2 * REFERENCE_DISTRACTORS_ERROR)
    # Four standard errors of a fair coin; over a whole task this is well under one per cent.
    assert np.mean([drawing.label for drawing in many]) == pytest.approx(0.5, abs=0.02)


def test_constants_describe_the_references(references: Path) -> None:
    examples = next(pathfinder_files.read(references / "data/pathfinder32_ref200", Level.HARD))
    images = examples.tokens.values.reshape(-1, 32, 32)
    assert images.mean() == pytest.approx(REFERENCE_MEAN_PIXEL, rel=0.01)
    assert bright_pixels(images) == pytest.approx(REFERENCE_BRIGHT_PIXELS, rel=0.01)


def is_drawn(drawing: Drawing, paddle: Paddle) -> bool:
    """Whether the brightest pixels of a paddle's stroke are lit in the image."""
    lit = np.pad(drawing.pixels, 4)[paddle.row : paddle.row + 9, paddle.column : paddle.column + 9] > 40
    stroke = paddle_table().stroke[paddle.number]
    return bool(lit[stroke == stroke.max()].all())


def test_label_by_following_the_drawn_path(drawings: list[Drawing]) -> None:
    """From one dot along the paddles, each near the last and in the image, to the snake's other end."""
    for drawing in drawings[:200]:
        start, goal = drawing.markers
        (path,) = (snake for snake in drawing.snakes if snake[0][:2] == start)
        assert all(is_drawn(drawing, paddle) for paddle in path)
        gaps = [np.hypot(a.row - b.row, a.column - b.column) for a, b in pairwise(path)]
        assert max(gaps) < 8
        assert (path[-1][:2] == goal) == bool(drawing.label)


def test_label_by_following_pixels_alone(drawings: list[Drawing]) -> None:
    """Without any record: every connected pair is found, and hardly ever one that is not."""
    found = np.array([are_connected(drawing.pixels, 14) for drawing in drawings[:200]])
    labels = np.array([drawing.label == 1 for drawing in drawings[:200]])
    assert found[labels].all()
    assert found[~labels].mean() < 0.1


def test_following_pixels_confirms_the_references(references: Path) -> None:
    examples = next(pathfinder_files.read(references / "data/pathfinder32_ref200", Level.HARD))
    images = examples.tokens.values.reshape(-1, 32, 32)
    found = np.array([are_connected(image, 14) for image in images])
    assert found[examples.labels == 1].all()
    assert found[examples.labels == 0].mean() < 0.1


def test_dots_are_where_the_drawing_says(drawings: list[Drawing]) -> None:
    for drawing in drawings[:50]:
        assert {*find_dots(drawing.pixels)[:2]} == {*drawing.markers}


@pytest.mark.parametrize("level", list(Level))
def test_levels(level: Level) -> None:
    drawing = draw(np.random.default_rng(1), level)
    assert [len(snake) for snake in drawing.snakes] == [level.contour_length] * 2
    assert all(len(snake) == level.contour_length // 3 for snake in drawing.distractors)
    assert len(drawing.distractors) <= 20 // (level.contour_length // 3)


def test_drawing_is_a_pure_function_of_its_generator() -> None:
    first, second, other = (draw(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(first.pixels, second.pixels)
    assert not np.array_equal(first.pixels, other.pixels)


def test_paddle_table() -> None:
    table = paddle_table()
    assert len(table.stroke) == len(DEGREES) + len(table.reach)
    assert (table.territory >= table.stroke - 0.02).all()
    straight_on = table.preference[DEGREES.tolist().index(0)]
    assert straight_on.argmax() == table.reach.index((0, 2))


def test_steps_round_up_the_sum() -> None:
    left = DEGREES.tolist().index(-180)
    assert paddle_table().advance(left, 20, 20) == (20, 16)
    up = DEGREES.tolist().index(-90)
    assert paddle_table().advance(up, 20, 20) == (16, 20)
    # At column 2 the sum with cos(-pi / 2), which is not quite zero, is the first to exceed 2.
    assert paddle_table().advance(up, 20, 2) == (16, 3)


def test_marker_is_a_dot() -> None:
    dot = marker(10, 20)
    assert dot[10, 20] > 0.9
    assert dot[10, 16] < 0.1
