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
Offsets = npt.NDArray[np.int64]
# Single steps are taken one at a time, where plain integers are faster than arrays.
Steps = list[tuple[int, int]]

SIDE = 32
PADDLE_LENGTH = 2
PADDLE_THICKNESS = 0.5
PADDLE_MARGIN = 1
MARKER_RADIUS = 1.5
CONTINUITY = 1.0
OVERSAMPLING = 2
STAMP_RADIUS = PADDLE_LENGTH + 1 + PADDLE_MARGIN
STAMP_SIDE = 2 * STAMP_RADIUS + 1
DEGREES = np.arange(-180, 180)


def step(angles: Floats, distance: float) -> Offsets:
    """How far `distance` along each angle moves a pixel, rounded up as the original does."""
    # The original rounds the sum of pixel and step, which swallows errors of 1e-16; adding SIDE does the
    # same.
    moved = SIDE + distance * np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return np.ceil(moved).astype(np.int64) - SIDE


def turned_back(angles: Floats) -> Floats:
    """The opposite directions, within (-pi, pi]."""
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def disc(radius: int) -> Offsets:
    """The offsets of the pixels within `radius`."""
    grid = np.stack(np.meshgrid(*[np.arange(-radius, radius + 1)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    within: Offsets = grid[(grid**2).sum(axis=1) <= radius**2]
    return within


def _circle(radius: int) -> Offsets:
    """The pixels met when going round a circle in steps of about one pixel, each once."""
    degrees = np.arange(0, 360, 360 / (2 * np.pi * radius))
    around = SIDE + radius * np.stack([np.sin(np.radians(degrees)), np.cos(np.radians(degrees))], axis=-1)
    return np.unique(around.astype(np.int64) - SIDE, axis=0)


def _draw_line(angle: float) -> npt.NDArray[np.uint8]:
    """One stroke from the centre outwards, at twice the final size."""
    side, centre = 2 * STAMP_RADIUS * OVERSAMPLING + 1, STAMP_RADIUS * OVERSAMPLING
    row, column = centre + step(np.array(angle), PADDLE_LENGTH * OVERSAMPLING)
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


@dataclass(frozen=True)
class PaddleTable:
    """Every paddle by number: first the seeds, one a degree, then the growths, one a pixel of the circle.

    `stroke` and `territory` are what a paddle paints and what it keeps others out of, centred on its start.
    `advance` leads from a paddle's pivot to the next one's. `preference[i, j]` is how well growth j
    continues paddle i.
    """

    stroke: Floats
    territory: Floats
    advance: Steps
    preference: Floats
    reach: Steps
    seed_head: Steps
    seed_pivot: Steps


@lru_cache(maxsize=1)
def paddle_table() -> PaddleTable:
    """The table, drawn on first use."""
    reach = _circle(PADDLE_LENGTH + PADDLE_MARGIN)
    seed_angles, growth_angles = np.radians(DEGREES), np.arctan2(reach[:, 0], reach[:, 1])
    angles = np.concatenate([seed_angles, growth_angles])
    # A seed is drawn from its tail onwards, a growth from its head backwards.
    lines = [_draw_line(angle) for angle in (*seed_angles, *turned_back(growth_angles))]
    territories = [_dilate(line, PADDLE_MARGIN * OVERSAMPLING) for line in lines]
    head = step(seed_angles, PADDLE_LENGTH)
    return PaddleTable(
        stroke=np.stack([_shrink(line, STAMP_SIDE) for line in lines]),
        territory=np.stack([_in_single_precision(_shrink(image, STAMP_SIDE)) for image in territories]),
        advance=_as_steps(step(angles, PADDLE_LENGTH + 2 * PADDLE_MARGIN)),
        preference=_preference(angles, growth_angles),
        reach=_as_steps(reach),
        seed_head=_as_steps(head),
        seed_pivot=_as_steps(head + step(turned_back(seed_angles), PADDLE_LENGTH + PADDLE_MARGIN)),
    )


def _in_single_precision(values: Floats) -> Floats:
    """Rounded as the original keeps territories, which decides ties at the bound of a collision."""
    return values.astype(np.float32).astype(np.float64)


def _as_steps(offsets: Offsets) -> Steps:
    return [(row, column) for row, column in offsets.tolist()]


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
