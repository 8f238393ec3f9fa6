"""Prepare a task: generate, download or read it, write it, and put it in place in one step.

Files are written in a subfolder and named after their content; the manifest is replaced last and atomically. Until then
the old manifest and its files stay valid, so a preparation can be killed at any time, and the next one deletes what it
left behind. Two processes may prepare the same task: the second waits for the first and uses its result.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from skyformer.checks import check_at_least
from skyformer.environment import installed_version
from skyformer.errors import DataError
from skyformer.files import sync_folder, write_atomic
from skyformer.lra import image, listops, pathfinder, retrieval, text
from skyformer.lra.download import Download
from skyformer.lra.examples import Batches, Integers, choose, hold_out
from skyformer.lra.folders import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Variant,
    data_dir_or_default,
    find_changed,
    read_manifest,
)
from skyformer.lra.storage import SplitWriter, StoredSplit
from skyformer.lra.tasks import Split
from skyformer.report.progress import Progress, Silent

DOWNLOADS = "downloads"
STAGING = "staging"
_GENERATED = ("listops", "pathfinder")
_READERS: dict[str, Callable[[Path], Batches]] = {
    "listops": listops.read,
    "text": text.read,
    "retrieval": retrieval.read,
    "image": image.read,
}
_OFFICIAL = {"text": text.OFFICIAL, "retrieval": retrieval.OFFICIAL, "image": image.OFFICIAL}
_HELD_OUT = {"text": [Split.DEV], "image": [Split.DEV], "pathfinder": [Split.TEST, Split.DEV]}
"""Splits that the official files do not have: each becomes a tenth of the training examples."""


@dataclass(frozen=True)
class Prepared:
    """A prepared task, its folder, and whether this call wrote it."""

    folder: Path
    manifest: Manifest
    fresh: bool


def prepare(
    task: str,
    *,
    data_dir: Path | str | None = None,
    source: Path | None = None,
    seed: int = 0,
    limit: int | None = None,
    level: str | None = None,
    max_length: int | None = None,
    workers: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Prepare a task, unless it is prepared already.

    ListOps and Pathfinder are generated and the other tasks downloaded, unless `source` is given.

    Args:
        task: listops, text, retrieval, pathfinder or image.
        data_dir: the data folder; by default that of the environment variable SKYFORMER_DATA, or the user's.
        source: the official archive, or a folder with its files, to read instead.
        seed: another seed generates other examples, or chooses other dev examples.
        limit: at most this many examples per split.
        level: easy, intermediate or hard; Pathfinder only, hard by default.
        max_length: generate ListOps expressions shorter than this; other tasks are shortened by `load_task`.
        workers: number of processes that draw Pathfinder images; the result does not depend on it.
        force: prepare again, even if the data is there or comes from another source.
        progress: receives the progress; nothing is shown by default.
    """
    variant = Variant.of(task, seed=seed, limit=limit, level=level, max_length=max_length)
    check_at_least("workers", workers, 1)
    if source is not None and not source.exists():
        raise DataError(f"{source} does not exist; expected the files of {task}")
    if source is not None and not _is_utf8(source.resolve().name):
        raise DataError(f"{source} must have a name in UTF-8, because the manifest records it; rename it")
    root = data_dir_or_default(data_dir)
    job = _Job(variant, root / variant.name, root / DOWNLOADS, source, workers, progress or Silent())
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(job.folder, job.progress):
            return _prepare_locked(job, force)
    except OSError as error:
        raise DataError(f"cannot prepare {variant.name} in {job.folder}: {error}") from error


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def lock_folder(folder: Path, progress: Progress) -> Iterator[None]:
    """Wait until no other process prepares the same folder; the lock of a killed process is free."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"note: another process is preparing {folder}; waiting for it to finish")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class _Job:
    """One preparation: what to prepare, from what and where."""

    variant: Variant
    folder: Path
    downloads: Path
    source: Path | None
    workers: int
    progress: Progress

    @property
    def is_generated(self) -> bool:
        return self.source is None and self.variant.task in _GENERATED

    @property
    def origin(self) -> str:
        """The source that the manifest names."""
        if self.source is not None:
            return self.source.resolve().name
        return "generated" if self.is_generated else "official download"


def _prepare_locked(job: _Job, force: bool) -> Prepared:
    existing = None if force else _usable(job)
    if existing is not None:
        return Prepared(job.folder, existing, fresh=False)
    with suppress(DataError):  # a damaged manifest protects no files
        existing = read_manifest(job.folder)
    delete_leftovers(job.folder, existing)
    staging = job.folder / STAGING
    staging.mkdir()
    try:
        manifest = _build(job, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Prepared(job.folder, manifest, fresh=True)


def _usable(job: _Job) -> Manifest | None:
    """The manifest of the data that is there, if it is complete and from the same source."""
    manifest = read_manifest(job.folder)
    if manifest is None or find_changed(job.folder, manifest):
        return None
    if manifest.source != job.origin:
        raise DataError(
            f"{job.variant.name} is already prepared from {manifest.source!r} in {job.folder}; "
            f"use --force to replace it with {job.origin!r}"
        )
    return manifest


def delete_leftovers(folder: Path, manifest: Manifest | None) -> None:
    """Delete what a killed or replaced preparation left behind."""
    in_use = {record.file for record in manifest.splits.values()} if manifest else set()
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    for path in (*folder.glob("*.arrow"), *folder.glob(".*.partial")):
        if path.name not in in_use:
            with suppress(OSError):  # Windows cannot delete an open file; the next preparation will
                path.unlink()


def _build(job: _Job, staging: Path) -> Manifest:
    """Write the files and the manifest."""
    return put_in_place(job.folder, job.variant, job.origin, _write_examples(job, staging))


def put_in_place(folder: Path, variant: Variant, source: str, writers: Mapping[Split, SplitWriter]) -> Manifest:
    """Move the written files into the folder, and replace the manifest last."""
    manifest = Manifest(
        format=FORMAT_VERSION,
        skyformer=installed_version("skyformer") or "unknown",
        variant=variant,
        source=source,
        splits={split: writers[split].record(split) for split in Split},
    )
    for split, writer in writers.items():
        writer.path.replace(folder / manifest.splits[split].file)
    sync_folder(folder)
    # Manifests of the five tasks stay readable by earlier versions, which do not know `own`.
    exclude = {"variant": {"own"}} if variant.own is None else None
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=2, exclude=exclude) + "\n")
    delete_leftovers(folder, manifest)
    return manifest


def _write_examples(job: _Job, staging: Path) -> dict[Split, SplitWriter]:
    """Write all examples; if not all are needed or splits are missing, write a choice of them from those files."""
    if job.is_generated:
        total = sum(job.variant.size(split) for split in Split)
        return write_splits(_generate(job), list(Split), job.variant, staging, job.progress, "generating", total)
    path = job.source or Download(_OFFICIAL[job.variant.task], job.downloads, job.progress).run()
    held_out = _HELD_OUT.get(job.variant.task, [])
    in_files = [split for split in Split if split not in held_out]
    writers = write_splits(_read(job, path), in_files, job.variant, staging, job.progress, "reading")
    found, official = sum(len(writer) for writer in writers.values()), sum(job.variant.spec.sizes.values())
    if found != official:
        job.progress.note(f"note: {path} has {found:,} examples; the complete official data has {official:,}")
    if not held_out and job.variant.limit is None:
        return writers
    stored = {split: StoredSplit(writer.path) for split, writer in writers.items()}
    rows = _choose_rows(stored, held_out, job.variant)
    chosen = (batch for split in Split for batch in rows[split][0].batches(split, rows[split][1]))
    total = sum(len(some) for _, some in rows.values())
    return write_splits(chosen, list(Split), job.variant, staging, job.progress, "writing", total)


def write_splits(
    batches: Batches,
    splits: list[Split],
    variant: Variant,
    staging: Path,
    progress: Progress,
    action: str,
    total: int | None = None,
) -> dict[Split, SplitWriter]:
    """Write examples to one file per split in the folder `staging`; `action` names the files and the progress."""
    title = f"{action} {variant.task}"
    progress.begin(title, total)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(staging / f"{action}-{split}.arrow", variant.spec))
            for split in splits
        }
        for split, examples in batches:
            writers[split].write(examples)
            progress.update(title, advance=len(examples))
    progress.end(title)
    return writers


def _generate(job: _Job) -> Batches:
    variant = job.variant
    sizes = {split: variant.size(split) for split in Split}
    if variant.task == "listops":
        return listops.generate(sizes, variant.seed, listops.ListOpsOptions.up_to(variant.spec.max_length))
    return pathfinder.generate(sizes, variant.seed, variant.level or pathfinder.Level.HARD, job.workers)


def _read(job: _Job, path: Path) -> Batches:
    if job.variant.task == "pathfinder":
        return pathfinder.read(path, job.variant.level or pathfinder.Level.HARD)
    return _READERS[job.variant.task](path)


def _choose_rows(
    stored: dict[Split, StoredSplit], held_out: list[Split], variant: Variant
) -> dict[Split, tuple[StoredSplit, Integers]]:
    """The rows of each split, and the file they are in."""
    rows = {split: (part, np.arange(len(part))) for split, part in stored.items()}
    train = stored[Split.TRAIN]
    for split in held_out:
        remaining = rows[Split.TRAIN][1]
        kept, tenth = hold_out(train.labels[remaining], len(train) // 10, variant.seed)
        rows |= {Split.TRAIN: (train, remaining[kept]), split: (train, remaining[tenth])}
    if variant.limit is None:
        return rows
    return {
        split: (part, some[choose(part.labels[some], variant.limit, variant.seed)])
        for split, (part, some) in rows.items()
    }
