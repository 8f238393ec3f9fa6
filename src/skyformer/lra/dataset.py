"""A prepared task in code: `load_task` gives train, dev and test sets for a PyTorch `DataLoader`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from skyformer.lra.examples import Integers, Symbols, shrink
from skyformer.lra.places import find
from skyformer.lra.storage import Manifest, StoredSplit, Variant
from skyformer.lra.tasks import FIRST_SYMBOL_ID, Split, TaskSpec


class Example(NamedTuple):
    """One example: token ids (never padding), its label, its number in the split, its partner in a pair."""

    tokens: Tensor
    label: int
    id: int
    second: Tensor | None = None


def fit(symbols: Symbols, spec: TaskSpec) -> Symbols:
    """An example at the length of its task: an image made smaller, a text cut."""
    if spec.image_side is not None and len(symbols) > spec.max_length:
        return shrink(symbols, spec.image_side)
    return symbols[: spec.max_length]


class TaskDataset(Dataset[Example]):
    """One split of a task, memory-mapped; in worker processes it is opened anew rather than copied."""

    def __init__(self, path: Path, spec: TaskSpec) -> None:
        self.spec = spec
        self._path = path
        self._stored: StoredSplit | None = None

    @property
    def stored(self) -> StoredSplit:
        """The symbols as they lie on disk."""
        if self._stored is None:
            self._stored = StoredSplit(self._path)
        return self._stored

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_stored": None}

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        row, stored = index % len(self), self.stored
        second = None if stored.second is None else self._ids(stored.second[row])
        return Example(self._ids(stored.tokens[row]), int(stored.labels[row]), row, second)

    def _ids(self, symbols: Symbols) -> Tensor:
        return torch.from_numpy(fit(symbols, self.spec).astype(np.int64) + FIRST_SYMBOL_ID)

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self[index] for index in indices]

    def lengths(self) -> Integers:
        """Tokens of each example; of a pair, the longer half."""
        return np.minimum(self.stored.lengths(), self.spec.max_length)


@dataclass(frozen=True)
class Task:
    """A prepared task: its specification, its three sets, and what its manifest says."""

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
    """A task that `prepare` made ready with the same options; `max_length` cuts texts and shrinks photographs
    here, as they are read."""
    variant = Variant.of(name, seed=seed, limit=limit, level=level, max_length=max_length)
    folder, manifest = find(variant, data_dir)
    files = [folder / manifest.splits[split].file for split in Split]
    spec = variant.spec.cut_to(max_length)
    train, dev, test = (TaskDataset(file, spec) for file in files)
    return Task(spec, train, dev, test, folder, manifest)
