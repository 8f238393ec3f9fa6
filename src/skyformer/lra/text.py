"""Text: the IMDb reviews as bytes, from the official archive or its extracted folder."""

from __future__ import annotations

import re
from pathlib import Path

from skyformer.errors import DataError
from skyformer.lra.archives import Limits, read_files
from skyformer.lra.download import OfficialSource
from skyformer.lra.examples import Batches, Row, in_batches
from skyformer.lra.tasks import TASKS, Split

OFFICIAL = OfficialSource("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz")
_LIMITS = Limits(members=300_000, member_bytes=2**24, total_bytes=2**30)
_REVIEW = re.compile(r"(?:.*/)?((train|test)/(neg|pos)/(\d+)_\d+\.txt)")
_LABELS = {"neg": 0, "pos": 1}
_MAX_LENGTH = TASKS["text"].max_length


def read(path: Path) -> Batches:
    """The labelled reviews, train and test, each sorted by label and number."""
    reviews: dict[tuple[str, int, int, str], Row] = {}
    for name, review in read_files(path, "aclImdb", lambda name: _REVIEW.fullmatch(name) is not None, _LIMITS):
        match = _REVIEW.fullmatch(name)
        if match:
            short_name, part, sentiment, number = match.groups()
            label = _LABELS[sentiment]
            reviews[part, label, int(number), short_name] = Row(review[:_MAX_LENGTH], label, short_name)
    ordered = [reviews[key] for key in sorted(reviews)]
    for split in (Split.TRAIN, Split.TEST):
        rows = [row for row in ordered if row.source.startswith(split)]
        if {row.label for row in rows} != set(_LABELS.values()):
            raise DataError(
                f"{path} has no reviews in {split}/pos or {split}/neg; expected the official aclImdb archive or folder"
            )
        yield from in_batches(split, rows)
