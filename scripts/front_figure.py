"""Draw the figure of the README from results/: time against length, and accuracy on Text against training time.

    python scripts/front_figure.py [RESULTS [OUTPUT]]

Needs the records of `skyformer bench attention` and `skyformer study arena` in RESULTS (default: results/). A run that
is not finished is drawn as far as it is, and the note says so. Writes front.png and front.svg into OUTPUT (default:
docs/images).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyformer.errors import SkyformerError
from skyformer.report.figures import Figure, Panel, Series, draw_figure
from skyformer.report.ticks import Unit
from skyformer.studies.arena import Arena, latest
from skyformer.studies.base import StudyClass
from skyformer.studies.benchmarks.attention import AttentionBenchmark
from skyformer.studies.benchmarks.contenders import AUTHORS
from skyformer.studies.record import Record, read_record, record_path

ROOT = Path(__file__).parent.parent
SHOWN = {
    "sdpa": "softmax",
    "softmax": "softmax",
    "kernelized": "kernelized",
    "skyformer": "skyformer",
    AUTHORS: "authors' skyformer",
}
"""The contenders and attentions that are drawn, and their names."""
LONGEST_IN_MINUTES = 3.0
"""Hours; up to here, training times are given in minutes."""


def speed_panel(record: Record[Any, Any]) -> Panel:
    """The time of a step against the length."""
    panels = AttentionBenchmark.figures(record.results())[0].panels
    time = next(panel for panel in panels if panel.y_unit is Unit.SECONDS)
    return replace(time, title="Attention alone, forward and backward", series=_shown(time))


def accuracy_panel(record: Record[Any, Any]) -> Panel:
    """The accuracy on Text against the training time."""
    timed = next((figure for figure in Arena.figures(record.results()) if figure.name == "figure"), None)
    text = next((panel for panel in timed.panels if panel.title.startswith("Text")), None) if timed else None
    if text is None:
        raise SkyformerError("the record of `skyformer study arena` has no run on Text with times; collect one first")
    series, label = _shown(text), "training time on an idle machine (hours)"
    if max((x or 0.0 for each in series for x in each.x), default=0.0) < LONGEST_IN_MINUTES:
        series = [replace(each, x=[60 * (x or 0.0) for x in each.x]) for each in series]
        label = label.replace("hours", "minutes")
    return replace(
        text, title="Training on Text: accuracy on the dev set (%)", x_label=label, y_label="", series=series
    )


def unfinished(record: Record[Any, Any]) -> list[str]:
    """The attentions without any finished run on Text, with the step that their furthest run has reached."""
    runs = {cell: run for cell, run in latest(record.results()).items() if cell.task == "text"}
    found = []
    for name in SHOWN:
        of = [cell for cell in runs if cell.attention == name]
        if of and not any(cell.finished for cell in of):
            furthest = max(of, key=lambda cell: cell.step)
            found.append(f"{name} ({furthest.step:,} of {runs[furthest].steps:,} steps)")
    return found


def _shown(panel: Panel) -> list[Series]:
    """The chosen lines in the order of `SHOWN`."""
    lines = {series.label: series for series in panel.series}
    return [replace(lines[name], label=shown, low=(), high=()) for name, shown in SHOWN.items() if name in lines]


def read(study: StudyClass, results: Path) -> Record[Any, Any]:
    path = record_path(study.name, results / study.name)
    if not path.exists():
        raise SkyformerError(f"there is no record at {path}; run the study first")
    return read_record(study, path)


def draw(results: Path, output: Path) -> list[Path]:
    """Write the figure; returns its files."""
    speed, accuracy = read(AttentionBenchmark, results), read(Arena, results)
    panels = [speed_panel(speed), accuracy_panel(accuracy)]
    cell, rest = next(iter(speed.results())), unfinished(accuracy)
    note = (
        f"Left: batch {cell.batch}, {cell.heads} heads of {cell.head_dim}, {cell.landmarks} landmarks, {cell.dtype}, "
        f"{speed.facts['threads']} cores of {speed.facts['processor']}; softmax is PyTorch's SDPA. Right: Long Range "
        "Arena at its full length with the settings of the paper."
        + (f" Not finished: {', '.join(rest)}." if rest else "")
    )
    return draw_figure(Figure("front", "", panels, columns=2, note=note), output, ("png", "svg"))


def main() -> None:
    results, output = (*map(Path, sys.argv[1:]), *(ROOT / "results", ROOT / "docs" / "images")[len(sys.argv) - 1 :])
    try:
        for file in draw(results, output):
            print(f"wrote {file}")
    except SkyformerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
