"""Predictions for whole files: every row gets the predicted label; and evaluation on files with labels."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skyformer.errors import DataError, InputError
from skyformer.files import write_atomic
from skyformer.own.preparation import as_label, checked_text
from skyformer.own.reading import FORMATS, JSON, Part, Row, Source, check_columns, only_part
from skyformer.report.progress import Progress, Silent
from skyformer.training.module import Evaluation
from skyformer.training.prediction import Prediction, Predictor
from skyformer.training.runs import Run

PREDICTION, PROBABILITY, PROBABILITIES = "prediction", "probability", "probabilities"
_ROWS = 1024
_TITLE = "texts classified"


@dataclass(frozen=True)
class Columns:
    """The columns of texts and labels: those of the run's own data by default."""

    texts: tuple[str, ...]
    label: str

    @classmethod
    def of(cls, run: Run, text: str | None, text_b: str | None, label: str | None) -> Columns:
        task = run.config.task
        if task.spec.image_side is not None:
            raise InputError(f"{task.name} has images, not texts; give the images themselves to `skyformer predict`")
        texts = [text or (task.own.text if task.own else "text")]
        if task.spec.paired:
            texts.append(text_b or ((task.own and task.own.text_b) or "text_b"))
        elif text_b is not None:
            raise InputError(f"{task.name} has single texts; leave out --text-b")
        return cls(tuple(texts), label or (task.own.label if task.own else "label"))

    def check(self, part: Part, *, with_label: bool) -> None:
        options = dict(zip(("--text", "--text-b"), self.texts, strict=False))
        check_columns(part, options | ({"--label": self.label} if with_label else {}))


def predict_file(
    run: Run,
    source: Source,
    output: Path,
    *,
    text: str | None = None,
    text_b: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Classify every row of a file or dataset, and write its columns with `prediction` and `probability` to `output`.

    Texts are cut as the training data was. JSONL also gets the probabilities of all labels. The file appears in one
    step, when everything is classified.

    Returns:
        The number of rows.
    """
    if output.suffix.lower() not in FORMATS:
        raise InputError(f"--output must end in {', '.join(FORMATS)}; got {output.name!r}")
    part, columns = only_part(source), Columns.of(run, text, text_b, None)
    columns.check(part, with_label=False)
    suffix = output.suffix.lower()
    added = (PREDICTION, PROBABILITY, *([PROBABILITIES] if suffix in JSON else []))
    for place, row in part.rows():
        if taken := [name for name in added if name in row]:
            raise InputError(
                f"{part.name} {place} has the column {taken[0]!r} already, which would be overwritten; rename it"
            )
    names = run.config.task.spec.label_names
    rows = []
    for _, row, found in _classified(Predictor(run), part, columns, progress or Silent()):
        values = (found.name, max(found.probabilities), dict(zip(names, found.probabilities, strict=True)))
        rows.append({**row, **dict(zip(added, values, strict=False))})
    if not rows:
        raise DataError(f"{part.name} has no rows")
    try:
        write_atomic(output, _formatted(rows, suffix))
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror}") from error
    return len(rows)


def evaluate_file(
    run: Run,
    source: Source,
    *,
    text: str | None = None,
    text_b: str | None = None,
    label: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate the best model of a run on the rows of a file or dataset with labels that it knows."""
    part, columns = only_part(source), Columns.of(run, text, text_b, label)
    columns.check(part, with_label=True)
    names = run.config.task.spec.label_names
    loss, correct, examples = 0.0, 0, 0
    for place, row, found in _classified(Predictor(run), part, columns, progress or Silent()):
        given = as_label(row.get(columns.label), f"{part.name} {place}", columns.label)
        if given not in names:
            raise DataError(
                f"{part.name} {place} has the label {given!r}, which was not in the training data; known: "
                f"{', '.join(names[:20])}{', ...' * (len(names) > 20)}"
            )
        number = names.index(given)
        loss -= math.log(max(found.probabilities[number], 1e-300))
        correct += found.label == number
        examples += 1
    if not examples:
        raise DataError(f"{part.name} has no rows")
    return Evaluation(loss / examples, correct / examples, examples)


def _classified(
    predictor: Predictor, part: Part, columns: Columns, progress: Progress
) -> Iterator[tuple[str, Row, Prediction]]:
    progress.begin(_TITLE)
    rows = part.rows()
    while batch := list(islice(rows, _ROWS)):
        texts = [[checked_text(part, place, row, column) for column in columns.texts] for place, row in batch]
        for (place, row), found in zip(batch, predictor.classify(texts), strict=True):
            yield place, row, found
        progress.update(_TITLE, advance=len(batch))
    progress.end(_TITLE)


def _formatted(rows: list[dict[str, Any]], suffix: str) -> str | bytes:
    """The rows in the format of a suffix; a table has all columns that a row has."""
    if suffix in JSON:
        return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    header = list(dict.fromkeys(name for row in rows for name in row))
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([dict.fromkeys(header) | row for row in rows]), content)
        return content.getvalue()
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, header, delimiter="\t" if suffix == ".tsv" else ",", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
