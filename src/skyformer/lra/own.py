"""Data of one's own as a task: what the config of a run and the manifest of the prepared data record of it."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from skyformer.lra.tasks import TASKS, TaskSpec
from skyformer.settings import Settings, as_tuple

LARGEST_VOCABULARY = 2**24
LONGEST_TEXT = 2**20
"""Longer texts are cut to this many tokens when they are stored."""
TOKENIZER_FOLDER = "tokenizer"
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


class OwnData(Settings):
    """Where the data comes from, how it was read, and what a model must know about it."""

    section: ClassVar[str] = "task.own"

    digest: str = Field(pattern="^[0-9a-f]{8}$", description="a hash of the content and of all options of reading it")
    train: str | None = Field(default=None, description="the file or folder; null = it was not read from files")
    dev: str | None = Field(default=None, description="the file of the dev set, if it has its own")
    test: str | None = Field(default=None, description="the file of the test set, if it has its own")
    text: str = Field(default="text", description="the column of the texts")
    text_b: str | None = Field(default=None, description="the column of the second texts of pairs")
    label: str = Field(default="label", description="the column of the labels")
    tokenizer: str | None = Field(default=None, description="a Hugging Face tokenizer; null = bytes")
    labels: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(min_length=2, description="their names")
    num_symbols: int = Field(ge=1, le=LARGEST_VOCABULARY, description="number of different tokens without padding")
    longest: int = Field(ge=1, le=LONGEST_TEXT, description="tokens of the longest text")

    @property
    def files(self) -> dict[str, str]:
        """The file or folder of each split that has its own."""
        named = {"train": self.train, "dev": self.dev, "test": self.test}
        return {split: file for split, file in named.items() if file is not None}

    def spec(self, name: str) -> TaskSpec:
        """The data as a task."""
        return TaskSpec(
            name,
            summary=f"own data with {len(self.labels)} labels",
            label_names=self.labels,
            split_sizes=(0, 0, 0),
            max_length=self.longest,
            num_symbols=self.num_symbols,
            paired=self.text_b is not None,
        )


def as_name(text: str) -> str:
    """A name for a task made from that of a file: lower case, without special characters, and not one of the five."""
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:32] or "data"
    name = name if name[0].isalpha() else f"data_{name}"
    return f"{name}_own" if name in TASKS else name
