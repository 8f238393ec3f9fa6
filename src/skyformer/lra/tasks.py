"""The five tasks of Long Range Arena: what a model and a loader must know about each.

All tasks number their tokens in the same way: id 0 is padding and nothing else, and symbol `s` on disk has id `s + 1`.
Symbols are bytes (text, retrieval), pixel values (pathfinder, image) or the fifteen words of ListOps. So a black pixel
has id 1 and is never mistaken for padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from skyformer.errors import InputError, UnknownNameError

PADDING_ID = 0
FIRST_SYMBOL_ID = 1
PADDING_MULTIPLE = 64


class Split(StrEnum):
    """The three sets of every task."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


@dataclass(frozen=True)
class TaskSpec:
    """What a model must know about a task.

    Attributes:
        num_symbols: number of different symbols; `vocab_size` also counts padding.
        max_length: largest number of tokens in an example, or in each text of a pair.
        split_sizes: number of train, dev and test examples in the complete official data.
        paired: whether an example consists of two texts.
        image_side: height and width of the images; None if the examples are not images.
        can_shrink: whether the images stay recognisable when they are averaged down.
    """

    name: str
    summary: str
    label_names: tuple[str, ...]
    split_sizes: tuple[int, int, int]
    max_length: int
    num_symbols: int = 256
    paired: bool = False
    image_side: int | None = None
    can_shrink: bool = False

    @property
    def num_classes(self) -> int:
        return len(self.label_names)

    @property
    def sizes(self) -> dict[Split, int]:
        """Number of examples in each split of the complete official data."""
        return dict(zip(Split, self.split_sizes, strict=True))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including padding."""
        return self.num_symbols + FIRST_SYMBOL_ID

    @property
    def padded_length(self) -> int:
        """The longest that a padded batch can be: `max_length` rounded up to a multiple of 64."""
        return round_up(self.max_length)

    def cut_to(self, max_length: int | None) -> TaskSpec:
        """The task with examples of at most `max_length` tokens.

        Texts are cut. Photographs are averaged down to the largest square that fits and whose side divides theirs.
        Pathfinder images cannot be made smaller: their paths are one pixel wide and would blur together.
        """
        if max_length is None:
            return self
        if max_length < 1:
            raise InputError(f"max_length must be at least 1; got {max_length}")
        if max_length >= self.max_length:
            return self
        if self.image_side is None:
            return replace(self, max_length=max_length)
        if not self.can_shrink:
            raise InputError(
                f"max_length must be at least {self.max_length} for {self.name}, because its thin lines would not "
                f"survive in a smaller image; got {max_length}: leave it out"
            )
        side = max(side for side in range(1, self.image_side) if self.image_side % side == 0 and side**2 <= max_length)
        return replace(self, max_length=side**2, image_side=side)


def symbol_type(count: int) -> str:
    """The smallest type of numpy, Arrow and `datasets` that holds `count` different symbols or labels."""
    return next(f"uint{bits}" for bits in (8, 16, 32) if count <= 2**bits)


def round_up(length: int, multiple: int = PADDING_MULTIPLE) -> int:
    """The smallest positive multiple of `multiple` that is at least `length`."""
    return max(1, -(-length // multiple)) * multiple


_LISTOPS = TaskSpec(
    "listops",
    summary="nested MIN, MAX, MED and SM over digits: what is the result?",
    label_names=tuple("0123456789"),
    split_sizes=(96_000, 2_000, 2_000),
    max_length=2_000,
    num_symbols=15,
)
_TEXT = TaskSpec(
    "text",
    summary="IMDb reviews as bytes: positive or negative?",
    label_names=("negative", "positive"),
    split_sizes=(22_500, 2_500, 25_000),
    max_length=4_000,
)
_RETRIEVAL = replace(
    _TEXT,
    name="retrieval",
    summary="two ACL papers as bytes: does one cite the other?",
    label_names=("unrelated", "cited"),
    split_sizes=(147_086, 18_090, 17_437),
    paired=True,
)
_PATHFINDER = TaskSpec(
    "pathfinder",
    summary="32x32 drawings as pixels: are the two dots on one path?",
    label_names=("apart", "connected"),
    split_sizes=(160_000, 20_000, 20_000),
    max_length=32 * 32,
    image_side=32,
)
_IMAGE = replace(
    _PATHFINDER,
    name="image",
    summary="CIFAR-10 as grey pixels: which of ten classes?",
    label_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    split_sizes=(45_000, 5_000, 10_000),
    can_shrink=True,
)
TASKS = {spec.name: spec for spec in (_LISTOPS, _TEXT, _RETRIEVAL, _PATHFINDER, _IMAGE)}


def task_spec(name: str) -> TaskSpec:
    """The task called `name`."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]
