"""Making a task ready: generate or read it, write it, and put it in place in one step.

Safe to run twice or in two processes at once: the second waits for the first and finds the work done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from skyformer.errors import DataError, InputError
from skyformer.lra import image, listops, listops_files, pathfinder, pathfinder_files, retrieval, text
from skyformer.lra.download import Download, OfficialSource
from skyformer.lra.examples import Examples, Integers, Ragged
from skyformer.lra.places import data_dir_or_default, downloads_dir, task_dir
from skyformer.lra.progress import Progress, Silent
from skyformer.lra.sampling import choose, hold_out
from skyformer.lra.storage import (
    FORMAT_VERSION,
    Manifest,
    SplitWriter,
    StoredSplit,
    Variant,
    commit,
    damage,
    in_batches,
    read_manifest,
    staging,
    sweep,
)
from skyformer.lra.tasks import Split
from skyformer.processes import end_with_parent

GENERATED = "generated"
DOWNLOADED = "official download"
_IMAGES_A_RUN = 100


@dataclass(frozen=True)
class Prepared:
    """A task that is ready, where it is, and whether this call made it."""

    folder: Path
    manifest: Manifest
    fresh: bool


def prepare(
    task: str,
    *,
    data_dir: Path | None = None,
    source: Path | None = None,
    seed: int = 0,
    limit: int | None = None,
    level: str | None = None,
    max_length: int | None = None,
    workers: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make a task ready and say where it is.

    ListOps and Pathfinder are generated, the others downloaded, unless `source` names files. `limit` keeps
    at most so many examples of each split. `max_length` makes ListOps shorter; texts are kept whole, and cut as
    they are loaded. What is ready already is left as it is, unless `force` is set.
    """
    variant = Variant.of(task, seed=seed, limit=limit, level=level, max_length=max_length)
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if source is not None and not source.exists():
        raise DataError(f"{source} does not exist; --from needs the files of {task}")
    root = data_dir_or_default(data_dir)
    folder = task_dir(root, variant)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        job = _Job(variant, folder, root, source, workers, progress or Silent())
        with _turn(folder, job.progress):
            return _prepare_locked(job, force)
    except OSError as error:
        raise DataError(f"cannot prepare {variant.name} in {folder}: {error}") from error


@contextmanager
def _turn(folder: Path, progress: Progress) -> Iterator[None]:
    """Wait until no other process prepares the same folder; the lock of a killed one is free."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"another process is preparing {folder}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Job:
    """One preparation: what is wanted, and where it is written."""

    variant: Variant
    folder: Path
    root: Path
    source: Path | None
    workers: int
    progress: Progress
    written: dict[Split, Path] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """What the manifest names as source."""
        if self.source is not None:
            return self.source.resolve().name
        return GENERATED if self.variant.task in _GENERATORS else DOWNLOADED

    def fetch(self, official: OfficialSource) -> Path:
        """The user's files, or the official ones."""
        return self.source or Download(official, downloads_dir(self.root), self.progress).run()


def _prepare_locked(job: _Job, force: bool) -> Prepared:
    existing = None if force else _usable(job)
    if existing is not None:
        return Prepared(job.folder, existing, fresh=False)
    sweep(job.folder, _standing(job.folder))
    with staging(job.folder) as place:
        manifest = _build(job, place)
        commit(job.folder, manifest, job.written)
    return Prepared(job.folder, manifest, fresh=True)


def _standing(folder: Path) -> Manifest | None:
    """What is there now and stays until the new files are complete; a damaged manifest protects nothing."""
    try:
        return read_manifest(folder)
    except DataError:
        return None


def _usable(job: _Job) -> Manifest | None:
    """What is there already, if it is whole and what was asked for."""
    manifest = read_manifest(job.folder)
    if manifest is None or damage(job.folder, manifest, thorough=False):
        return None
    if manifest.source != job.origin:
        raise DataError(
            f"{job.variant.name} is already there, from {manifest.source!r}, in {job.folder}; "
            f"use --force to replace it with {job.origin!r}"
        )
    return manifest


def _build(job: _Job, place: Path) -> Manifest:
    if job.source is None and job.variant.task in _GENERATORS:
        batches = _GENERATORS[job.variant.task](job)
    else:
        batches = _READERS[job.variant.task](job, place)
    writers = _write(batches, job, place)
    records = {split: writer.record(split) for split, writer in writers.items()}
    job.written = {split: writer.path for split, writer in writers.items()}
    return Manifest(
        format=FORMAT_VERSION,
        skyformer=_package_version(),
        variant=job.variant,
        source=job.origin,
        splits=records,
    )


def _package_version() -> str:
    try:
        return metadata.version("skyformer")
    except metadata.PackageNotFoundError:
        return "unknown"


def _write(batches: Iterable[tuple[Split, Examples]], job: _Job, place: Path) -> dict[Split, SplitWriter]:
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(place / f"{split}.arrow", job.variant.spec)) for split in Split
        }
        for split, examples in batches:
            writers[split].write(examples)
            job.progress.advance(len(examples))
    return writers


def _generate_listops(job: _Job) -> Iterator[tuple[Split, Examples]]:
    variant = job.variant
    job.progress.begin("writing expressions", sum(variant.size(split) for split in Split))
    options = listops.ListOpsOptions.up_to(variant.spec.max_length)
    seen: set[bytes] = set()
    for number, split in enumerate(Split):
        for examples in listops.generate(variant.size(split), (variant.seed, number), seen, options):
            yield split, examples


def _generate_pathfinder(job: _Job) -> Iterator[tuple[Split, Examples]]:
    sizes = [job.variant.size(split) for split in Split]
    job.progress.begin("drawing paths", sum(sizes))
    runs = [
        _Run(
            job.variant.seed, split, job.variant.level or pathfinder.Level.HARD, start, min(start + _IMAGES_A_RUN, size)
        )
        for split, size in zip(Split, sizes, strict=True)
        for start in range(0, size, _IMAGES_A_RUN)
    ]
    for run, examples in zip(runs, _in_parallel(_draw, runs, job.workers), strict=True):
        yield run.split, examples


@dataclass(frozen=True)
class _Run:
    """Some images of a split, drawn in one go."""

    seed: int
    split: Split
    level: pathfinder.Level
    start: int
    stop: int


def _draw(run: _Run) -> Examples:
    split_number = list(Split).index(run.split)
    generators = (pathfinder.image_generator(run.seed, split_number, n) for n in range(run.start, run.stop))
    drawings = [pathfinder.draw(generator, run.level) for generator in generators]
    pixels = np.stack([drawing.pixels.reshape(-1) for drawing in drawings])
    labels = np.array([drawing.label for drawing in drawings], np.uint8)
    return Examples(Ragged.from_matrix(pixels), labels, [GENERATED] * len(labels))


def _in_parallel(work: Callable[[_Run], Examples], runs: list[_Run], workers: int) -> Iterator[Examples]:
    """The results in order, whatever the number of processes."""
    if workers == 1 or len(runs) < 2:
        yield from map(work, runs)
        return
    with ProcessPoolExecutor(min(workers, len(runs)), get_context("spawn"), end_with_parent) as pool:
        yield from pool.map(work, runs)


def _read_listops(job: _Job, place: Path) -> Iterator[tuple[Split, Examples]]:
    if job.source is None:
        raise InputError("ListOps files have no official source")
    job.progress.begin("reading expressions", None)
    return _limited(listops_files.read(job.source), job, place)


def _read_retrieval(job: _Job, place: Path) -> Iterator[tuple[Split, Examples]]:
    path = job.fetch(retrieval.OFFICIAL)
    job.progress.begin("reading pairs", None)
    return _limited(retrieval.read(path), job, place)


def _read_text(job: _Job, place: Path) -> Iterator[tuple[Split, Examples]]:
    path = job.fetch(text.OFFICIAL)
    job.progress.begin("reading reviews", None)
    parts = text.read(path)
    for split, examples in parts.items():
        if len(examples) != text.REVIEWS_A_PART:
            job.progress.note(f"{path} has {len(examples):,} {split} reviews, the official {text.REVIEWS_A_PART:,}")
    whole = _stage(((split, batch) for split in parts for batch in in_batches(parts[split])), job, place)
    return _with_dev_from_train(whole, job, share=10)


def _read_image(job: _Job, place: Path) -> Iterator[tuple[Split, Examples]]:
    path = job.fetch(image.OFFICIAL)
    job.progress.begin("reading images", None)
    return _with_dev_from_train(_stage(image.read(path), job, place), job, share=10)


def _read_pathfinder(job: _Job, place: Path) -> Iterator[tuple[Split, Examples]]:
    if job.source is None or job.variant.level is None:
        raise InputError("Pathfinder files have no official source")
    job.progress.begin("reading drawings", None)
    images = pathfinder_files.read(job.source, job.variant.level)
    whole = _stage(((Split.TRAIN, examples) for examples in images), job, place)[Split.TRAIN]
    rest, test = hold_out(whole.labels, len(whole) // 10, job.variant.seed)
    train, dev = hold_out(whole.labels[rest], len(whole) // 10, job.variant.seed)
    rows = {Split.TRAIN: rest[train], Split.DEV: rest[dev], Split.TEST: test}
    return _chosen({split: (whole, rows[split]) for split in Split}, job)


def _stage(batches: Iterable[tuple[Split, Examples]], job: _Job, place: Path) -> dict[Split, StoredSplit]:
    """Write the parts as they come, so that choosing among them takes no memory."""
    with ExitStack() as stack:
        writers: dict[Split, SplitWriter] = {}
        for split, examples in batches:
            if split not in writers:
                path = place / f"whole-{split}.arrow"
                writers[split] = stack.enter_context(SplitWriter(path, job.variant.spec))
            writers[split].write(examples)
            job.progress.advance(len(examples))
    return {split: StoredSplit(writer.path) for split, writer in writers.items()}


def _limited(batches: Iterator[tuple[Split, Examples]], job: _Job, place: Path) -> Iterator[tuple[Split, Examples]]:
    """All examples as they come, or with a limit a choice of them."""
    if job.variant.limit is None:
        return batches
    parts = _stage(batches, job, place)
    return _chosen({split: (part, np.arange(len(part))) for split, part in parts.items()}, job)


def _with_dev_from_train(parts: dict[Split, StoredSplit], job: _Job, share: int) -> Iterator[tuple[Split, Examples]]:
    whole, test = parts[Split.TRAIN], parts[Split.TEST]
    train, dev = hold_out(whole.labels, len(whole) // share, job.variant.seed)
    rows = {Split.TRAIN: (whole, train), Split.DEV: (whole, dev), Split.TEST: (test, np.arange(len(test)))}
    return _chosen(rows, job)


def _chosen(rows: dict[Split, tuple[StoredSplit, Integers]], job: _Job) -> Iterator[tuple[Split, Examples]]:
    """The rows of each split, or with a limit a choice of them."""
    limit = job.variant.limit
    job.progress.begin("writing", sum(min(limit or len(some), len(some)) for _, some in rows.values()))
    for split, (part, some) in rows.items():
        kept = some if limit is None else some[choose(part.labels[some], limit, job.variant.seed)]
        for examples in part.examples(kept):
            yield split, examples


_GENERATORS: dict[str, Callable[[_Job], Iterator[tuple[Split, Examples]]]] = {
    "listops": _generate_listops,
    "pathfinder": _generate_pathfinder,
}
_READERS: dict[str, Callable[[_Job, Path], Iterator[tuple[Split, Examples]]]] = {
    "listops": _read_listops,
    "text": _read_text,
    "retrieval": _read_retrieval,
    "pathfinder": _read_pathfinder,
    "image": _read_image,
}
