"""Text: the IMDb reviews as bytes, from the official archive or its unpacked folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from skyformer.errors import DataError
from skyformer.lra.archives import Limits, blaming, read_fully, tar_members
from skyformer.lra.download import OfficialSource
from skyformer.lra.examples import Examples, Ragged
from skyformer.lra.tasks import TASKS, Split

OFFICIAL = OfficialSource("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz")
REVIEWS_A_PART = 25_000
_LIMITS = Limits(members=300_000, member_bytes=2**24, total_bytes=2**30)
_REVIEW = re.compile(r"(?:^|.*/)(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")
_LABELS = {"neg": 0, "pos": 1}
_MAX_LENGTH = TASKS["text"].max_length


def read(path: Path) -> dict[Split, Examples]:
    """The labelled reviews, train and test, each sorted by label and number."""
    reviews: dict[str, bytes] = {}
    for name, review in _from_folder(path) if path.is_dir() else _from_archive(path):
        reviews[name] = review[:_MAX_LENGTH]
    return {split: _part(reviews, split, path) for split in (Split.TRAIN, Split.TEST)}


def _short_name(name: str) -> str | None:
    """`train/pos/0_9.txt` of whatever path leads there, or nothing if it is no labelled review."""
    match = _REVIEW.fullmatch(name)
    return "{}/{}/{}_{}.txt".format(*match.groups()) if match else None


def _from_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    for name, content in tar_members(path, lambda name: _REVIEW.fullmatch(name) is not None, _LIMITS):
        short = _short_name(name)
        if short:
            yield short, read_fully(content, path, name)


def _from_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    root = path / "aclImdb" if (path / "aclImdb").is_dir() else path
    for file in root.glob("t*/[np]*/*.txt"):
        short = _short_name(file.relative_to(root).as_posix())
        if short:
            with blaming(file):
                yield short, file.read_bytes()


def _part(reviews: dict[str, bytes], split: Split, path: Path) -> Examples:
    names = sorted((name for name in reviews if name.startswith(f"{split}/")), key=_order)
    labels = np.array([_LABELS[name.split("/")[1]] for name in names], np.uint8)
    if len(set(labels.tolist())) != len(_LABELS):
        raise DataError(
            f"{path} has no reviews in {split}/pos or {split}/neg; expected the official aclImdb archive or its folder"
        )
    return Examples(Ragged.from_rows([reviews[name] for name in names]), labels, names)


def _order(name: str) -> tuple[str, int]:
    folder, file = name.rsplit("/", 1)
    return folder, int(file.split("_")[0])
