"""Preparing is a pure function of its options, atomic, and safe to kill, to repeat and to run in several processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from skyformer.errors import DataError, InputError
from skyformer.lra import Prepared, load_task, pathfinder, preparation, prepare
from skyformer.lra.download import OfficialSource
from skyformer.lra.folders import MANIFEST, VERIFIED
from skyformer.lra.preparation import STAGING
from skyformer.lra.tasks import Split
from skyformer.processes import end_with_parent
from skyformer.report.progress import Silent
from tests.helpers import refused

from .fake_files import cifar_files, pair_files, review_files, write_folder, write_tar

SMALL = {"limit": 100, "max_length": 64}
PROCESSES = get_context("forkserver")
"""Starts processes from a server that has imported everything, so that each starts quickly."""
PROCESSES.set_forkserver_preload(["skyformer.lra.preparation", "datasets", __name__])


def hashes(prepared: Prepared) -> list[str]:
    return [record.sha256 for record in prepared.manifest.splits.values()]


@pytest.mark.parametrize(("task", "options"), [("listops", SMALL), ("pathfinder", {"limit": 5, "level": "easy"})])
def test_generated_data_is_a_pure_function_of_its_options(task: str, options: dict[str, int], tmp_path: Path) -> None:
    first = prepare(task, data_dir=tmp_path / "one", **options)
    again = prepare(task, data_dir=tmp_path / "two", **options)
    other = prepare(task, data_dir=tmp_path / "one", seed=1, **options)
    assert (first.folder / MANIFEST).read_text() == (again.folder / MANIFEST).read_text()
    assert not set(hashes(first)) & set(hashes(other))


def test_number_of_workers_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathfinder, "IMAGES_PER_CHUNK", 4)
    monkeypatch.setattr(pathfinder, "get_context", lambda _: PROCESSES)
    alone = prepare("pathfinder", limit=10, level="easy", data_dir=tmp_path / "one")
    together = prepare("pathfinder", limit=10, level="easy", data_dir=tmp_path / "two", workers=2)
    assert hashes(alone) == hashes(together)


def test_prepared_data_is_reused_unless_forced_or_damaged() -> None:
    first = prepare("listops", **SMALL)
    before = (first.folder / MANIFEST).stat().st_mtime_ns
    assert (first.fresh, prepare("listops", **SMALL).fresh) == (True, False)
    assert (first.folder / MANIFEST).stat().st_mtime_ns == before
    assert prepare("listops", force=True, **SMALL).fresh
    (first.folder / first.manifest.splits[Split.TRAIN].file).unlink()
    assert prepare("listops", **SMALL).fresh
    task = load_task("listops", **SMALL)
    rows = [task[split].stored.tokens[index].tobytes() for split in Split for index in range(100)]
    assert len(set(rows)) == 300, "splits do not overlap"


@pytest.mark.parametrize("task", ["text", "image"])
def test_dev_is_a_tenth_of_train_and_never_of_test(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = review_files(25) if task == "text" else cifar_files(monkeypatch, images_per_file=10)
    prepare(task, source=write_folder(tmp_path / task, files))
    loaded = load_task(task)
    assert [len(loaded[split]) for split in Split] == ([45, 5, 50] if task == "text" else [45, 5, 10])
    train, dev, test = ({loaded[split].stored.source(i) for i in range(len(loaded[split]))} for split in Split)
    assert not train & dev
    assert all(source.startswith(("train/", "data_batch")) for source in train | dev)
    assert all(source.startswith("test") for source in test)
    shares = np.bincount(loaded.dev.stored.labels)
    assert shares.max() - shares.min() <= 1


def test_limit_and_seed_choose_among_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pairs", pair_files(40))
    chosen = []
    for seed in (0, 1):
        prepare("retrieval", source=folder, limit=10, seed=seed)
        train = load_task("retrieval", limit=10, seed=seed).train
        assert np.bincount(train.stored.labels).tolist() == [5, 5]
        chosen.append([train.stored.source(index) for index in range(10)])
    assert chosen[0] != chosen[1]


def test_pathfinder_references(references: Path) -> None:
    prepare("pathfinder", source=references / "data/pathfinder32_ref200")
    task = load_task("pathfinder")
    assert [len(task[split]) for split in Split] == [160, 20, 20]


def test_expressions_from_files_must_not_be_too_long(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text(f"Source\tTarget\n[MAX {'1 ' * 20}]\t1\n")
    with pytest.raises(DataError, match="an example of listops must have at most 16 tokens; got 22"):
        prepare("listops", source=tmp_path, max_length=16)
    assert prepare("listops", source=tmp_path, max_length=32).manifest.splits[Split.TRAIN].longest == 22
    assert load_task("listops", max_length=32).train[0].tokens.tolist() == [12, *[2] * 20, 15]


def test_another_source_needs_force_and_a_failure_leaves_the_old_data(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "reviews.tar.gz", review_files(10))
    first = prepare("text", source=archive)
    before = {path.name for path in first.folder.iterdir()} | {VERIFIED}
    folder = write_folder(tmp_path / "folder", review_files(20))
    with refused(DataError, "already prepared from 'reviews.tar.gz'", "--force"):
        prepare("text", source=folder)
    archive.write_bytes(archive.read_bytes()[:500])
    with refused(DataError, "reviews.tar.gz"):
        prepare("text", source=archive, force=True)
    assert {path.name for path in first.folder.iterdir()} == before
    assert len(load_task("text").train) == 18
    prepare("text", source=folder, force=True)
    assert len(load_task("text").test) == 40


def test_offline_download_says_what_to_put_where(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preparation._OFFICIAL, "text", OfficialSource("http://127.0.0.1:9/aclImdb_v1.tar.gz"))
    monkeypatch.setattr("skyformer.lra.download.time.sleep", lambda _: None)
    with pytest.raises(DataError, match="put it at") as caught:
        prepare("text")
    place = data_dir / "downloads" / "aclImdb_v1.tar.gz"
    assert str(place) in str(caught.value)
    write_tar(place, review_files(10))
    assert prepare("text").fresh


def test_impossible_preparations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused(DataError, "does not exist"):
        prepare("text", source=tmp_path / "nowhere")
    with refused(InputError, "workers"):
        prepare("listops", workers=0)
    with refused(DataError, "cannot prepare listops"):
        prepare("listops", data_dir=tmp_path / "file")


FRESH, FOUND = 10, 11


class Halting(Silent):
    """Reports by files that examples were written or that it waits; after the first examples it halts until "go"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
        self.report("wrote")
        wait_for((self.folder / "go").exists)

    def note(self, message: str) -> None:
        self.report("waits")

    def report(self, word: str) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / word).touch()


def prepare_and_exit(folder: Path, progress: Halting, force: bool) -> None:
    result = prepare("listops", data_dir=folder, force=force, progress=progress, **SMALL)
    sys.exit(FRESH if result.fresh else FOUND)


def start(folder: Path, progress: Halting, force: bool = False) -> BaseProcess:
    process = PROCESSES.Process(target=prepare_and_exit, args=(folder, progress, force))
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_while_writing(data_dir: Path, tmp_path: Path, replacing: bool) -> None:
    """The old data stays, or there is none; the next preparation works and deletes what was left behind."""
    before = hashes(prepare("listops", **SMALL)) if replacing else []
    process = start(data_dir, Halting(tmp_path / "first"), force=replacing)
    wait_for((tmp_path / "first" / "wrote").exists)
    kill(process)
    folder = data_dir / "listops-length64-limit100"
    assert any(path.stat().st_size for path in (folder / STAGING).glob("*.arrow"))
    if replacing:
        assert len(load_task("listops", **SMALL).train) == 100
    else:
        with pytest.raises(DataError, match="not prepared"):
            load_task("listops", **SMALL)
    again = prepare("listops", force=replacing, **SMALL)
    assert again.fresh
    assert not replacing or hashes(again) == before
    assert not (folder / STAGING).exists()
    assert len(list(folder.glob("*.arrow"))) == 3


def test_two_processes_at_once(data_dir: Path, tmp_path: Path) -> None:
    first, second = (Halting(tmp_path / name) for name in ("first", "second"))
    processes = [start(data_dir, first)]
    wait_for((first.folder / "wrote").exists)
    processes.append(start(data_dir, second))
    wait_for((second.folder / "waits").exists)
    first.report("go")
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [FRESH, FOUND]
    assert len(load_task("listops", **SMALL).train) == 100


def begin_work(folder: Path) -> None:
    end_with_parent()
    (folder / f"{os.getpid()}.worker").touch()


def draw_with_workers(folder: Path) -> None:
    pathfinder.get_context = lambda _: get_context("fork")  # type: ignore[assignment]
    pathfinder.end_with_parent = partial(begin_work, folder)
    prepare("pathfinder", limit=2000, data_dir=folder, workers=2)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here to look for processes in")
def test_workers_of_a_killed_process_end(tmp_path: Path) -> None:
    process = PROCESSES.Process(target=draw_with_workers, args=(tmp_path,))
    process.start()
    wait_for(lambda: len(list(tmp_path.glob("*.worker"))) == 2)
    workers = [int(file.stem) for file in tmp_path.glob("*.worker")]
    assert all(is_running(worker) for worker in workers)
    kill(process)
    wait_for(lambda: not any(is_running(worker) for worker in workers))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        os.kill(pid, 0)
    except (OSError, IndexError):
        return False
    return state != "Z"
