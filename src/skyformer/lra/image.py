"""Image: CIFAR-10 in grey, from the official binary files, each checked by its published MD5."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from skyformer.errors import DataError
from skyformer.lra.archives import Limits, blaming, read_fully, tar_members
from skyformer.lra.download import OfficialSource
from skyformer.lra.examples import Examples, Ragged, Symbols
from skyformer.lra.tasks import Split

OFFICIAL = OfficialSource(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530"
)
TRAIN_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
}
TEST_MD5 = {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"}
MD5 = TRAIN_MD5 | TEST_MD5
_LIMITS = Limits(members=100, member_bytes=2**26, total_bytes=2**28)
_BATCH_ROWS = 1_000
_PIXELS = 32 * 32
_RECORD = 1 + 3 * _PIXELS
_GREY = np.array([0.2989, 0.587, 0.114], np.float32)


def read(path: Path) -> Iterator[tuple[Split, Examples]]:
    """The images in the order of the file names, some at a time, with the part they belong to."""
    files = _from_folder(path) if path.is_dir() else _from_archive(path)
    missing = sorted(set(MD5) - set(files))
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; expected the official binary version of CIFAR-10, as archive or folder"
        )
    for name in MD5:
        for examples in _decode(files.pop(name), name):
            yield Split.TEST if name in TEST_MD5 else Split.TRAIN, examples


def grey(planes: Symbols) -> Symbols:
    """Red, green and blue planes (N, 3, pixels) as one grey plane, rounded to the nearest value."""
    brightness: npt.NDArray[np.float32] = np.einsum("ncp,c->np", planes.astype(np.float32), _GREY)
    return np.rint(brightness).astype(np.uint8)


def _from_folder(path: Path) -> dict[str, bytes]:
    root = path / "cifar-10-batches-bin" if (path / "cifar-10-batches-bin").is_dir() else path
    files = {}
    for name in MD5:
        file = root / name
        if file.is_file():
            with blaming(file):
                files[name] = _checked(file.read_bytes(), name, file)
    return files


def _from_archive(path: Path) -> dict[str, bytes]:
    files = {}
    for name, content in tar_members(path, lambda name: PurePosixPath(name).name in MD5, _LIMITS):
        short = PurePosixPath(name).name
        files[short] = _checked(read_fully(content, path, name), short, path)
    return files


def _checked(data: bytes, name: str, path: Path) -> bytes:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != MD5[name]:
        raise DataError(f"{path}: {name} has MD5 {found}, but {MD5[name]} is published: it is damaged, get it again")
    return data


def _decode(data: bytes, name: str) -> Iterator[Examples]:
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    for start in range(0, len(records), _BATCH_ROWS):
        some = records[start : start + _BATCH_ROWS]
        pixels = grey(some[:, 1:].reshape(-1, 3, _PIXELS))
        sources = [f"{name}:{start + number}" for number in range(len(some))]
        yield Examples(Ragged.from_matrix(pixels), some[:, 0].copy(), sources)
