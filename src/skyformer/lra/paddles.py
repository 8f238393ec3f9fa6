"""Paddles, the short strokes that Pathfinder's snakes consist of: a table of all of them, and the steps between them.

Coordinates are (row, column), and angles turn from the column axis to the row axis. A snake's next paddle ends on one
of the pixels of a small circle, so it has one of a few directions; only a snake's first paddle can point in the
direction of any whole degree. So all paddles fit in one table, and a snake is grown by looking them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SIDE = 32
PADDLE_LENGTH = 2
PADDLE_THICKNESS = 0.5
PADDLE_MARGIN = 1
MARKER_RADIUS = 1.5
CONTINUITY = 1.0
OVERSAMPLING = 2
STAMP_RADIUS = PADDLE_LENGTH + 1 + PADDLE_MARGIN
STAMP_SIDE = 2 * STAMP_RADIUS + 1
# The canvas has a margin that is wide enough for any stamp or step, so that nothing needs clipping.
MARGIN = 10
DEGREES = np.arange(-180, 180)


def landing(coordinate: int | Integers, displacement: float | Floats) -> Integers:
    """Where a step along one axis leads, rounded up as the original does.

    The sum is rounded, not the step: sin(pi) is not exactly zero, so near the top and left border, where floating-point
    numbers are closer together, a step that should stay in its row ends one row further down, as in LRA's images.
    """
    sums: Floats = coordinate + np.asarray(displacement)
    return np.ceil(sums).astype(np.int64)


def turned_back(angles: Floats) -> Floats:
    """The opposite directions, within (-pi, pi]."""
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def disc(radius: int) -> Integers:
    """The offsets (row, column) of all pixels within `radius`."""
    grid = np.stack(np.meshgrid(*[np.arange(-radius, radius + 1)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    within: Integers = grid[(grid**2).sum(axis=1) <= radius**2]
    return within


def _circle(radius: int) -> Integers:
    """The pixels of a circle, visited in steps of about one pixel, each once."""
    degrees = np.arange(0, 360, 360 / (2 * np.pi * radius))
    around = SIDE + radius * np.stack([np.sin(np.radians(degrees)), np.cos(np.radians(degrees))], axis=-1)
    return np.unique(around.astype(np.int64) - SIDE, axis=0)


def _draw_line(angle: float) -> npt.NDArray[np.uint8]:
    """A stroke from the centre outwards, at twice the final size."""
    side, centre = 2 * STAMP_RADIUS * OVERSAMPLING + 1, STAMP_RADIUS * OVERSAMPLING
    row = landing(centre, PADDLE_LENGTH * OVERSAMPLING * np.sin(angle))
    column = landing(centre, PADDLE_LENGTH * OVERSAMPLING * np.cos(angle))
    canvas = Image.new("L", (side, side))
    width = round(PADDLE_THICKNESS * OVERSAMPLING)
    ImageDraw.Draw(canvas).line([(centre, centre), (int(column), int(row))], fill=255, width=width)
    return np.asarray(canvas)


def _dilate(image: npt.NDArray[np.uint8], radius: int) -> npt.NDArray[np.uint8]:
    padded = np.pad(image, radius)
    side = len(image)
    shifted = [
        padded[radius + row : radius + row + side, radius + column : radius + column + side]
        for row, column in disc(radius)
    ]
    dilated: npt.NDArray[np.uint8] = np.max(shifted, axis=0)
    return dilated


def _shrink(image: npt.NDArray[np.uint8], side: int) -> Floats:
    """The image reduced to `side` pixels, with values from 0 to 1."""
    small = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(small, np.float64) / 255


class Moves:
    """Where a step of a fixed length leads from any pixel, in each of many directions."""

    def __init__(self, angles: Floats, distance: float) -> None:
        coordinates = np.arange(-MARGIN, SIDE + MARGIN)
        # Steps are looked up one at a time, and plain integers are faster than arrays for that.
        self._rows = landing(coordinates, distance * np.sin(angles)[:, None]).tolist()
        self._columns = landing(coordinates, distance * np.cos(angles)[:, None]).tolist()

    def __call__(self, direction: int, row: int, column: int) -> tuple[int, int]:
        return self._rows[direction][row + MARGIN], self._columns[direction][column + MARGIN]


@dataclass(frozen=True)
class PaddleTable:
    """All paddles by number: first the seeds, one per degree, then the growths, one per pixel of the circle.

    Attributes:
        stroke: what each paddle paints, centred on its start.
        territory: the pixels that each paddle keeps free of others, centred on its start.
        advance: the step from a paddle's pivot to the pivot of the next paddle.
        preference: entry [i, j] says how well growth j continues paddle i.
        reach: the offsets from a pivot to the ends of the growths.
        onward: the step from a seed's tail to its head.
        back: the step from a seed's head to its pivot.
    """

    stroke: Floats
    territory: Floats
    advance: Moves
    preference: Floats
    reach: list[tuple[int, int]]
    onward: Moves
    back: Moves


@lru_cache(maxsize=1)
def paddle_table() -> PaddleTable:
    """The table, computed at the first call."""
    reach = _circle(PADDLE_LENGTH + PADDLE_MARGIN)
    seed_angles, growth_angles = DEGREES * np.pi / 180, np.arctan2(reach[:, 0], reach[:, 1])
    angles = np.concatenate([seed_angles, growth_angles])
    # A seed is drawn from its tail to its head, a growth from its head to its tail.
    lines = [_draw_line(angle) for angle in (*seed_angles, *turned_back(growth_angles))]
    territories = [_dilate(line, PADDLE_MARGIN * OVERSAMPLING) for line in lines]
    return PaddleTable(
        stroke=np.stack([_shrink(line, STAMP_SIDE) for line in lines]),
        territory=np.stack([_in_single_precision(_shrink(image, STAMP_SIDE)) for image in territories]),
        advance=Moves(angles, PADDLE_LENGTH + 2 * PADDLE_MARGIN),
        preference=_preference(angles, growth_angles),
        reach=[(down, right) for down, right in reach.tolist()],
        onward=Moves(seed_angles, PADDLE_LENGTH),
        back=Moves(turned_back(seed_angles), PADDLE_LENGTH + PADDLE_MARGIN),
    )


def _in_single_precision(values: Floats) -> Floats:
    """Rounded to float32 like the original's territories, which decides ties at the collision threshold."""
    return values.astype(np.float32).astype(np.float64)


def _preference(angles: Floats, growth_angles: Floats) -> Floats:
    difference = np.abs(growth_angles[None, :] - angles[:, None])
    bend = np.minimum(difference, 2 * np.pi - difference)
    squared: Floats = np.maximum(np.cos(np.minimum(CONTINUITY * bend, np.pi / 2)), 0) ** 2
    return squared


@lru_cache(maxsize=SIDE * SIDE)
def marker(row: int, column: int) -> Floats:
    """An image with only the dot that marks a snake's end."""
    rows, columns = np.ogrid[: SIDE * OVERSAMPLING, : SIDE * OVERSAMPLING]
    distance_squared = (rows - row * OVERSAMPLING) ** 2 + (columns - column * OVERSAMPLING) ** 2
    inside = distance_squared <= (MARKER_RADIUS * OVERSAMPLING) ** 2
    return _shrink(np.where(inside, 255, 0).astype(np.uint8), SIDE)
