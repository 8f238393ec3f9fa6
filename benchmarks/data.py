"""Measures what the Long Range Arena data promises: prints each figure with its bound, keeps them as JSON.

    python benchmarks/data.py --references FOLDER [--cifar10 FOLDER] [--output results/data.json]

FOLDER holds data/imdb, data/aan and data/pathfinder32_ref200; without it, what needs them is left out.
Every measurement runs in a process of its own, so that its peak of memory is its own too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from skyformer.lra import evaluation_loader, load_task, pathfinder, prepare
from skyformer.lra.tasks import TASKS, Split

MEGABYTES = 1024
MEMORY_BOUND = 1_000
IMAGES_MEASURED = 3_000


@dataclass(frozen=True)
class Figure:
    """One number, the bound it is held against, and whether it keeps it."""

    name: str
    value: float
    unit: str
    bound: str
    passed: bool


@dataclass(frozen=True)
class Measured:
    """What one measurement took, and what it found."""

    seconds: float
    peak_megabytes: float
    found: dict[str, float]


Work = Callable[[Path, Path | None], dict[str, float]]


def at_most(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, round(value, 3), unit, f"at most {bound:g}", value <= bound)


def at_least(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, round(value, 3), unit, f"at least {bound:g}", value >= bound)


def close_to(name: str, value: float, reference: float, tolerance: float) -> Figure:
    passed = abs(value / reference - 1) <= tolerance
    return Figure(name, round(value, 3), "", f"{reference:.4g} within {tolerance:.0%}", passed)


def _timed(work: Work, data_dir: Path, source: Path | None) -> Measured:
    start = time.perf_counter()
    found = work(data_dir, source)
    seconds = time.perf_counter() - start
    return Measured(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MEGABYTES, found)


def measure(work: Work, data_dir: Path, source: Path | None = None) -> Measured:
    """Run `work` in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_timed, work, data_dir, source).result()


def prepare_listops(data_dir: Path, _: Path | None) -> dict[str, float]:
    prepare("listops", data_dir=data_dir)
    return {}


def prepare_text(data_dir: Path, source: Path | None) -> dict[str, float]:
    prepare("text", data_dir=data_dir, source=source)
    return {}


def prepare_retrieval(data_dir: Path, source: Path | None) -> dict[str, float]:
    prepare("retrieval", data_dir=data_dir, source=source)
    return {}


def prepare_image(data_dir: Path, source: Path | None) -> dict[str, float]:
    prepare("image", data_dir=data_dir, source=source)
    return {}


def prepare_pathfinder(data_dir: Path, _: Path | None) -> dict[str, float]:
    prepare("pathfinder", data_dir=data_dir, limit=300)
    return {}


def iterate_reviews(data_dir: Path, _: Path | None) -> dict[str, float]:
    test = load_task("text", data_dir).test
    start = time.perf_counter()
    reviews = sum(len(batch) for batch in evaluation_loader(test, 32))
    return {"reviews": reviews, "seconds": time.perf_counter() - start}


def draw_images(_: Path, __: Path | None) -> dict[str, float]:
    pathfinder.draw(np.random.default_rng(0))
    start = time.perf_counter()
    drawings = [pathfinder.draw(pathfinder.image_generator(0, 0, n)) for n in range(IMAGES_MEASURED)]
    seconds = time.perf_counter() - start
    statistics = _statistics(np.stack([drawing.pixels for drawing in drawings]))
    distractors = float(np.mean([len(drawing.distractors) for drawing in drawings]))
    return {"rate": IMAGES_MEASURED / seconds, "distractors": distractors, **statistics}


def balance_of_labels(_: Path, __: Path | None) -> dict[str, float]:
    """The share of connected pairs in the whole task; a label is the first draw of its image."""
    labels = [
        pathfinder.draw_label(pathfinder.image_generator(0, number, image))
        for number, split in enumerate(Split)
        for image in range(TASKS["pathfinder"].sizes[split])
    ]
    return {"connected": float(np.mean(labels))}


def _statistics(images: np.ndarray) -> dict[str, float]:
    return {"mean": float(images.mean()), "bright": float((images > 40).sum(axis=(1, 2)).mean())}


def listops_figures(data_dir: Path) -> Iterator[Figure]:
    listops = measure(prepare_listops, data_dir)
    yield at_most("listops: 100,000 expressions, one process", listops.seconds, "s", 120)
    yield at_most("listops: memory while preparing", listops.peak_megabytes, "MB", MEMORY_BOUND)


def pathfinder_figures(data_dir: Path, references: Path | None) -> Iterator[Figure]:
    drawn = measure(draw_images, data_dir)
    yield at_least("pathfinder (hard): images a second and core", drawn.found["rate"], "/s", 50)
    connected = measure(balance_of_labels, data_dir).found["connected"]
    yield close_to("pathfinder: share of connected pairs, whole task", connected, 0.5, 0.01)
    yield close_to("pathfinder: distractors placed", drawn.found["distractors"], 1.25, 0.05)
    # The 200 references know their own mean to 0.075 only, which is more than five per cent of it.
    name = "pathfinder: distractors, two standard errors"
    yield close_to(name, drawn.found["distractors"], 1.25, 2 * 0.075 / 1.25)
    peak = measure(prepare_pathfinder, data_dir).peak_megabytes
    yield at_most("pathfinder: memory while preparing", peak, "MB", MEMORY_BOUND)
    if references is not None:
        folder = references / "data/pathfinder32_ref200"
        _, examples = next(pathfinder.read(folder, pathfinder.Level.HARD))
        expected = _statistics(examples.tokens.values.reshape(-1, 32, 32))
        yield close_to("pathfinder: mean pixel", drawn.found["mean"], expected["mean"], 0.05)
        yield close_to("pathfinder: pixels above 40", drawn.found["bright"], expected["bright"], 0.05)


def text_figures(data_dir: Path, references: Path) -> Iterator[Figure]:
    text = measure(prepare_text, data_dir, references / "data/imdb/aclImdb.tar.xz")
    yield at_most("text: 50,000 reviews from tar.xz", text.seconds, "s", 60)
    yield at_most("text: memory while preparing", text.peak_megabytes, "MB", MEMORY_BOUND)
    epoch = measure(iterate_reviews, data_dir)
    name = f"text: one padded epoch of {epoch.found['reviews']:,.0f} reviews"
    yield at_most(name, epoch.found["seconds"], "s", 15)
    yield at_most("text: memory while loading, torch included", epoch.peak_megabytes, "MB", MEMORY_BOUND)


def memory_figure(task: str, work: Work, data_dir: Path, source: Path) -> Iterator[Figure]:
    peak = measure(work, data_dir, source).peak_megabytes
    yield at_most(f"{task}: memory while preparing", peak, "MB", MEMORY_BOUND)


def figures(data_dir: Path, references: Path | None, cifar10: Path | None) -> Iterator[Figure]:
    yield from listops_figures(data_dir)
    yield from pathfinder_figures(data_dir, references)
    if references is not None:
        yield from text_figures(data_dir, references)
        yield from memory_figure("retrieval", prepare_retrieval, data_dir, references / "data/aan")
    if cifar10 is not None:
        yield from memory_figure("image", prepare_image, data_dir, cifar10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("SKYFORMER_TEST_REFERENCES")
    parser.add_argument("--references", type=Path, default=Path(default) if default else None)
    parser.add_argument("--cifar10", type=Path, help="a folder of CIFAR-10's binary files")
    parser.add_argument("--output", type=Path, default=Path("results/data.json"))
    options = parser.parse_args()
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        for figure in figures(Path(folder), options.references, options.cifar10):
            verdict = "pass" if figure.passed else "FAIL"
            print(
                f"{verdict}  {figure.name:<52} {figure.value:>10,.3f} {figure.unit:<3} ({figure.bound})",
                flush=True,
            )
            kept.append(asdict(figure))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"cores": os.cpu_count(), "figures": kept}, indent=2) + "\n")
    return 0 if all(figure["passed"] for figure in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
