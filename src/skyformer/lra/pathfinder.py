"""Pathfinder: two long snakes of paddles and some short ones; are the two dots at the ends of the same snake?

Images are drawn like those of the original generator with LRA's settings, about fifty times as fast: paddles come
from a table, and where a first paddle fits is computed in advance. Every image is a pure function of seed, level, split
and number. LRA's own images can be read instead: PNG files in folders, with metadata files that contain the labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from skyformer.errors import DataError
from skyformer.lra.archives import check_file, leads_outside
from skyformer.lra.examples import Batches, Examples, Integers, Row, Symbols, in_batches
from skyformer.lra.image import load_image
from skyformer.lra.paddles import (
    DEGREES,
    MARGIN,
    PADDLE_MARGIN,
    SIDE,
    STAMP_RADIUS,
    STAMP_SIDE,
    Floats,
    disc,
    marker,
    paddle_table,
)
from skyformer.lra.tasks import Split
from skyformer.processes import end_with_parent

IMAGES_PER_CHUNK = 100
"""Images that a worker process draws at a time."""
SEED_DISTANCE = 7
BORDER = 1
TARGET_CONTRAST = 1.5
DISTRACTOR_CONTRAST = 2.0
DISTRACTOR_TRIES = 5
PLACEMENT_TRIES = 3
COLLISION = 1.8
"""A paddle may touch others but not cross them: the sum of the two territories must be below this at every pixel."""
DEAD_END = 1e-4
FREE = 0.3
LEAST_FREE_SHARE = 0.01
CANVAS_SIDE = SIDE + 2 * MARGIN
_INSIDE = slice(MARGIN, MARGIN + SIDE)
_NPY_MAGIC = b"\x93NUMPY"
_LARGEST_METADATA, _LARGEST_IMAGE = 2**28, 2**20
_LABELS = {"0": 0, "1": 1}


class Level(StrEnum):
    """LRA's three levels of difficulty: the length of the snakes."""

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
        """The name of the level's folder in LRA's release."""
        names = {
            Level.EASY: "curv_baseline",
            Level.INTERMEDIATE: "curv_contour_length_9",
            Level.HARD: "curv_contour_length_14",
        }
        return names[self]


class Paddle(NamedTuple):
    """A paddle of the table (`number`) that starts at (row, column) of the image and turns about `pivot`."""

    row: int
    column: int
    number: int
    pivot: tuple[int, int]

    @property
    def place(self) -> tuple[int, int]:
        return self.row, self.column


@dataclass(frozen=True)
class Drawing:
    """An image, its label, and everything that is drawn in it."""

    pixels: Symbols
    label: int
    snakes: tuple[list[Paddle], list[Paddle]]
    distractors: list[list[Paddle]]
    markers: tuple[tuple[int, int], tuple[int, int]]


def _window(paddle: Paddle) -> tuple[slice, slice]:
    """The part of the canvas that a paddle's stamp covers."""
    top, left = paddle.row + MARGIN - STAMP_RADIUS, paddle.column + MARGIN - STAMP_RADIUS
    return slice(top, top + STAMP_SIDE), slice(left, left + STAMP_SIDE)


@lru_cache(maxsize=1)
def _reach_and_neighbours() -> Integers:
    """Offsets on the flattened canvas from a pivot to the end of each growth and to the pixels around it."""
    return _flat_steps(np.array(paddle_table().reach))[:, None] + _flat_steps(disc(PADDLE_MARGIN))


def _flat_steps(offsets: Integers) -> Integers:
    return offsets[:, 0] * CANVAS_SIDE + offsets[:, 1]


class _Territory:
    """How much of each pixel is taken, from 0 to 1; snakes grow in what is free."""

    def __init__(self, taken: Floats) -> None:
        self.taken = taken

    @classmethod
    def empty(cls) -> _Territory:
        """Everything is free, except for a border of one pixel and the margin of the canvas."""
        taken = np.ones((CANVAS_SIDE, CANVAS_SIDE))
        taken[MARGIN + BORDER : -MARGIN - BORDER, MARGIN + BORDER : -MARGIN - BORDER] = 0
        return cls(taken)

    def copy(self) -> _Territory:
        return _Territory(self.taken.copy())

    def claim(self, paddle: Paddle) -> None:
        window = self.taken[_window(paddle)]
        np.maximum(window, paddle_table().territory[paddle.number], out=window)

    def collides(self, paddle: Paddle) -> bool:
        overlap = self.taken[_window(paddle)] + paddle_table().territory[paddle.number]
        return bool(overlap.max() >= COLLISION)

    def grow(self, snake: list[Paddle], rng: np.random.Generator) -> bool:
        """Add one paddle to a snake; returns False if none fits."""
        last, table = snake[-1], paddle_table()
        row, column = table.advance(last.number, *last.pivot)
        chances = self._weights(row, column, last).cumsum()
        total = float(chances[-1])
        if total < DEAD_END:
            return False
        for _ in range(PLACEMENT_TRIES):
            choice = int(chances.searchsorted(rng.random() * total, side="right"))
            down, right = table.reach[choice]
            paddle = Paddle(row + down, column + right, len(DEGREES) + choice, pivot=(row, column))
            if not self.collides(paddle):
                # A new paddle always overlaps the one before it, so each is claimed only after its successor is placed.
                self.claim(last)
                snake.append(paddle)
                return True
        return False

    def _weights(self, row: int, column: int, last: Paddle) -> Floats:
        """The weight of each growth about the pivot: highest straight ahead, zero where pixels are taken."""
        pivot = (row + MARGIN) * CANVAS_SIDE + column + MARGIN
        taken = self.taken.reshape(-1).take(pivot + _reach_and_neighbours()).max(axis=1)
        weights: Floats = (1 - taken) * paddle_table().preference[last.number]
        return weights

    def free_seeds(self, number: int) -> Integers:
        """Pixels of the flattened image where the seed paddle `number` fits."""
        rows, columns = np.divmod(np.arange(SIDE * SIDE), SIDE)
        pixels = (rows + MARGIN) * CANVAS_SIDE + columns + MARGIN
        needed = pixels[:, None] + _flat_steps(_footprint(number))
        return np.flatnonzero(self.taken.reshape(-1).take(needed).max(axis=1) <= FREE)

    @property
    def free_share(self) -> float:
        return float((self.taken[_INSIDE, _INSIDE] <= FREE).mean())


@lru_cache(maxsize=len(DEGREES))
def _footprint(number: int) -> Integers:
    """The pixels that must be free for a seed, as offsets from its start."""
    # The original places the centre of this kernel one pixel below and to the right of the paddle's start.
    kernel = paddle_table().territory[number][:-2, :-2]
    return np.argwhere(kernel >= 1) - STAMP_RADIUS + 1


@lru_cache(maxsize=len(DEGREES))
def _can_seed(number: int) -> bool:
    """Whether a snake can start in this direction at all.

    The original finds free pixels by dilating the taken ones with the footprint. A pixel whose whole footprint lies
    outside the image is then undefined, and the original gives up. Eleven of twelve directions have such pixels.
    """
    reached = np.arange(SIDE)[:, None, None] + _footprint(number).T
    rows_inside, columns_inside = ((reached >= 0) & (reached < SIDE)).swapaxes(0, 1)
    return bool((rows_inside[:, None] & columns_inside[None, :]).any(axis=-1).all())


@lru_cache(maxsize=1)
def _central_seeds() -> tuple[tuple[int, Integers], ...]:
    """Every seed that fits in the middle of an empty image, with the pixels where it fits."""
    taken = np.ones((CANVAS_SIDE, CANVAS_SIDE))
    centre = slice(MARGIN + 2 * SEED_DISTANCE, MARGIN + SIDE - 2 * SEED_DISTANCE)
    taken[centre, centre] = 0
    territory = _Territory(taken)
    fits = ((number, territory.free_seeds(number)) for number in range(len(DEGREES)) if _can_seed(number))
    return tuple((number, places) for number, places in fits if len(places))


def _in_image(row: int, column: int) -> bool:
    return 0 <= row < SIDE and 0 <= column < SIDE


def _seed(row: int, column: int, number: int) -> list[Paddle] | None:
    """A snake of one paddle; None if its head or pivot would lie outside the image."""
    head = paddle_table().onward(number, row, column)
    pivot = paddle_table().back(number, *head)
    if not _in_image(*head) or not _in_image(*pivot):
        return None
    return [Paddle(row, column, number, pivot)]


def _seed_at_any(pixels: Integers, number: int, rng: np.random.Generator) -> list[Paddle] | None:
    row, column = divmod(int(pixels[rng.integers(len(pixels))]), SIDE)
    return _seed(row, column, number)


def _first_seed(rng: np.random.Generator) -> list[Paddle] | None:
    number, pixels = _central_seeds()[rng.integers(len(_central_seeds()))]
    return _seed_at_any(pixels, number, rng)


def _second_seed(first: list[Paddle], rng: np.random.Generator) -> list[Paddle] | None:
    """A seed at a fixed distance from the first, in a random direction."""
    for _ in range(PLACEMENT_TRIES):
        angle = np.radians(rng.integers(0, 360))
        row = round(first[0].row + SEED_DISTANCE * np.sin(angle))
        column = round(first[0].column + SEED_DISTANCE * np.cos(angle))
        snake = _seed(row, column, int(rng.integers(len(DEGREES))))
        if snake is not None:
            return snake
    return None


def _try_two_snakes(length: int, rng: np.random.Generator) -> tuple[list[Paddle], list[Paddle], _Territory] | None:
    territory = _Territory.empty()
    first = _first_seed(rng)
    second = _second_seed(first, rng) if first else None
    if first is None or second is None:
        return None
    if not all(territory.grow(first, rng) and territory.grow(second, rng) for _ in range(length - 1)):
        return None
    # As in the original, the last paddle of the first snake is not claimed: a distractor may touch it.
    territory.claim(second[-1])
    return first, second, territory


def _try_distractor(
    length: int, territory: _Territory, rng: np.random.Generator
) -> tuple[list[Paddle], _Territory] | None:
    territory = territory.copy()
    snake = _free_seed(territory, rng)
    if snake is None or not all(territory.grow(snake, rng) for _ in range(length - 1)):
        return None
    territory.claim(snake[-1])
    return snake, territory


def _free_seed(territory: _Territory, rng: np.random.Generator) -> list[Paddle] | None:
    for _ in range(PLACEMENT_TRIES):
        number = int(rng.integers(len(DEGREES)))
        if not _can_seed(number) or territory.free_share < LEAST_FREE_SHARE:
            return None
        pixels = territory.free_seeds(number)
        if not len(pixels):
            return None
        snake = _seed_at_any(pixels, number, rng)
        if snake is not None:
            return snake
    return None


def _distractors(level: Level, territory: _Territory, rng: np.random.Generator) -> list[list[Paddle]]:
    placed = []
    for _ in range(level.num_distractors):
        for _ in range(DISTRACTOR_TRIES):
            result = _try_distractor(level.distractor_length, territory, rng)
            if result is not None:
                snake, territory = result
                placed.append(snake)
                break
    return placed


def _paint(canvas: Floats, snake: list[Paddle], contrast: float) -> None:
    for paddle in snake:
        window = canvas[_window(paddle)]
        np.maximum(window, contrast * paddle_table().stroke[paddle.number], out=window)


def _to_pixels(image: Floats) -> Symbols:
    """Scaled so that the darkest pixel is 0 and the brightest 255."""
    low, high = image.min(), image.max()
    scaled: Floats = (image - low) * (255 / (high - low))
    return np.floor(scaled + 0.5).astype(np.uint8)


def draw_label(rng: np.random.Generator) -> int:
    """The label, which is the first random number of an image."""
    return int(rng.integers(2))


def image_generator(seed: int, split_number: int, number: int) -> np.random.Generator:
    """The random number generator of one image of a split."""
    return np.random.default_rng([seed, split_number, number])


def draw(rng: np.random.Generator, level: Level = Level.HARD) -> Drawing:
    """Draw one image."""
    label = draw_label(rng)
    attempt = None
    while attempt is None:
        attempt = _try_two_snakes(level.contour_length, rng)
    first, second, territory = attempt
    distractors = _distractors(level, territory, rng)
    start, other = (first, second) if rng.integers(2) else (second, first)
    markers = start[0].place, (start if label else other)[-1].place
    canvas = np.zeros((CANVAS_SIDE, CANVAS_SIDE))
    for snake in (first, second):
        _paint(canvas, snake, TARGET_CONTRAST)
    for snake in distractors:
        _paint(canvas, snake, DISTRACTOR_CONTRAST)
    pixels = _to_pixels(np.max([canvas[_INSIDE, _INSIDE], *(marker(*place) for place in markers)], axis=0))
    return Drawing(pixels, label, (first, second), distractors, markers)


def generate(sizes: Mapping[Split, int], seed: int, level: Level, workers: int) -> Batches:
    """As many images for each split as `sizes` says; the result does not depend on the number of worker processes."""
    chunks = [
        (split, start, min(start + IMAGES_PER_CHUNK, sizes[split]))
        for split in Split
        for start in range(0, sizes[split], IMAGES_PER_CHUNK)
    ]
    draw_chunk = partial(_draw_chunk, seed, level)
    if workers == 1 or len(chunks) < 2:
        yield from map(draw_chunk, chunks)
        return
    try:
        with ProcessPoolExecutor(min(workers, len(chunks)), get_context("spawn"), end_with_parent) as pool:
            yield from pool.map(draw_chunk, chunks)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker that draws Pathfinder images was killed, perhaps because the system ran out of memory; run the "
            "same command again, with fewer --workers if it happens again"
        ) from error


def _draw_chunk(seed: int, level: Level, chunk: tuple[Split, int, int]) -> tuple[Split, Examples]:
    split, start, stop = chunk
    split_number = list(Split).index(split)
    drawings = (draw(image_generator(seed, split_number, number), level) for number in range(start, stop))
    rows = [Row(drawing.pixels.reshape(-1), drawing.label, "generated") for drawing in drawings]
    return split, Examples.from_rows(rows)


def read(path: Path, level: Level) -> Batches:
    """LRA's images of a level, all as training examples, in the order of the metadata."""
    root = _level_folder(path, level)
    return in_batches(Split.TRAIN, chain.from_iterable(_read_rows(root, file) for file in _metadata_files(root)))


def _level_folder(path: Path, level: Level) -> Path:
    """The folder of the level: one of LRA's names inside `path`, or `path` itself."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; expected a folder with LRA's imgs and metadata")
    candidates = (path / level.folder, path / "pathfinder32" / level.folder)
    return next((candidate for candidate in candidates if candidate.is_dir()), path)


def _metadata_files(root: Path) -> list[Path]:
    files = sorted((root / "metadata").glob("*.npy"), key=_number) or sorted(root.glob("metadata*.npy"))
    if not files:
        raise DataError(f"{root} contains no metadata/*.npy and no metadata*.npy; expected LRA's Pathfinder folder")
    return files


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdigit() else -1, path.stem)


def _read_rows(root: Path, metadata: Path) -> Iterator[Row]:
    """The images that a metadata file lists. LRA's files are called `.npy`, but those of its release are plain text."""
    check_file(root, metadata, _LARGEST_METADATA)
    with metadata.open("rb") as file:
        is_array = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    lines = _array_lines(metadata) if is_array else _text_lines(metadata)
    for number, fields in enumerate(lines, 1):
        if len(fields) < 4 or fields[3] not in _LABELS:
            place = f"{metadata} line {number}"
            raise DataError(f"{place}: expected folder, file, number and label (0 or 1); got {' '.join(fields[:4])!r}")
        source = f"{fields[0]}/{fields[1]}"
        if leads_outside(source):
            raise DataError(f"{metadata} line {number}: the path {source!r} leads outside the folder")
        file_path = _find_image(root, fields[0], fields[1])
        # LRA's release contains a few empty files, which LRA leaves out too.
        if check_file(root, file_path, _LARGEST_IMAGE):
            pixels = np.asarray(load_image(file_path, SIDE, "PNG").convert("L"))
            yield Row(pixels.reshape(-1), _LABELS[fields[3]], source)


def _array_lines(path: Path) -> list[list[str]]:
    try:
        # Memory-mapped, so that a header with a wrong shape is an error before memory is allocated for it.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read as an array of text ({error}). Pickled arrays are refused, because loading one can "
            f"run any code; if you trust the file, convert it with np.save(path, array.astype(str))."
        ) from error
    if array.ndim != 2 or array.dtype.kind not in "US":
        raise DataError(f"{path} must contain rows of text; got {array.dtype} of shape {array.shape}")
    lines: list[list[str]] = array.astype(str).tolist()
    return lines


def _text_lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is neither a NumPy array nor text") from error


def _find_image(root: Path, folder: str, name: str) -> Path:
    """The image where the metadata says, or one folder up, as in copies of a single batch."""
    candidates = (root / folder / name, root / Path(folder).parent / name)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise DataError(f"{candidates[0]} is missing, although the metadata lists it")
