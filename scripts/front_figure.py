"""Draw the figure of the README from results/: time against length, and accuracy on Text against training time.

    python scripts/front_figure.py

Needs the records of `skyformer bench attention` and `skyformer study arena`; writes docs/images/front.png and .svg.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from skyformer.report.figures import Figure, Panel, draw_figure
from skyformer.studies.record import read_record, record_path
from skyformer.studies.registry import BENCHMARKS, STUDIES

ROOT = Path(__file__).parent.parent


def first_panel(registry: object, name: str, title: str) -> Panel:
    """The first panel of a record's first figure that is about `title`, or else its first panel."""
    study = registry.get(name)  # type: ignore[attr-defined]
    results = read_record(study, record_path(name, ROOT / "results" / name)).results()
    panels = study.figures(results)[0].panels
    return next((panel for panel in panels if title in panel.title), panels[0])


def main() -> None:
    speed = replace(first_panel(BENCHMARKS, "attention", "time"), title="Attention alone")
    accuracy = replace(first_panel(STUDIES, "arena", "Text"), title="Text, 4,000 bytes, the paper's settings")
    figure = Figure("front", "", [speed, accuracy], columns=2)
    for file in draw_figure(figure, ROOT / "docs" / "images"):
        print(f"wrote {file.relative_to(ROOT)}")
    (ROOT / "docs" / "images" / "front.pdf").unlink()


if __name__ == "__main__":
    main()
