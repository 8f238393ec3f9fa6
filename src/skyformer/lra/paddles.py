"""The strokes Pathfinder is drawn with: every paddle that can occur, drawn once, and the steps between them.

Coordinates are (row, column) and angles turn from the column axis to the row axis. A snake's next paddle
ends on one of the pixels of a small circle, so its direction is one of a handful; only a snake's first
paddle can point along any whole degree. So all paddles fit in one table, and growing a snake is a matter of
looking things up.
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
# The canvas has a margin wide enough for any stamp or step, so that nothing needs clipping.
MARGIN = 10
DEGREES = np.arange(-180, 180)


def landing(coordinate: int | Integers, displacement: float | Floats) -> Integers:
    """Where a step along one axis leads, rounded up as the original does.

    The sum is rounded, not the step: sin(pi) is not quite zero, so that near the top and left border, where
    floating point is finer, a step that should stay in its row ends one further down. LRA's images show it.
    """
    sums: Floats = coordinate + np.asarray(displacement)
    return np.ceil(sums).astype(np.int64)


def turned_back(angles: Floats) -> Floats:
    """The opposite directions, within (-pi, pi]."""
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def disc(radius: int) -> Integers:
    """The offsets of the pixels within `radius`."""
    grid = np.stack(np.meshgrid(*[np.arange(-radius, radius + 1)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    within: Integers = grid[(grid**2).sum(axis=1) <= radius**2]
    return within


def _circle(radius: int) -> Integers:
    """The pixels met when going round a circle in steps of about one pixel, each once."""
    degrees = np.arange(0, 360, 360 / (2 * np.pi * radius))
    around = SIDE + radius * np.stack([np.sin(np.radians(degrees)), np.cos(np.radians(degrees))], axis=-1)
    return np.unique(around.astype(np.int64) - SIDE, axis=0)


def _draw_line(angle: float) -> npt.NDArray[np.uint8]:
    """One stroke from the centre outwards, at twice the final size."""
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
    """Down to `side` pixels, values in 0 to 1."""
    small = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(small, np.float64) / 255


class Moves:
    """Where a step of one length leads, in each of many directions and from any place."""

    def __init__(self, angles: Floats, distance: float) -> None:
        coordinates = np.arange(-MARGIN, SIDE + MARGIN)
        # Steps are taken one at a time, where plain integers are faster than arrays.
        self._rows = landing(coordinates, distance * np.sin(angles)[:, None]).tolist()
        self._columns = landing(coordinates, distance * np.cos(angles)[:, None]).tolist()

    def __call__(self, direction: int, row: int, column: int) -> tuple[int, int]:
        return self._rows[direction][row + MARGIN], self._columns[direction][column + MARGIN]


@dataclass(frozen=True)
class PaddleTable:
    """Every paddle by number: first the seeds, one a degree, then the growths, one a pixel of the circle.

    `stroke` and `territory` are what a paddle paints and what it keeps others out of, centred on its start.
    `advance` leads from a paddle's pivot to the next one's, `reach` from a pivot to the ends of its
    growths, and `preference[i, j]` is how well growth j continues paddle i. A seed's head lies `onward`
    from its tail, its pivot `back` from its head.
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
    """The table, drawn on first use."""
    reach = _circle(PADDLE_LENGTH + PADDLE_MARGIN)
    seed_angles, growth_angles = DEGREES * np.pi / 180, np.arctan2(reach[:, 0], reach[:, 1])
    angles = np.concatenate([seed_angles, growth_angles])
    # A seed is drawn from its tail onwards, a growth from its head backwards.
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
    """Rounded as the original keeps territories, which decides ties at the bound of a collision."""
    return values.astype(np.float32).astype(np.float64)


def _preference(angles: Floats, growth_angles: Floats) -> Floats:
    difference = np.abs(growth_angles[None, :] - angles[:, None])
    bend = np.minimum(difference, 2 * np.pi - difference)
    squared: Floats = np.maximum(np.cos(np.minimum(CONTINUITY * bend, np.pi / 2)), 0) ** 2
    return squared


@lru_cache(maxsize=SIDE * SIDE)
def marker(row: int, column: int) -> Floats:
    """The dot that marks a snake's end, alone on a whole image."""
    rows, columns = np.ogrid[: SIDE * OVERSAMPLING, : SIDE * OVERSAMPLING]
    distance_squared = (rows - row * OVERSAMPLING) ** 2 + (columns - column * OVERSAMPLING) ** 2
    inside = distance_squared <= (MARKER_RADIUS * OVERSAMPLING) ** 2
    return _shrink(np.where(inside, 255, 0).astype(np.uint8), SIDE)
