"""Image: CIFAR-10 in grey, from the official binary files, each checked against its published MD5 sum."""

from __future__ import annotations

import hashlib
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from PIL import Image

from skyformer.errors import DataError, SkyformerError
from skyformer.lra.archives import Limits, read_files
from skyformer.lra.download import OfficialSource
from skyformer.lra.examples import ROWS_PER_BATCH, Batches, Examples, Ragged, Symbols
from skyformer.lra.tasks import Split

OFFICIAL = OfficialSource(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530"
)
TEST_FILE = "test_batch.bin"
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    TEST_FILE: "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_LIMITS = Limits(members=100, member_bytes=2**26, total_bytes=2**28)
_PIXELS = 32 * 32
_RECORD = 1 + 3 * _PIXELS
_GREY = np.array([0.2989, 0.587, 0.114], np.float32)


def read(path: Path) -> Batches:
    """The training and test images in the order of the file names."""
    files = {}
    for full_name, data in read_files(path, "cifar-10-batches-bin", lambda n: PurePosixPath(n).name in MD5, _LIMITS):
        name = PurePosixPath(full_name).name
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != MD5[name]:
            raise DataError(f"{path}: {name} is damaged, its MD5 is {found} instead of {MD5[name]}: download it again")
        files[name] = data
    missing = sorted(set(MD5) - set(files))
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; expected the official binary version of CIFAR-10, as archive or folder"
        )
    for name in MD5:
        yield from _decode(files.pop(name), name)


def grey(planes: Symbols) -> Symbols:
    """Red, green and blue planes (images, 3, pixels) as one grey plane, rounded to the nearest value."""
    brightness: npt.NDArray[np.float32] = np.einsum("ncp,c->np", planes.astype(np.float32), _GREY)
    return np.rint(brightness).astype(np.uint8)


def load_image(source: Path | bytes, side: int, *formats: str) -> Image.Image:
    """A square image in one of Pillow's formats, decided by its content; a `DataError` says why it cannot be read.

    Only the formats that are named: for others Pillow may start programs, such as Ghostscript for PostScript.
    """
    name, kinds = "the image" if isinstance(source, bytes) else str(source), " or ".join(formats)
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=formats) as image:
            # The header contains the size: a larger image is never decoded.
            if image.size != (side, side):
                width, height = image.size
                raise DataError(f"{name} must be {side} x {side} pixels; got {width} x {height}: resize it first")
            return image.copy()
    except SkyformerError:
        raise
    except Exception as failed:  # Pillow's decoders raise errors of many types, not only OSError
        raise DataError(f"{name} cannot be read as an image ({kinds}): {failed}") from failed


def _decode(data: bytes, name: str) -> Batches:
    split = Split.TEST if name == TEST_FILE else Split.TRAIN
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    for start in range(0, len(records), ROWS_PER_BATCH):
        batch = records[start : start + ROWS_PER_BATCH]
        pixels = grey(batch[:, 1:].reshape(-1, 3, _PIXELS))
        sources = [f"{name}:{start + number}" for number in range(len(batch))]
        yield split, Examples(Ragged.from_matrix(pixels), batch[:, 0].copy(), sources)
