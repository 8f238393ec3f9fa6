"""Small fakes of the official files, in their official layouts."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from skyformer.lra import image


def review_files(count: int) -> dict[str, bytes]:
    """`count` reviews in each of the four folders of aclImdb."""
    return {
        f"aclImdb/{part}/{label}/{number}_{stars}.txt": f"{label} {part} {number} é".encode()
        for part in ("train", "test")
        for label, stars in (("neg", 2), ("pos", 7))
        for number in range(count)
    }


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return path


def pair_lines(count: int, length: int = 50) -> bytes:
    """`count` lines of LRA's retrieval format."""
    rows = (f"{n % 2}.0\tP{n}\tQ{n}\t{'ab' * length}{n}\t{'cd' * length}" for n in range(count))
    return "".join(row + "\n" for row in rows).encode()


def pair_files(count: int) -> dict[str, bytes]:
    return {f"new_aan_pairs.{part}.tsv": pair_lines(count) for part in ("train", "eval", "test")}


def cifar_files(monkeypatch: pytest.MonkeyPatch, images_per_file: int = 20) -> dict[str, bytes]:
    """Random images in CIFAR-10's binary format, whose MD5 sums replace the published ones."""
    rng = np.random.default_rng(0)
    files = {}
    for name in image.MD5:
        labels = np.arange(images_per_file, dtype=np.uint8)[:, None] % 10
        pixels = rng.integers(0, 256, (images_per_file, 3072), dtype=np.uint8)
        files[name] = np.hstack([labels, pixels]).tobytes()
        monkeypatch.setitem(image.MD5, name, hashlib.md5(files[name]).hexdigest())
    return files
