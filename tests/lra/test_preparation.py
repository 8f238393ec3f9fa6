"""Preparing is pure, atomic, and safe to kill, to repeat and to run in several processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from skyformer.errors import DataError, InputError
from skyformer.lra import load_task, preparation, prepare
from skyformer.lra.download import OfficialSource
from skyformer.lra.storage import MANIFEST, STAGING
from skyformer.lra.tasks import Split
from skyformer.processes import end_with_parent

from .stand_ins import cifar_files, pair_files, review_files, write_folder, write_tar


def hashes(prepared: preparation.Prepared) -> list[str]:
    return [record.sha256 for record in prepared.manifest.splits.values()]


@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_generated_sets_are_pure_functions_of_their_options(task: str, tmp_path: Path) -> None:
    first = prepare(task, limit=8, data_dir=tmp_path / "one")
    again = prepare(task, limit=8, data_dir=tmp_path / "two")
    other = prepare(task, limit=8, seed=1, data_dir=tmp_path / "one")
    assert hashes(first) == hashes(again)
    assert (first.folder / MANIFEST).read_text() == (again.folder / MANIFEST).read_text()
    assert not set(hashes(first)) & set(hashes(other))


def test_number_of_workers_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_IMAGES_A_RUN", 4)
    alone = prepare("pathfinder", limit=10, level="easy", data_dir=tmp_path / "one")
    together = prepare("pathfinder", limit=10, level="easy", data_dir=tmp_path / "two", workers=2)
    assert hashes(alone) == hashes(together)


def test_splits_do_not_overlap() -> None:
    prepare("listops", limit=100)
    task = load_task("listops", limit=100)
    rows = [task[split].stored.tokens[index].tobytes() for split in Split for index in range(100)]
    assert len(set(rows)) == 300


def test_second_run_leaves_the_first_as_it_is(data_dir: Path) -> None:
    first = prepare("listops", limit=10)
    before = (first.folder / MANIFEST).stat().st_mtime_ns
    second = prepare("listops", limit=10)
    assert (first.fresh, second.fresh) == (True, False)
    assert (first.folder / MANIFEST).stat().st_mtime_ns == before


def test_force_makes_it_again() -> None:
    prepare("listops", limit=10)
    assert prepare("listops", limit=10, force=True).fresh


def test_damaged_data_is_made_again() -> None:
    prepared = prepare("listops", limit=10)
    (prepared.folder / prepared.manifest.splits[Split.TRAIN].file).unlink()
    assert prepare("listops", limit=10).fresh
    assert len(load_task("listops", limit=10).train) == 10


def test_text_dev_is_a_tenth_of_train_and_never_of_test(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "reviews.tar.gz", review_files(50))
    prepare("text", source=archive)
    task = load_task("text")
    assert [len(task[split]) for split in Split] == [90, 10, 100]
    sources = {split: {task[split].stored.source(i) for i in range(len(task[split]))} for split in Split}
    assert all(source.startswith("train/") for source in sources[Split.DEV])
    assert all(source.startswith("test/") for source in sources[Split.TEST])
    assert not sources[Split.DEV] & sources[Split.TRAIN]
    assert np.bincount(task.dev.stored.labels).tolist() == [5, 5]


def test_limit_and_seed_choose_among_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pairs", pair_files(40))
    chosen = []
    for seed in (0, 1):
        prepare("retrieval", source=folder, limit=10, seed=seed)
        train = load_task("retrieval", limit=10, seed=seed).train
        assert np.bincount(train.stored.labels).tolist() == [5, 5]
        chosen.append([train.stored.source(index) for index in range(10)])
    assert chosen[0] != chosen[1]


def test_image_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("image", source=write_folder(tmp_path / "cifar", cifar_files(monkeypatch)))
    task = load_task("image")
    assert [len(task[split]) for split in Split] == [90, 10, 20]
    assert np.bincount(task.dev.stored.labels).tolist() == [1] * 10


def test_pathfinder_references(references: Path) -> None:
    prepare("pathfinder", source=references / "data/pathfinder32_ref200")
    task = load_task("pathfinder")
    assert [len(task[split]) for split in Split] == [160, 20, 20]


def test_listops_from_files(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text("Source\tTarget\n[MAX 1 2 ]\t2\n[MIN 1 2 ]\t1\n")
    prepare("listops", source=tmp_path)
    assert load_task("listops").train[1].tokens.tolist() == [11, 2, 3, 15]


def test_files_with_longer_expressions_than_asked_for(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text(f"Source\tTarget\n[MAX {'1 ' * 20}]\t1\n")
    with pytest.raises(DataError, match="an example of listops has 22 tokens, at most 16"):
        prepare("listops", source=tmp_path, max_length=16)
    assert prepare("listops", source=tmp_path, max_length=32).manifest.splits[Split.TRAIN].longest == 22


def test_another_source_needs_force(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "reviews.tar.gz", review_files(10))
    folder = write_folder(tmp_path / "folder", review_files(20))
    prepare("text", source=archive)
    with pytest.raises(DataError, match=r"already there, from 'reviews.tar.gz'.*--force"):
        prepare("text", source=folder)
    prepare("text", source=folder, force=True)
    assert len(load_task("text").test) == 40


def test_failure_leaves_what_was_there(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "reviews.tar.gz", review_files(10))
    first = prepare("text", source=archive)
    before = sorted(path.name for path in first.folder.iterdir())
    archive.write_bytes(archive.read_bytes()[:500])
    with pytest.raises(DataError, match=r"reviews\.tar\.gz"):
        prepare("text", source=archive, force=True)
    assert sorted(path.name for path in first.folder.iterdir()) == before
    assert len(load_task("text").train) == 18


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        prepare("text", source=tmp_path / "nowhere")
    with pytest.raises(InputError, match="workers"):
        prepare("listops", workers=0)


def test_offline_download_says_what_to_put_where(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation.text, "OFFICIAL", OfficialSource("http://127.0.0.1:9/aclImdb_v1.tar.gz"))
    monkeypatch.setattr("skyformer.lra.download.time.sleep", lambda _: None)
    with pytest.raises(DataError, match="put it at") as caught:
        prepare("text")
    place = data_dir / "downloads" / "aclImdb_v1.tar.gz"
    assert str(place) in str(caught.value)
    write_tar(place, review_files(10))
    assert prepare("text").fresh


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot prepare listops"):
        prepare("listops", data_dir=tmp_path / "file")


# A server that has everything imported already, so that each process starts at once.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["skyformer.lra.preparation", __name__])
FRESH, FOUND = 10, 11


class Halting:
    """Says in files that examples were written or another is waited for; after the first it halts until told to go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, what: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None:
        self.say("wrote")
        wait_for((self.folder / "go").exists)

    def note(self, message: str) -> None:
        self.say("waits")

    def say(self, word: str) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / word).touch()


def prepare_and_exit(folder: Path, progress: Halting, force: bool) -> None:
    result = prepare("listops", limit=200, max_length=512, data_dir=folder, force=force, progress=progress)
    sys.exit(FRESH if result.fresh else FOUND)


def start(folder: Path, progress: Halting, force: bool = False) -> BaseProcess:
    process = PROCESSES.Process(target=prepare_and_exit, args=(folder, progress, force))
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def wait_for(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_killed_while_writing_then_run_again(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "listops-length512-limit200"
    process = start(data_dir, Halting(tmp_path / "first"))
    wait_for((tmp_path / "first" / "wrote").exists)
    kill(process)
    assert any(path.stat().st_size for path in (folder / STAGING).glob("*.arrow"))
    assert not (folder / MANIFEST).exists()
    with pytest.raises(DataError, match="not prepared"):
        load_task("listops", limit=200, max_length=512)
    assert prepare("listops", limit=200, max_length=512).fresh
    assert not (folder / STAGING).exists()
    assert len(list(folder.glob("*.arrow"))) == 3


def test_killed_while_replacing_leaves_what_was_there(data_dir: Path, tmp_path: Path) -> None:
    before = hashes(prepare("listops", limit=200, max_length=512))
    process = start(data_dir, Halting(tmp_path / "first"), force=True)
    wait_for((tmp_path / "first" / "wrote").exists)
    kill(process)
    assert len(load_task("listops", limit=200, max_length=512).train) == 200
    assert hashes(prepare("listops", limit=200, max_length=512)) == before


def begin_work(folder: Path) -> None:
    end_with_parent()
    (folder / f"{os.getpid()}.worker").touch()


def draw_with_workers(folder: Path) -> None:
    # Workers from the server that has everything imported; that they can be spawned is tested above.
    preparation.get_context = lambda _: PROCESSES  # type: ignore[assignment]
    preparation.end_with_parent = partial(begin_work, folder)
    prepare("pathfinder", limit=2000, data_dir=folder, workers=2)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here to look for processes in")
def test_killed_parent_takes_its_workers_along(tmp_path: Path) -> None:
    process = PROCESSES.Process(target=draw_with_workers, args=(tmp_path,))
    process.start()
    wait_for(lambda: len(list(tmp_path.glob("*.worker"))) == 2)
    workers = [int(file.stem) for file in tmp_path.glob("*.worker")]
    assert all(_is_running(worker) for worker in workers)
    kill(process)
    wait_for(lambda: not any(_is_running(worker) for worker in workers))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        os.kill(pid, 0)
    except (OSError, IndexError):
        return False
    return state != "Z"


def test_two_processes_at_once(data_dir: Path, tmp_path: Path) -> None:
    first, second = (Halting(tmp_path / name) for name in ("first", "second"))
    processes = [start(data_dir, first)]
    wait_for((first.folder / "wrote").exists)
    processes.append(start(data_dir, second))
    wait_for((second.folder / "waits").exists)
    first.say("go")
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [FRESH, FOUND]
    assert len(load_task("listops", limit=200, max_length=512).train) == 200
