"""Finds a Pathfinder snake in the pixels alone, from the table of paddles.

It gets neither the label nor the list of paddles that were drawn. It finds the two dots, then searches for a chain of
paddles from one to the other that are all visible in the image.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from skyformer.lra.paddles import DEGREES, SIDE, STAMP_RADIUS, STAMP_SIDE, marker, paddle_table
from skyformer.lra.pathfinder import TARGET_CONTRAST

Image = npt.NDArray[np.uint8]
Place = tuple[int, int]
_ROUNDING = 1.5
_CLEAR_SHARE = 0.3


def find_dots(image: Image) -> tuple[Place, Place, float]:
    """The places of the two dots, and their brightness as a pixel value."""
    scores = {
        (row, column): _dot_brightness(image, row, column)
        for row in range(1, SIDE - 1)
        for column in range(1, SIDE - 1)
    }
    first, second = sorted(scores, key=lambda place: -scores[place])[:2]
    return first, second, min(scores[first], scores[second])


def _dot_brightness(image: Image, row: int, column: int) -> float:
    template = marker(row, column)
    clear = template > _CLEAR_SHARE
    return float((image[clear] / template[clear]).min())


def are_connected(image: Image, contour_length: int) -> bool:
    """Whether a snake of that many paddles leads from one dot to the other."""
    first, second, brightness = find_dots(image)
    follower = _Follower(image, brightness, contour_length)
    return follower.leads(first, second) or follower.leads(second, first)


class _Follower:
    def __init__(self, image: Image, brightness: float, contour_length: int) -> None:
        self.table = paddle_table()
        self.length = contour_length
        self.padded = np.pad(image.astype(float), 2 * STAMP_RADIUS, constant_values=255)
        self.needed = self.table.stroke * TARGET_CONTRAST * brightness - _ROUNDING

    def leads(self, origin: Place, tip: Place) -> bool:
        """Breadth-first search over the ends of all chains from the origin, one paddle at a time."""
        ends = {
            (self.table.back(number, *self.table.onward(number, *origin)), number, origin)
            for number in range(len(DEGREES))
            if self._is_drawn(origin, number)
        }
        for _ in range(self.length - 1):
            ends = {grown for pivot, number, _ in ends for grown in self._continued(pivot, number)}
        return any(end == tip for _, _, end in ends)

    def _continued(self, pivot: Place, number: int) -> Iterator[tuple[Place, int, Place]]:
        new_pivot = self.table.advance(number, *pivot)
        for choice, (reach_down, reach_right) in enumerate(self.table.reach):
            end = new_pivot[0] + reach_down, new_pivot[1] + reach_right
            likely = self.table.preference[number, choice] > 1e-9
            if likely and self._is_drawn(end, len(DEGREES) + choice):
                yield new_pivot, len(DEGREES) + choice, end

    def _is_drawn(self, start: Place, number: int) -> bool:
        if not (0 <= start[0] < SIDE and 0 <= start[1] < SIDE):
            return False
        top, left = start[0] + STAMP_RADIUS, start[1] + STAMP_RADIUS
        window = self.padded[top : top + STAMP_SIDE, left : left + STAMP_SIDE]
        return bool((window >= self.needed[number]).all())
