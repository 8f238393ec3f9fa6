"""Pathfinder: drawings look like LRA's and their labels are true; LRA's folders are read, and never by unpickling."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from skyformer.errors import DataError
from skyformer.lra import pathfinder
from skyformer.lra.examples import Examples
from skyformer.lra.paddles import DEGREES, SIDE, STAMP_RADIUS, STAMP_SIDE, marker, paddle_table
from skyformer.lra.pathfinder import TARGET_CONTRAST, Drawing, Level, Paddle, draw, read
from skyformer.lra.tasks import Split
from tests.helpers import refused

REFERENCE_MEAN_PIXEL = 20.3
REFERENCE_BRIGHT_PIXELS = 142
REFERENCE_DISTRACTORS = 1.25
# The standard error of that mean: there are only 200 reference images.
REFERENCE_DISTRACTORS_ERROR = 0.075


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    return [draw(np.random.default_rng([11, number])) for number in range(200)]


@pytest.fixture(scope="module")
def reference_images(references: Path) -> Examples:
    ((_, examples),) = read(references / "data/pathfinder32_ref200", Level.HARD)
    return examples


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


def test_constants_describe_the_references(reference_images: Examples) -> None:
    assert len(reference_images) == 200
    assert reference_images.labels.mean() == pytest.approx(0.515)
    images = reference_images.tokens.values.reshape(-1, 32, 32)
    assert images.mean() == pytest.approx(REFERENCE_MEAN_PIXEL, rel=0.01)
    assert bright_pixels(images) == pytest.approx(REFERENCE_BRIGHT_PIXELS, rel=0.01)


def is_drawn(drawing: Drawing, paddle: Paddle) -> bool:
    """Whether the brightest pixels of a paddle's stroke are lit in the image."""
    lit = np.pad(drawing.pixels, 4)[paddle.row : paddle.row + 9, paddle.column : paddle.column + 9] > 40
    stroke = paddle_table().stroke[paddle.number]
    return bool(lit[stroke == stroke.max()].all())


def test_label_by_following_the_drawn_path(drawings: list[Drawing]) -> None:
    """From one dot along the paddles, each near the last and in the image, to the snake's other end."""
    for drawing in drawings:
        start, goal = drawing.markers
        (path,) = (snake for snake in drawing.snakes if snake[0][:2] == start)
        assert all(is_drawn(drawing, paddle) for paddle in path)
        gaps = [np.hypot(a.row - b.row, a.column - b.column) for a, b in pairwise(path)]
        assert max(gaps) < 8
        assert (path[-1][:2] == goal) == bool(drawing.label)


Pixels = npt.NDArray[np.uint8]
Place = tuple[int, int]
_ROUNDING = 1.5
_CLEAR_SHARE = 0.3


def find_dots(image: Pixels) -> tuple[Place, Place, float]:
    """The places of the two dots, and their brightness as a pixel value."""
    scores = {
        (row, column): _dot_brightness(image, row, column)
        for row in range(1, SIDE - 1)
        for column in range(1, SIDE - 1)
    }
    first, second = sorted(scores, key=lambda place: -scores[place])[:2]
    return first, second, min(scores[first], scores[second])


def _dot_brightness(image: Pixels, row: int, column: int) -> float:
    template = marker(row, column)
    clear = template > _CLEAR_SHARE
    return float((image[clear] / template[clear]).min())


def are_connected(image: Pixels, contour_length: int) -> bool:
    """Whether a snake of that many paddles leads from one dot to the other."""
    first, second, brightness = find_dots(image)
    follower = _Follower(image, brightness, contour_length)
    return follower.leads(first, second) or follower.leads(second, first)


class _Follower:
    """Searches for a chain of visible paddles, without the label or the list of paddles that were drawn."""

    def __init__(self, image: Pixels, brightness: float, contour_length: int) -> None:
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


def assert_labels_follow_from_pixels(images: np.ndarray, labels: np.ndarray) -> None:
    """Every connected pair is found in the pixels alone, and hardly ever one that is not connected."""
    found = np.array([are_connected(image, 14) for image in images])
    assert found[labels == 1].all()
    assert found[labels == 0].mean() < 0.1


def test_label_by_following_pixels_alone(drawings: list[Drawing]) -> None:
    some = drawings[:120]
    assert_labels_follow_from_pixels(
        np.stack([drawing.pixels for drawing in some]), np.array([drawing.label for drawing in some])
    )


def test_following_pixels_confirms_the_references(reference_images: Examples) -> None:
    images = reference_images.tokens.values.reshape(-1, 32, 32)
    assert_labels_follow_from_pixels(images, reference_images.labels)


def test_dots_are_where_the_drawing_says(drawings: list[Drawing]) -> None:
    for drawing in drawings[:20]:
        assert {*find_dots(drawing.pixels)[:2]} == {*drawing.markers}


@pytest.mark.parametrize("level", list(Level))
def test_levels(level: Level) -> None:
    drawing = draw(np.random.default_rng(1), level)
    assert [len(snake) for snake in drawing.snakes] == [level.contour_length] * 2
    assert all(len(snake) == level.contour_length // 3 for snake in drawing.distractors)
    assert len(drawing.distractors) <= 20 // (level.contour_length // 3)


def test_a_killed_worker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathfinder, "_draw_chunk", die)
    with refused(DataError, "was killed", "--workers"):
        list(pathfinder.generate(dict.fromkeys(Split, 1), 0, Level.EASY, workers=2))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_paddle_table() -> None:
    table = paddle_table()
    assert len(table.stroke) == len(DEGREES) + len(table.reach)
    assert (table.territory >= table.stroke - 0.02).all()
    straight_on = table.preference[DEGREES.tolist().index(0)]
    assert straight_on.argmax() == table.reach.index((0, 2))
    left, up = (DEGREES.tolist().index(angle) for angle in (-180, -90))
    assert (table.advance(left, 20, 20), table.advance(up, 20, 20)) == ((20, 16), (16, 20))
    # At column 2 the sum with cos(-pi / 2), which is not quite zero, is the first to be rounded up.
    assert table.advance(up, 20, 2) == (16, 3)


LINES = [f"imgs/0 sample_{number}.png {number} {number % 2} 1.0 14" for number in range(4)]


def write_images(root: Path, metadata: str | bytes | np.ndarray, size: int = 32) -> Path:
    """Four images, and metadata as text or as a NumPy array."""
    (root / "imgs/0").mkdir(parents=True)
    (root / "metadata").mkdir()
    for number in range(4):
        Image.fromarray(np.full((size, size), number, np.uint8)).save(root / f"imgs/0/sample_{number}.png")
    if isinstance(metadata, np.ndarray):
        np.save(root / "metadata/0.npy", metadata, allow_pickle=True)
    else:
        (root / "metadata/0.npy").write_bytes(metadata if isinstance(metadata, bytes) else metadata.encode())
    return root


def labels_of(root: Path) -> list[int]:
    return [label for _, examples in read(root, Level.HARD) for label in examples.labels.tolist()]


def test_text_metadata_as_in_the_release(tmp_path: Path) -> None:
    ((_, examples),) = read(write_images(tmp_path, "\n".join(LINES)), Level.HARD)
    assert examples.labels.tolist() == [0, 1, 0, 1]
    assert [int(row[0]) for row in examples.tokens.rows()] == [0, 1, 2, 3]
    assert examples.sources[3] == "imgs/0/sample_3.png"
    # LRA leaves empty images out.
    (tmp_path / "imgs/0/sample_1.png").write_bytes(b"")
    assert labels_of(tmp_path) == [0, 0, 1]


def test_array_metadata_in_a_level_folder_is_taken_by_number(tmp_path: Path) -> None:
    rows = np.array([line.split() for line in LINES])
    root = write_images(tmp_path / "pathfinder32" / Level.HARD.folder, rows[:1])
    np.save(root / "metadata" / "10.npy", rows[2:3])
    np.save(root / "metadata" / "2.npy", rows[1:2])
    assert labels_of(tmp_path) == [0, 1, 0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (b"../../etc passwd 0 1", "leads outside"),
        (b"/etc passwd 0 1", "leads outside"),
        (b"imgs/0 sample_0.png 0 7", "label"),
        (b"imgs/0 sample_9.png 0 1", "sample_9.png is missing"),
        (b"imgs/0", "expected folder, file"),
        (b"\xff\xfe\x00", "neither a NumPy array nor text"),
        (b"\x93NUMPY\x01\x00garbage", "cannot be read as an array"),
        (np.array([["imgs/0", None]], dtype=object), r"0\.npy .*Pickled arrays are refused"),
        (np.zeros((2, 2)), "must contain rows of text; got float64"),
    ],
)
def test_bad_metadata(tmp_path: Path, metadata: bytes | np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        labels_of(write_images(tmp_path, metadata))


def test_a_wrong_shape_is_found_before_memory_is_allocated(tmp_path: Path) -> None:
    path = write_images(tmp_path, np.array([line.split() for line in LINES])) / "metadata" / "0.npy"
    path.write_bytes(path.read_bytes().replace(b"(4, 6), }" + b" " * 9, b"(400000000000, 6)}"))
    with pytest.raises(DataError, match=r"0\.npy"):
        labels_of(tmp_path)


def test_bad_images(tmp_path: Path) -> None:
    write_images(tmp_path, "\n".join(LINES), size=33)
    with pytest.raises(DataError, match="must be 32 x 32 pixels; got 33 x 33"):
        labels_of(tmp_path)
    (tmp_path / "imgs/0/sample_0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"sample_0\.png cannot be read"):
        labels_of(tmp_path)
    # A header of 50,000 x 50,000 pixels, for which Pillow raises an error that is neither an OSError nor a ValueError.
    header = (50_000).to_bytes(4) * 2 + bytes([8, 0, 0, 0, 0])
    chunk = b"IHDR" + header
    png = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)
    (tmp_path / "imgs/0/sample_0.png").write_bytes(png)
    with pytest.raises(DataError, match=r"sample_0\.png cannot be read"):
        labels_of(tmp_path)


def test_not_a_folder_or_without_metadata(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        labels_of(tmp_path / "missing")
    with pytest.raises(DataError, match="no metadata"):
        labels_of(tmp_path)
