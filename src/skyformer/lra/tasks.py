"""The five tasks of Long Range Arena in one typed table: what a model and a loader must know of each.

Token ids are the same idea everywhere: id 0 is padding and nothing else, and the symbol `s` that is kept on
disk has id `s + 1`. Symbols are bytes (text, retrieval), pixel values (pathfinder, image), or the fifteen
words of ListOps. So a black pixel is id 1, and never mistaken for padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from skyformer.errors import InputError, UnknownNameError

PADDING_ID = 0
FIRST_SYMBOL_ID = 1
PADDING_MULTIPLE = 64


class Split(StrEnum):
    """The three parts of every task."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


@dataclass(frozen=True)
class SplitSizes:
    """How many examples each part of the whole task has."""

    train: int
    dev: int
    test: int

    def __getitem__(self, split: Split) -> int:
        return {Split.TRAIN: self.train, Split.DEV: self.dev, Split.TEST: self.test}[split]


@dataclass(frozen=True)
class TaskSpec:
    """What a model needs to know of a task; `sizes` are those of the whole official data."""

    name: str
    summary: str
    num_classes: int
    num_symbols: int
    max_length: int
    sizes: SplitSizes
    label_names: tuple[str, ...]
    paired: bool = False
    image_side: int | None = None
    can_shrink: bool = False
    padding_id: int = PADDING_ID

    @property
    def vocab_size(self) -> int:
        """Number of token ids, padding included."""
        return self.num_symbols + FIRST_SYMBOL_ID

    @property
    def padded_length(self) -> int:
        """The longest a padded batch can be: `max_length` rounded up as the collator rounds."""
        return round_up(self.max_length)

    def cut_to(self, max_length: int | None) -> TaskSpec:
        """The task with examples of at most `max_length` tokens: texts are cut, photographs averaged down to the
        largest square that fits and whose side divides theirs. Pathfinder stays as it is: its paths are lines of a
        pixel's width, which an average would blur together."""
        if max_length is None:
            return self
        if max_length < 1:
            raise InputError(f"max_length must be at least 1, got {max_length}")
        if max_length >= self.max_length:
            return self
        if self.image_side is None:
            return replace(self, max_length=max_length)
        if not self.can_shrink:
            raise InputError(
                f"max_length must be at least {self.max_length} for {self.name}, whose thin lines would not survive "
                f"in a smaller image; got {max_length}: leave it out"
            )
        side = max(side for side in range(1, self.image_side) if self.image_side % side == 0 and side**2 <= max_length)
        return replace(self, max_length=side**2, image_side=side)


def round_up(length: int, multiple: int = PADDING_MULTIPLE) -> int:
    """The smallest multiple that holds `length`, and at least one."""
    return max(1, -(-length // multiple)) * multiple


CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            name="listops",
            summary="nested MIN, MAX, MED and SM over digits: what is the result?",
            num_classes=10,
            num_symbols=15,
            max_length=2_000,
            sizes=SplitSizes(96_000, 2_000, 2_000),
            label_names=tuple("0123456789"),
        ),
        TaskSpec(
            name="text",
            summary="IMDb reviews as bytes: positive or negative?",
            num_classes=2,
            num_symbols=256,
            max_length=4_000,
            sizes=SplitSizes(22_500, 2_500, 25_000),
            label_names=("negative", "positive"),
        ),
        TaskSpec(
            name="retrieval",
            summary="two ACL papers as bytes: does one cite the other?",
            num_classes=2,
            num_symbols=256,
            max_length=4_000,
            sizes=SplitSizes(147_086, 18_090, 17_437),
            label_names=("unrelated", "cited"),
            paired=True,
        ),
        TaskSpec(
            name="pathfinder",
            summary="32x32 drawings as pixels: are the two dots on one path?",
            num_classes=2,
            num_symbols=256,
            max_length=1_024,
            sizes=SplitSizes(160_000, 20_000, 20_000),
            label_names=("apart", "connected"),
            image_side=32,
        ),
        TaskSpec(
            name="image",
            summary="CIFAR-10 in grey as pixels: which of ten things is it?",
            num_classes=10,
            num_symbols=256,
            max_length=1_024,
            sizes=SplitSizes(45_000, 5_000, 10_000),
            label_names=CIFAR10_CLASSES,
            image_side=32,
            can_shrink=True,
        ),
    )
}


def task_spec(name: str) -> TaskSpec:
    """The task called `name`."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]
