"""Checkpoints: whole or not there, checked before use, and kept as long as anything needs them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from skyformer.errors import CheckpointWarning, DataError, TrainingError
from skyformer.files import sha256_of
from skyformer.training.checkpoints import JOURNAL, CheckpointRecord, CheckpointStore
from skyformer.training.data import TaskData
from skyformer.training.fit import resume
from skyformer.training.runs import Run, create_run
from tests.helpers import refused
from tests.training.tiny import assert_same_run, rows, tiny_config


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "digest")


def save(store: CheckpointStore, step: int, best_step: int | None = None, config: str = "digest") -> Path:
    journal = {"config": config, "best_step": best_step, "best_weights": best_step and f"sum{best_step}"}
    content = {"global_step": step, "state_dict": {"model.weight": torch.full((3,), float(step))}, JOURNAL: journal}
    store.save_checkpoint(content, store.path(step))
    return store.path(step)


def lost(record: CheckpointRecord) -> bool:
    """The best model is in its checkpoint only."""
    return False


def found(store: CheckpointStore) -> int | None:
    record = store.newest_good(lost)
    return record and record.step


def test_saved_and_loaded(store: CheckpointStore) -> None:
    assert (found(store), store.newest()) == (None, None)
    path = save(store, 500)
    assert path.name == "step-000500.ckpt"
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["step"], record["size"], record["accuracy"]) == (500, path.stat().st_size, None)
    assert torch.equal(store.load_weights(500)["weight"], torch.full((3,), 500.0))
    store.mark(500, 0.75)
    assert json.loads(path.with_suffix(".json").read_text())["accuracy"] == 0.75
    assert found(store) == 500


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut": cut,
    "flipped": flip,
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "no record": lambda path: path.with_suffix(".json").write_text("{"),
    "another record": lambda path: path.with_suffix(".json").write_text('{"format": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over(store: CheckpointStore, damage: str) -> None:
    save(store, 1000)
    DAMAGES[damage](save(store, 2000))
    with pytest.warns(CheckpointWarning, match=r"step-002000.*using the previous one"):
        assert found(store) == 1000
    store.sweep(1000)
    assert [file.name for file in sorted(store.folder.iterdir())] == ["step-001000.ckpt", "step-001000.json"]


def test_all_damaged_is_an_error(store: CheckpointStore) -> None:
    cut(save(store, 1))
    flip(save(store, 2))
    with (
        refused(DataError, "no checkpoint", "step-000002.ckpt", "content has changed"),
        pytest.warns(CheckpointWarning),
    ):
        found(store)


def test_a_checkpoint_without_its_record_was_never_finished(store: CheckpointStore) -> None:
    save(store, 1).with_suffix(".json").unlink()
    assert found(store) is None
    store.sweep(None)
    assert not list(store.folder.iterdir())


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [("other", {}, ["another run", "other", "digest"]), ("digest", {"format": 99}, ["newer version", "upgrade sky"])],
)
def test_other_runs_and_newer_formats_are_refused(
    store: CheckpointStore, config: str, change: dict[str, int], words: list[str]
) -> None:
    record = save(store, 1, config=config).with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    with refused(DataError, *words), pytest.warns(CheckpointWarning):
        found(store)


class Hostile:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("content", [Hostile(), {"a": 1}, [1, 2]])
def test_files_from_elsewhere(
    store: CheckpointStore, content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(store, 1)
    torch.save(content, path)
    record = json.loads(path.with_suffix(".json").read_text())
    sums = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    path.with_suffix(".json").write_text(json.dumps({**record, **sums}))
    with pytest.raises(DataError, match=r"is not a checkpoint|was not written by"):
        store.load_checkpoint(path)
    assert not Path("unpickled").exists()


def test_the_last_two_and_the_best_stay(store: CheckpointStore) -> None:
    for step, best in ((1, None), (2, 1), (3, 1), (4, 1)):
        save(store, step, best)
    store.prune(1)
    assert store.steps() == [4, 3, 1]
    save(store, 5, 1)
    # The best now is 5, but 4 says it was 1: going back to 4 needs it.
    store.prune(5)
    assert store.steps() == [5, 4, 1]
    save(store, 6, 5)
    store.prune(5)
    assert store.steps() == [6, 5, 1]
    save(store, 7, 5)
    store.prune(5)
    assert store.steps() == [7, 6, 5]


def test_a_damaged_record_of_an_older_checkpoint_does_not_stop_a_run(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        save(store, step, 4)
    store.record_path(3).write_text("{")
    assert found(store) == 4
    store.prune(4)
    assert store.steps() == [4, 3, 2], "two that can be used, and the damaged one"
    assert store.accuracy(3) is None


def test_a_lost_best_model_makes_a_checkpoint_useless(store: CheckpointStore) -> None:
    cut(save(store, 1))
    save(store, 2)
    save(store, 3, best_step=1)
    assert store.newest_good(lambda record: record.best_weights == "sum1").step == 3
    with pytest.warns(CheckpointWarning, match="best model so far, of step 1, is lost"):
        assert found(store) == 2


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No file can be written from the first write of a file called `name` on."""
    full, original = [], Path.open

    def open_file(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode in ("wb", "ab"):
            full.extend([True] if name in path.name else [])
            if full:
                no_space()
        return original(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_file)


def test_no_space_leaves_no_trace(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        save(store, 2)
    monkeypatch.undo()
    assert [file.name for file in sorted(store.folder.iterdir())] == ["step-000001.ckpt", "step-000001.json"]


@pytest.mark.parametrize(
    "name",
    [
        "step-000006.ckpt",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("state.json", "metrics.csv", "step-000006.json", "safetensors", "config.json", "result.json")
        ),
    ],
)
def test_a_run_survives_a_full_disk(
    name: str, whole: Run, runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tiny_config(), runs_dir)
    full_disk(monkeypatch, name)
    with refused(TrainingError, "No space left on device", "checkpoint", f"skyformer train --resume {run.folder}"):
        resume(run, data_dir=data_dir, progress=False)
    monkeypatch.undo()
    assert not list(run.folder.rglob("*.partial"))
    assert run.state.state in ("failed", "interrupted")
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, whole)


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), FileNotFoundError(errno.ENOENT, "none", "x.arrow")]
)
def test_other_errors_of_the_system_are_named_as_they_are(
    error: OSError, stopped: Run, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(TaskData, "train_dataloader", fail)
    with refused(
        TrainingError, str(error), f"When that is mended, resume with: skyformer train --resume {stopped.folder}"
    ):
        resume(stopped, data_dir=data_dir, progress=False)


def test_a_run_goes_back_one_checkpoint_and_writes_a_lost_model_again(whole: Run, stopped: Run, data_dir: Path) -> None:
    shutil.rmtree(stopped.model_folder)
    cut(stopped.checkpoints / "step-000011.ckpt")
    with pytest.warns(CheckpointWarning, match="step-000011.ckpt: it has"):
        resume(stopped, data_dir=data_dir, progress=False)
    assert_same_run(stopped, whole)


def test_a_run_with_damaged_checkpoints_only(stopped: Run, data_dir: Path) -> None:
    before = rows(stopped)
    for file in stopped.checkpoints.glob("*.ckpt"):
        cut(file)
    with refused(DataError, "no checkpoint", "--runs-dir"), pytest.warns(CheckpointWarning):
        resume(stopped, data_dir=data_dir, progress=False)
    assert stopped.state.state == "failed"
    assert rows(stopped) == before


def test_missing_rows_are_reported(whole: Run, stopped: Run, data_dir: Path) -> None:
    stopped.metrics_file.unlink()
    with pytest.warns(CheckpointWarning, match=r"rows of .*metrics.csv are lost"):
        resume(stopped, data_dir=data_dir, progress=False)
    assert rows(stopped)[1:] == rows(whole)[-3:]


class Never(Callback):
    """Fails when a step is trained."""

    def on_train_batch_start(self, *arguments: object) -> None:
        raise AssertionError("a step was trained")


def test_a_run_that_only_lacks_its_result(whole: Run, runs_dir: Path, data_dir: Path) -> None:
    shutil.copytree(whole.folder, runs_dir / whole.name)
    run = Run(runs_dir / whole.name)
    (run.folder / "result.json").unlink()
    resume(run, data_dir=data_dir, progress=False, callbacks=[Never()])
    assert_same_run(run, whole)
