"""A prepared task in code: `load_task` returns train, dev and test sets for a PyTorch `DataLoader`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from skyformer.lra.examples import Integers, Symbols
from skyformer.lra.folders import Manifest, Variant, find_prepared
from skyformer.lra.storage import StoredSplit
from skyformer.lra.tasks import FIRST_SYMBOL_ID, Split, TaskSpec


class Example(NamedTuple):
    """One example: its token ids without padding, its label, its number in the split, and the second text of a pair."""

    tokens: Tensor
    label: int
    id: int
    second: Tensor | None = None


def fit(symbols: Symbols, spec: TaskSpec) -> Symbols:
    """An example with at most as many tokens as its task allows: an image is averaged down, a text is cut."""
    if spec.image_side is not None and len(symbols) > spec.max_length:
        return _shrink(symbols, spec.image_side)
    return symbols[: spec.max_length]


def _shrink(pixels: Symbols, side: int) -> Symbols:
    """A flattened square image, averaged down to a smaller side that divides its own."""
    block = math.isqrt(len(pixels)) // side
    means = pixels.reshape(side, block, side, block).mean(axis=(1, 3))
    return np.rint(means).astype(np.uint8).reshape(-1)


class TaskDataset(Dataset[Example]):
    """One split of a task, memory-mapped; worker processes open the file again instead of copying its content."""

    def __init__(self, path: Path, spec: TaskSpec) -> None:
        self.spec = spec
        self._path = path
        self._stored: StoredSplit | None = None

    @property
    def stored(self) -> StoredSplit:
        """The symbols as they are stored on disk."""
        if self._stored is None:
            self._stored = StoredSplit(self._path)
        return self._stored

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_stored": None}

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be from {-len(self)} to {len(self) - 1}; got {index}")
        row = index % len(self)
        tokens, *second = (
            torch.from_numpy(fit(symbols, self.spec).astype(np.int64) + FIRST_SYMBOL_ID)
            for symbols in self.stored.texts(row)
        )
        return Example(tokens, int(self.stored.labels[row]), row, *second)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self[index] for index in indices]

    def lengths(self) -> Integers:
        """Number of tokens of each example; of a pair, that of the longer text."""
        return np.minimum(self.stored.lengths(), self.spec.max_length)


@dataclass(frozen=True)
class Task:
    """A prepared task: its specification, its three splits, its folder and its manifest."""

    spec: TaskSpec
    train: TaskDataset
    dev: TaskDataset
    test: TaskDataset
    folder: Path
    manifest: Manifest

    def __getitem__(self, split: Split) -> TaskDataset:
        return {Split.TRAIN: self.train, Split.DEV: self.dev, Split.TEST: self.test}[split]


def load_task(
    name: str,
    data_dir: Path | str | None = None,
    *,
    seed: int = 0,
    limit: int | None = None,
    level: str | None = None,
    max_length: int | None = None,
) -> Task:
    """Load a task that was prepared with the same options.

    Args:
        name: listops, text, retrieval, pathfinder or image.
        data_dir: the data folder; by default that of the environment variable SKYFORMER_DATA, or the user's.
        seed, limit, level: as in `prepare`.
        max_length: for ListOps as in `prepare`. The other tasks are stored complete and shortened when they are read:
            texts are cut, photographs averaged down.

    Returns:
        The task, with `spec`, `train`, `dev` and `test`.
    """
    return load_variant(
        Variant.of(name, seed=seed, limit=limit, level=level, max_length=max_length), data_dir, max_length
    )


def load_variant(variant: Variant, data_dir: Path | str | None = None, max_length: int | None = None) -> Task:
    """Load a prepared version of a task, with its examples cut or shrunk to `max_length`."""
    folder, manifest = find_prepared(variant, data_dir)
    spec = variant.spec.cut_to(max_length)
    train, dev, test = (TaskDataset(folder / manifest.splits[split].file, spec) for split in Split)
    return Task(spec, train, dev, test, folder, manifest)
