"""LRA's Pathfinder folders are read whatever their metadata's form, and never by unpickling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from skyformer.errors import DataError
from skyformer.lra import pathfinder_files
from skyformer.lra.pathfinder import Level

LINES = [f"imgs/0 sample_{number}.png {number} {number % 2} 1.0 14" for number in range(4)]


def write_images(root: Path, folder: str = "imgs/0", size: int = 32) -> Path:
    (root / folder).mkdir(parents=True)
    for number in range(4):
        Image.fromarray(np.full((size, size), number, np.uint8)).save(root / folder / f"sample_{number}.png")
    return root


def write_metadata(root: Path, content: bytes) -> None:
    (root / "metadata").mkdir(exist_ok=True)
    (root / "metadata" / "0.npy").write_bytes(content)


def labels(root: Path) -> list[int]:
    return [label for examples in pathfinder_files.read(root, Level.HARD) for label in examples.labels.tolist()]


def test_text_metadata_as_in_the_release(tmp_path: Path) -> None:
    write_metadata(write_images(tmp_path), "\n".join(LINES).encode())
    (examples,) = pathfinder_files.read(tmp_path, Level.HARD)
    assert examples.labels.tolist() == [0, 1, 0, 1]
    assert [int(row[0]) for row in examples.tokens.rows()] == [0, 1, 2, 3]
    assert examples.sources[3] == "imgs/0/sample_3.png"


def test_array_metadata(tmp_path: Path) -> None:
    (write_images(tmp_path) / "metadata").mkdir()
    np.save(tmp_path / "metadata" / "0.npy", np.array([line.split() for line in LINES]))
    assert labels(tmp_path) == [0, 1, 0, 1]


def test_level_folders_of_lra(tmp_path: Path) -> None:
    write_metadata(write_images(tmp_path / "pathfinder32" / Level.HARD.folder), "\n".join(LINES).encode())
    assert labels(tmp_path) == [0, 1, 0, 1]


def test_metadata_files_are_taken_by_number(tmp_path: Path) -> None:
    write_metadata(write_images(tmp_path), LINES[0].encode())
    (tmp_path / "metadata" / "10.npy").write_text(LINES[2])
    (tmp_path / "metadata" / "2.npy").write_text(LINES[1])
    assert labels(tmp_path) == [0, 1, 0]


def test_references(references: Path) -> None:
    (examples,) = pathfinder_files.read(references / "data/pathfinder32_ref200", Level.HARD)
    assert len(examples) == 200
    assert examples.labels.mean() == pytest.approx(0.515)


def test_pickled_metadata_is_refused(tmp_path: Path) -> None:
    (write_images(tmp_path) / "metadata").mkdir()
    np.save(tmp_path / "metadata" / "0.npy", np.array([["imgs/0", None]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"0\.npy .*Pickled arrays are refused"):
        labels(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"../../etc passwd 0 1", "leads outside"),
        (b"/etc passwd 0 1", "leads outside"),
        (b"imgs/0 sample_0.png 0 7", "label"),
        (b"imgs/0 sample_9.png 0 1", "sample_9.png is missing"),
        (b"imgs/0", "expected folder, file"),
        (b"\xff\xfe\x00", "neither a NumPy array nor text"),
        (b"\x93NUMPY\x01\x00garbage", "cannot be read as a plain array"),
    ],
)
def test_bad_metadata(tmp_path: Path, content: bytes, message: str) -> None:
    write_metadata(write_images(tmp_path), content)
    with pytest.raises(DataError, match=message):
        labels(tmp_path)


def test_bad_images(tmp_path: Path) -> None:
    write_metadata(write_images(tmp_path, size=33), "\n".join(LINES).encode())
    with pytest.raises(DataError, match="33x33 pixels, expected 32x32"):
        labels(tmp_path)
    (tmp_path / "imgs/0/sample_0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"sample_0\.png cannot be read"):
        labels(tmp_path)


def test_empty_files_are_left_out_as_lra_does(tmp_path: Path) -> None:
    write_metadata(write_images(tmp_path), "\n".join(LINES).encode())
    (tmp_path / "imgs/0/sample_1.png").write_bytes(b"")
    assert labels(tmp_path) == [0, 0, 1]


def test_absurd_shape_is_found_out_before_memory_is_asked_for(tmp_path: Path) -> None:
    (write_images(tmp_path) / "metadata").mkdir()
    path = tmp_path / "metadata" / "0.npy"
    np.save(path, np.array([line.split() for line in LINES]))
    path.write_bytes(path.read_bytes().replace(b"(4, 6), }" + b" " * 9, b"(400000000000, 6)}"))
    with pytest.raises(DataError, match=r"0\.npy"):
        labels(tmp_path)


def test_not_a_folder_or_without_metadata(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        labels(tmp_path / "missing")
    with pytest.raises(DataError, match="no metadata"):
        labels(tmp_path)
