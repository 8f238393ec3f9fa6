"""Pathfinder: two long snakes of paddles and some short ones; do the two dots sit on the ends of one snake?

Draws what the original generator draws with LRA's settings, about fifty times as fast: paddles come from a
table, and where a first paddle fits is known beforehand. Every image is a pure function of seed, level,
split and number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from skyformer.lra.examples import Symbols
from skyformer.lra.paddles import (
    DEGREES,
    MARGIN,
    PADDLE_MARGIN,
    SIDE,
    STAMP_RADIUS,
    STAMP_SIDE,
    Floats,
    Integers,
    PaddleTable,
    disc,
    marker,
    paddle_table,
)

SEED_DISTANCE = 7
BORDER = 1
TARGET_CONTRAST = 1.5
DISTRACTOR_CONTRAST = 2.0
DISTRACTOR_TRIES = 5
PLACEMENT_TRIES = 3
# A paddle may touch what is there, not cross it: the two territories may add up to this at most.
COLLISION = 1.8
DEAD_END = 1e-4
FREE = 0.3
LEAST_FREE_SHARE = 0.01
CANVAS_SIDE = SIDE + 2 * MARGIN
_INSIDE = slice(MARGIN, MARGIN + SIDE)


class Level(StrEnum):
    """How long the snakes are: LRA's three levels."""

    EASY = "easy"
    INTERMEDIATE = "intermediate"
    HARD = "hard"

    @property
    def contour_length(self) -> int:
        return {Level.EASY: 6, Level.INTERMEDIATE: 9, Level.HARD: 14}[self]

    @property
    def distractor_length(self) -> int:
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        return 20 // self.distractor_length

    @property
    def folder(self) -> str:
        """What LRA calls the level's folder."""
        names = {
            Level.EASY: "curv_baseline",
            Level.INTERMEDIATE: "curv_contour_length_9",
            Level.HARD: "curv_contour_length_14",
        }
        return names[self]


class Paddle(NamedTuple):
    """One paddle of the table, drawn from (row, column) of the image."""

    row: int
    column: int
    number: int


@dataclass(frozen=True)
class Drawing:
    """A finished image and all that went into it."""

    pixels: Symbols
    label: int
    snakes: tuple[tuple[Paddle, ...], tuple[Paddle, ...]]
    distractors: tuple[tuple[Paddle, ...], ...]
    markers: tuple[tuple[int, int], tuple[int, int]]


class _Snake:
    """A snake while it grows: its paddles, and the pivot its last paddle turned about."""

    def __init__(self, seed: Paddle, pivot: tuple[int, int]) -> None:
        self.paddles = [seed]
        self.pivot = pivot

    @property
    def last(self) -> Paddle:
        return self.paddles[-1]

    @property
    def origin(self) -> tuple[int, int]:
        return self.paddles[0].row, self.paddles[0].column

    @property
    def tip(self) -> tuple[int, int]:
        return self.last.row, self.last.column


def _window(paddle: Paddle) -> tuple[slice, slice]:
    """Where a paddle's stamp lies on the canvas."""
    top, left = paddle.row + MARGIN - STAMP_RADIUS, paddle.column + MARGIN - STAMP_RADIUS
    return slice(top, top + STAMP_SIDE), slice(left, left + STAMP_SIDE)


@lru_cache(maxsize=1)
def _reach_and_neighbours() -> Integers:
    """Steps on the flat canvas from a pivot to the end of each growth, and to the pixels around that."""
    return _flat_steps(np.array(paddle_table().reach))[:, None] + _flat_steps(disc(PADDLE_MARGIN))


def _flat_steps(offsets: Integers) -> Integers:
    return offsets[:, 0] * CANVAS_SIDE + offsets[:, 1]


class _Territory:
    """Which pixels are taken, 0 to 1, and the growing of snakes in what is left."""

    def __init__(self, taken: Floats) -> None:
        self.taken = taken
        self.table = paddle_table()
        self._reach = _reach_and_neighbours()

    @classmethod
    def empty(cls) -> _Territory:
        """Everything free, except a border of one pixel and the margin of the canvas."""
        taken = np.ones((CANVAS_SIDE, CANVAS_SIDE))
        taken[MARGIN + BORDER : -MARGIN - BORDER, MARGIN + BORDER : -MARGIN - BORDER] = 0
        return cls(taken)

    def copy(self) -> _Territory:
        return _Territory(self.taken.copy())

    def claim(self, paddle: Paddle) -> None:
        window = self.taken[_window(paddle)]
        np.maximum(window, self.table.territory[paddle.number], out=window)

    def collides(self, paddle: Paddle) -> bool:
        overlap = self.taken[_window(paddle)] + self.table.territory[paddle.number]
        return bool(overlap.max() >= COLLISION)

    def grow(self, snake: _Snake, rng: np.random.Generator) -> bool:
        """Add one paddle to a snake, unless it is stuck."""
        row, column = self.table.advance(snake.last.number, *snake.pivot)
        chances = self._weights(row, column, snake.last).cumsum()
        total = float(chances[-1])
        if total < DEAD_END:
            return False
        for _ in range(PLACEMENT_TRIES):
            choice = int(chances.searchsorted(rng.random() * total, side="right"))
            down, right = self.table.reach[choice]
            paddle = Paddle(row + down, column + right, len(DEGREES) + choice)
            if not self.collides(paddle):
                # A snake's own last paddle is always in its way, so it is claimed one paddle late.
                self.claim(snake.last)
                snake.paddles.append(paddle)
                snake.pivot = (row, column)
                return True
        return False

    def _weights(self, row: int, column: int, last: Paddle) -> Floats:
        """How likely each growth about the pivot is: straight on is best, taken pixels are out."""
        pivot = (row + MARGIN) * CANVAS_SIDE + column + MARGIN
        taken = self.taken.reshape(-1).take(pivot + self._reach).max(axis=1)
        weights: Floats = (1 - taken) * self.table.preference[last.number]
        return weights

    def free_seeds(self, number: int) -> Integers:
        """Flat image pixels where the seed paddle `number` fits."""
        rows, columns = np.divmod(np.arange(SIDE * SIDE), SIDE)
        pixels = (rows + MARGIN) * CANVAS_SIDE + columns + MARGIN
        needed = pixels[:, None] + _flat_steps(_footprint(number))
        return np.flatnonzero(self.taken.reshape(-1).take(needed).max(axis=1) <= FREE)

    @property
    def free_share(self) -> float:
        return float((self.taken[_INSIDE, _INSIDE] <= FREE).mean())


@lru_cache(maxsize=len(DEGREES))
def _footprint(number: int) -> Integers:
    """The pixels that must be free for a seed, as steps from its start."""
    # The original centres this kernel one pixel off the paddle's start, down and to the right.
    kernel = paddle_table().territory[number][:-2, :-2]
    return np.argwhere(kernel >= 1) - STAMP_RADIUS + 1


@lru_cache(maxsize=len(DEGREES))
def _can_seed(number: int) -> bool:
    """Whether a snake can start in this direction at all.

    The original looks for free pixels by dilating what is taken with the footprint, which leaves a pixel
    undefined when its whole footprint lies outside the image; it then gives up. Eleven directions in twelve
    have such pixels.
    """
    reached = np.arange(SIDE)[:, None, None] + _footprint(number).T
    rows_inside, columns_inside = ((reached >= 0) & (reached < SIDE)).swapaxes(0, 1)
    return bool((rows_inside[:, None] & columns_inside[None, :]).any(axis=-1).all())


@lru_cache(maxsize=1)
def _central_seeds() -> tuple[tuple[int, Integers], ...]:
    """Every seed that fits in the middle of an empty image, with the pixels where it does."""
    taken = np.ones((CANVAS_SIDE, CANVAS_SIDE))
    centre = slice(MARGIN + 2 * SEED_DISTANCE, MARGIN + SIDE - 2 * SEED_DISTANCE)
    taken[centre, centre] = 0
    territory = _Territory(taken)
    fits = ((number, territory.free_seeds(number)) for number in range(len(DEGREES)) if _can_seed(number))
    return tuple((number, places) for number, places in fits if len(places))


def _in_image(row: int, column: int) -> bool:
    return 0 <= row < SIDE and 0 <= column < SIDE


def _seed(row: int, column: int, number: int, table: PaddleTable) -> _Snake | None:
    """A snake of one paddle, unless its head or pivot would lie outside the image."""
    head = table.onward(number, row, column)
    pivot = table.back(number, *head)
    if not _in_image(*head) or not _in_image(*pivot):
        return None
    return _Snake(Paddle(row, column, number), pivot)


def _first_seed(rng: np.random.Generator, table: PaddleTable) -> _Snake | None:
    seeds = _central_seeds()
    number, places = seeds[rng.integers(len(seeds))]
    row, column = divmod(int(places[rng.integers(len(places))]), SIDE)
    return _seed(row, column, number, table)


def _second_seed(first: _Snake, rng: np.random.Generator, table: PaddleTable) -> _Snake | None:
    """A seed at a fixed distance from the first, in any direction."""
    for _ in range(PLACEMENT_TRIES):
        angle = np.radians(rng.integers(0, 360))
        row = round(first.origin[0] + SEED_DISTANCE * np.sin(angle))
        column = round(first.origin[1] + SEED_DISTANCE * np.cos(angle))
        snake = _seed(row, column, int(rng.integers(len(DEGREES))), table)
        if snake is not None:
            return snake
    return None


def _try_two_snakes(length: int, rng: np.random.Generator) -> tuple[_Snake, _Snake, _Territory] | None:
    territory = _Territory.empty()
    first = _first_seed(rng, territory.table)
    second = _second_seed(first, rng, territory.table) if first else None
    if first is None or second is None:
        return None
    for _ in range(length - 1):
        if not (territory.grow(first, rng) and territory.grow(second, rng)):
            return None
    # As in the original, the first snake's last paddle stays unclaimed: a distractor may touch its end.
    territory.claim(second.last)
    return first, second, territory


def _try_distractor(length: int, territory: _Territory, rng: np.random.Generator) -> tuple[_Snake, _Territory] | None:
    territory = territory.copy()
    snake = _free_seed(territory, rng)
    if snake is None:
        return None
    for _ in range(length - 1):
        if not territory.grow(snake, rng):
            return None
    territory.claim(snake.last)
    return snake, territory


def _free_seed(territory: _Territory, rng: np.random.Generator) -> _Snake | None:
    for _ in range(PLACEMENT_TRIES):
        number = int(rng.integers(len(DEGREES)))
        if not _can_seed(number) or territory.free_share < LEAST_FREE_SHARE:
            return None
        places = territory.free_seeds(number)
        if not len(places):
            return None
        row, column = divmod(int(places[rng.integers(len(places))]), SIDE)
        snake = _seed(row, column, number, territory.table)
        if snake is not None:
            return snake
    return None


def _distractors(level: Level, territory: _Territory, rng: np.random.Generator) -> list[_Snake]:
    placed = []
    for _ in range(level.num_distractors):
        for _ in range(DISTRACTOR_TRIES):
            result = _try_distractor(level.distractor_length, territory, rng)
            if result is not None:
                snake, territory = result
                placed.append(snake)
                break
    return placed


def _paint(canvas: Floats, snake: _Snake, contrast: float) -> None:
    for paddle in snake.paddles:
        window = canvas[_window(paddle)]
        np.maximum(window, contrast * paddle_table().stroke[paddle.number], out=window)


def _to_pixels(image: Floats) -> Symbols:
    """Darkest to brightest as 0 to 255."""
    low, high = image.min(), image.max()
    scaled: Floats = (image - low) * (255 / (high - low))
    return np.floor(scaled + 0.5).astype(np.uint8)


def draw_label(rng: np.random.Generator) -> int:
    """A fair coin, and the first thing drawn of an image."""
    return int(rng.integers(2))


def image_generator(seed: int, split_number: int, number: int) -> np.random.Generator:
    """The random numbers of one image of a set."""
    return np.random.default_rng([seed, split_number, number])


def draw(rng: np.random.Generator, level: Level = Level.HARD) -> Drawing:
    """One image."""
    label = draw_label(rng)
    attempt = None
    while attempt is None:
        attempt = _try_two_snakes(level.contour_length, rng)
    first, second, territory = attempt
    distractors = _distractors(level, territory, rng)
    start, other = (first, second) if rng.integers(2) else (second, first)
    markers = start.origin, (start if label else other).tip
    return Drawing(
        pixels=_compose(first, second, distractors, markers),
        label=label,
        snakes=(tuple(first.paddles), tuple(second.paddles)),
        distractors=tuple(tuple(snake.paddles) for snake in distractors),
        markers=markers,
    )


def _compose(
    first: _Snake, second: _Snake, distractors: Sequence[_Snake], markers: Sequence[tuple[int, int]]
) -> Symbols:
    canvas = np.zeros((CANVAS_SIDE, CANVAS_SIDE))
    for snake in (first, second):
        _paint(canvas, snake, TARGET_CONTRAST)
    for snake in distractors:
        _paint(canvas, snake, DISTRACTOR_CONTRAST)
    return _to_pixels(np.max([canvas[_INSIDE, _INSIDE], *(marker(*place) for place in markers)], axis=0))
