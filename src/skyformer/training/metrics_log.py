"""metrics.csv: a Lightning logger that a resumed run goes on with, from the very row its checkpoint was written at."""

from __future__ import annotations

import csv
import io
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from skyformer.errors import CheckpointWarning

COLUMNS = ("step", "split", "loss", "accuracy", "lr", "seconds")


class MetricsLog(Logger):
    """One row for each step and split; metrics are named `split/column`."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def size(self) -> int:
        """Bytes so far, all of them on the disk."""
        return self.file.stat().st_size if self.file.exists() else 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends a row; what is not a column stays out."""
        splits = {name.partition("/")[0] for name in metrics}
        for split in sorted(splits):
            values = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith(f"{split}/")}
            row = {"step": step, "split": split, **{name: _number(name, value) for name, value in values.items()}}
            self._append([row.get(column, "") for column in COLUMNS])

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The run's config.yaml has them."""

    @rank_zero_only
    def truncate(self, size: int) -> None:
        """Forget the rows after the first `size` bytes; those of a killed process come again."""
        if self.size < size:
            warnings.warn(f"rows of {self.file} are lost: it has {self.size:,} bytes of {size:,}", CheckpointWarning, 2)
        if self.size > size:
            os.truncate(self.file, size)

    @rank_zero_only
    def save(self) -> None:
        """Bring the rows to the disk."""
        if self.file.exists():
            with self.file.open("ab") as handle:
                os.fsync(handle.fileno())

    def _append(self, row: list[Any]) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not self.size:
            writer.writerow(COLUMNS)
        writer.writerow(row)
        with self.file.open("ab") as handle:
            handle.write(text.getvalue().encode())


def _number(name: str, value: float) -> str:
    """Every digit, so that two equal runs can be seen to be; but no more of the time than anyone needs."""
    return f"{value:.3f}" if name == "seconds" else repr(float(value))
