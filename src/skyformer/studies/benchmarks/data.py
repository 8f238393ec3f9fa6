"""Time and memory of preparing and loading Long Range Arena, and the statistics of the generated images.

Every measurement runs in a fresh process, so that its peak memory is its own. `--references` is a folder with the
original data: data/imdb, data/aan and data/pathfinder32_ref200; without it, what needs them is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyformer.processes import peak_bytes, run_in_fresh_process
from skyformer.report.tables import Table, number
from skyformer.studies.base import Study, option
from skyformer.studies.record import significant
from skyformer.studies.registry import register_benchmark
from skyformer.studies.targets import Target, at_least, at_most, close_to

if TYPE_CHECKING:
    import numpy as np

MEMORY_LIMIT_MB = 1_000
PREPARED_IMAGES = 300
REFERENCE_DISTRACTORS, DISTRACTORS_STANDARD_ERROR = 1.25, 0.075
"""Mean of the 200 reference images, and how precisely they determine it."""


@dataclass(frozen=True)
class Options:
    references: str | None = option(None, help="Folder of the original data.")
    cifar10: str | None = option(None, help="Folder of CIFAR-10's binary files.")
    images: int = option(3_000, small=50, least=1, help="Pathfinder images to draw.")
    labels: int | None = option(None, small=1_000, least=1, help="Pathfinder labels per split; none: all.")
    expressions: int | None = option(None, small=1_000, least=1, help="ListOps expressions per split; none: all.")


@dataclass(frozen=True)
class Cell:
    """step: "prepare", "load", "draw", "labels" or "references"; limit: number of examples, None for all of them."""

    task: str
    step: str
    limit: int | None = None


@dataclass(frozen=True)
class Result:
    """Seconds and peak memory of the process, and other numbers that it found, by name."""

    seconds: float
    peak_mb: float
    found: Mapping[str, float]


PREPARE_TEXT, LOAD_TEXT = Cell("text", "prepare"), Cell("text", "load")
REFERENCES = Cell("pathfinder", "references")

Results = Mapping[Cell, Result]


@register_benchmark
class DataBenchmark(Study[Options, Cell, Result]):
    name = "data"
    title = "Preparing and loading Long Range Arena"
    is_timing_study = True

    def cells(self) -> Sequence[Cell]:
        cells = [
            Cell("listops", "prepare", self.options.expressions),
            Cell("pathfinder", "draw", self.options.images),
            Cell("pathfinder", "labels", self.options.labels),
            Cell("pathfinder", "prepare", PREPARED_IMAGES),
        ]
        if self.options.references is not None:
            cells += [REFERENCES, PREPARE_TEXT, LOAD_TEXT, Cell("retrieval", "prepare")]
        if self.options.cifar10 is not None:
            cells.append(Cell("image", "prepare"))
        return cells

    def measure(self, cell: Cell) -> Result:
        with tempfile.TemporaryDirectory(prefix="skyformer-") as folder:
            if cell == LOAD_TEXT:
                self._run(PREPARE_TEXT, folder)
            return self._run(cell, folder)

    def _run(self, cell: Cell, folder: str) -> Result:
        run = run_in_fresh_process(_measure_here, **asdict(cell), data_dir=folder, source=self._source(cell))
        return Result(**run.result(f"{cell.task}, {cell.step}"))

    def _source(self, cell: Cell) -> str | None:
        if cell.task == "image":
            return self.options.cifar10
        paths = {"text": "imdb/aclImdb.tar.xz", "retrieval": "aan"}
        path = "pathfinder32_ref200" if cell == REFERENCES else paths.get(cell.task)
        return None if path is None else str(Path(self.options.references or "") / "data" / path)

    @classmethod
    def targets(cls, results: Results) -> Sequence[Target]:
        return [*_time_targets(results), *_memory_targets(results), *_pathfinder_targets(results)]

    @classmethod
    def tables(cls, results: Results) -> Sequence[Table]:
        rows = [
            [cell.task, cell.step, number(result.seconds), number(result.peak_mb), _spell(result.found)]
            for cell, result in results.items()
        ]
        return [Table("Measurements", ["task", "step", "seconds", "peak MB", "found"], rows)]


def _spell(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in found.items())


def _time_targets(results: Results) -> Iterator[Target]:
    limits = {
        Cell("listops", "prepare"): ("100,000 expressions in one process", 120.0),
        PREPARE_TEXT: ("50,000 reviews from tar.xz", 60.0),
    }
    for cell, (what, limit) in limits.items():
        if cell in results:
            yield at_most(f"{cell.task}: {what}", results[cell].seconds, limit, " s")
    loaded = results.get(LOAD_TEXT)
    if loaded is not None:
        what = f"text: one padded epoch of {loaded.found['reviews']:,.0f} reviews"
        yield at_most(what, loaded.found["seconds"], 15, " s")


def _memory_targets(results: Results) -> Iterator[Target]:
    for cell, result in results.items():
        if cell.step in ("prepare", "load"):
            yield at_most(f"{cell.task}: peak memory, {cell.step}", result.peak_mb, MEMORY_LIMIT_MB, " MB")


def _pathfinder_targets(results: Results) -> Iterator[Target]:
    found = {cell.step: result.found for cell, result in results.items() if cell.task == "pathfinder"}
    drawn, labels, original = (found.get(step) for step in ("draw", "labels", "references"))
    if drawn is not None:
        yield at_least("pathfinder (hard): images per second on one core", drawn["rate"], 50, "")
        what, value = "pathfinder: distractors per image", drawn["distractors"]
        yield close_to(what, value, REFERENCE_DISTRACTORS, 0.05)
        # The reference images determine their own mean less precisely than to five per cent.
        two_standard_errors = 2 * DISTRACTORS_STANDARD_ERROR / REFERENCE_DISTRACTORS
        yield close_to(f"{what}, within two standard errors", value, REFERENCE_DISTRACTORS, two_standard_errors)
    if labels is not None:
        yield close_to("pathfinder: share of connected pairs", labels["connected"], 0.5, 0.01)
    if drawn is not None and original is not None:
        yield close_to("pathfinder: mean pixel", drawn["mean"], original["mean"], 0.05)
        yield close_to("pathfinder: pixels above 40", drawn["bright"], original["bright"], 0.05)


def _measure_here(task: str, step: str, data_dir: str, source: str | None, limit: int | None) -> Result:
    """The work of the fresh process."""
    work: dict[str, Callable[[], dict[str, float]]] = {
        "prepare": lambda: _prepare(task, data_dir, source, limit),
        "load": lambda: _load(task, data_dir),
        "draw": lambda: _draw(limit or 1),
        "labels": lambda: _labels(limit),
        "references": lambda: _references(str(source)),
    }
    start = time.perf_counter()
    found = work[step]()
    seconds = time.perf_counter() - start
    rounded = {name: significant(value) or 0.0 for name, value in found.items()}
    return Result(significant(seconds) or 0.0, round(peak_bytes() / 2**20, 1), rounded)


def _prepare(task: str, data_dir: str, source: str | None, limit: int | None) -> dict[str, float]:
    from skyformer.lra import prepare

    prepare(task, data_dir=Path(data_dir), source=None if source is None else Path(source), limit=limit)
    return {}


def _load(task: str, data_dir: str) -> dict[str, float]:
    from skyformer.lra import evaluation_loader, load_task

    test = load_task(task, Path(data_dir)).test
    start = time.perf_counter()
    reviews = sum(len(batch) for batch in evaluation_loader(test, 32))
    return {"reviews": reviews, "seconds": time.perf_counter() - start}


def _draw(images: int) -> dict[str, float]:
    import numpy as np

    from skyformer.lra import pathfinder

    pathfinder.draw(np.random.default_rng(0))
    start = time.perf_counter()
    drawings = [pathfinder.draw(pathfinder.image_generator(0, 0, number)) for number in range(images)]
    rate = images / (time.perf_counter() - start)
    distractors = float(np.mean([len(drawing.distractors) for drawing in drawings]))
    return {"rate": rate, "distractors": distractors, **_pixels(np.stack([drawing.pixels for drawing in drawings]))}


def _labels(limit: int | None) -> dict[str, float]:
    """The share of connected pairs; the label is the first random draw for an image."""
    import numpy as np

    from skyformer.lra import pathfinder
    from skyformer.lra.tasks import TASKS, Split

    labels = [
        pathfinder.draw_label(pathfinder.image_generator(0, number, image))
        for number, split in enumerate(Split)
        for image in range(limit or TASKS["pathfinder"].sizes[split])
    ]
    return {"connected": float(np.mean(labels))}


def _references(folder: str) -> dict[str, float]:
    from skyformer.lra import pathfinder

    _, examples = next(pathfinder.read(Path(folder), pathfinder.Level.HARD))
    return _pixels(examples.tokens.values.reshape(-1, 32, 32))


def _pixels(images: np.ndarray[Any, Any]) -> dict[str, float]:
    return {"mean": float(images.mean()), "bright": float((images > 40).sum(axis=(1, 2)).mean())}
