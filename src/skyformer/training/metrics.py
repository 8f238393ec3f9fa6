"""metrics.csv: one row per logged step and split."""

from __future__ import annotations

import csv
import io
import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from skyformer.errors import CheckpointWarning


@dataclass(frozen=True)
class MetricRow:
    """One row; `split` is train or dev, and only training has a learning rate."""

    step: int
    split: str
    loss: float
    accuracy: float
    lr: float | None
    seconds: float


COLUMNS = tuple(field.name for field in fields(MetricRow))


class MetricsFile:
    """Appends to metrics.csv; a resumed run first cuts it back to where its checkpoint was written.

    Lightning's CSVLogger cannot do that: it starts a new file, or keeps the rows that are computed again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Number of bytes so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, row: MetricRow) -> None:
        """Write one row, with all digits, so that equal runs have equal files; seconds have three decimals."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not self.size:
            writer.writerow(COLUMNS)
        lr = "" if row.lr is None else repr(row.lr)
        writer.writerow([row.step, row.split, repr(row.loss), repr(row.accuracy), lr, f"{row.seconds:.3f}"])
        with self.path.open("ab") as handle:
            handle.write(text.getvalue().encode())

    def truncate(self, size: int) -> None:
        """Remove everything after the first `size` bytes."""
        if self.size < size:
            warnings.warn(f"rows of {self.path} are lost: it has {self.size:,} of {size:,} bytes", CheckpointWarning, 2)
        if self.size > size:
            os.truncate(self.path, size)

    def sync(self) -> None:
        """Wait until the rows are on the disk."""
        if self.path.exists():
            with self.path.open("ab") as handle:
                os.fsync(handle.fileno())

    def rows(self) -> list[MetricRow]:
        """All complete rows; a row that a killed process has not finished is left out."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            rows = [_parse_row(row) for row in csv.DictReader(file)]
        return [row for row in rows if row is not None]


def _parse_row(row: dict[str, Any]) -> MetricRow | None:
    try:
        lr = float(row["lr"]) if row["lr"] else None
        loss, accuracy, seconds = (float(row[name]) for name in ("loss", "accuracy", "seconds"))
        return MetricRow(int(row["step"]), row["split"], loss, accuracy, lr, seconds)
    except (KeyError, TypeError, ValueError):
        return None
