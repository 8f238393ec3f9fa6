"""A run is tied to the data it was trained on: its record, its checkpoints, its result, and sweeps."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from skyformer.errors import DataError, DataWarning, InterruptedRunError
from skyformer.lra import prepare
from skyformer.training.checkpoints import CheckpointRecord
from skyformer.training.collect import collect_runs, summarise
from skyformer.training.fit import evaluate, resume, train
from skyformer.training.runs import DATA_FILE, DataRecord, Run
from skyformer.training.sweeps import check_data, sweep
from tests.helpers import refused
from tests.training.fakes import a_config, finish
from tests.training.test_signals import Send
from tests.training.tiny import assert_same_run, tiny_config

NAME = "listops-length64-limit64"


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that claims to be the same task, prepared from other files."""
    folder = tmp_path_factory.mktemp("other")
    other = prepare("listops", limit=64, max_length=64, seed=1, data_dir=folder).folder
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 1', '"seed": 0').replace("generated", "other files"))
    other.rename(folder / NAME)
    return folder


@pytest.fixture
def stopped(runs_dir: Path, data_dir: Path) -> Run:
    """A run that was stopped at step 8."""
    with pytest.raises(InterruptedRunError):
        train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[Send(8, signal.SIGTERM)])
    return Run(runs_dir / tiny_config().run_name())


def test_resume_refuses_other_data(stopped: Run, other_data: Path, data_dir: Path, whole: Run) -> None:
    before = sorted(file.name for file in stopped.checkpoints.iterdir())
    with refused(DataError, str(stopped.folder), NAME, "other data", "train, dev, test", "generated", "other files"):
        resume(stopped, data_dir=other_data, progress=False)
    assert sorted(file.name for file in stopped.checkpoints.iterdir()) == before
    resume(stopped, data_dir=data_dir, progress=False)
    assert_same_run(stopped, whole)


def test_record_checkpoints_and_result_have_the_hashes(whole: Run, data_dir: Path) -> None:
    manifest = json.loads((data_dir / NAME / "manifest.json").read_text())
    assert whole.data is not None
    assert whole.data.sha256 == {split: entry["sha256"] for split, entry in manifest["splits"].items()}
    digest = whole.data.digest()
    records = [json.loads(file.read_text()) for file in whole.checkpoints.glob("*.json")]
    assert {record["data"] for record in records} == {digest}
    assert whole.result is not None
    assert whole.result.data_digest == digest


def test_checkpoints_of_other_data_are_refused(stopped: Run, data_dir: Path) -> None:
    for file in stopped.checkpoints.glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"data": "0" * 16}))
    with pytest.warns(match="other data"), refused(DataError, "other data", "0" * 16):
        resume(stopped, data_dir=data_dir, progress=False)


def test_evaluate_refuses_other_data(whole: Run, other_data: Path) -> None:
    with refused(DataError, whole.name, "other data"):
        evaluate(whole, data_dir=other_data)


def test_a_run_that_records_no_data_resumes_and_records_it(stopped: Run, data_dir: Path, whole: Run) -> None:
    """As a version that did not record it left the run."""
    (stopped.folder / DATA_FILE).unlink()
    for file in stopped.checkpoints.glob("*.json"):
        record = json.loads(file.read_text())
        del record["data"]
        file.write_text(json.dumps(record))
        assert CheckpointRecord(**record).data is None
    with pytest.warns(DataWarning, match=r"does not record the data .* from now on"):
        resume(stopped, data_dir=data_dir, progress=False)
    assert_same_run(stopped, whole)
    assert isinstance(stopped.data, DataRecord)


def test_sweeps_refuse_other_data_even_if_the_runs_are_finished(whole: Run, other_data: Path, runs_dir: Path) -> None:
    shutil.copytree(whole.folder, runs_dir / whole.name)
    with refused(DataError, whole.name, "other data"):
        sweep([tiny_config(), tiny_config(seed=1)], runs_dir=runs_dir, data_dir=other_data)
    assert list(runs_dir.iterdir()) == [runs_dir / whole.name]
    (runs_dir / whole.name / DATA_FILE).write_text("{")
    assert len(check_data([tiny_config()], other_data, runs_dir)) == 1


def test_a_run_remembers_where_its_data_was(
    stopped: Run, data_dir: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYFORMER_DATA", str(tmp_path / "nothing"))
    assert stopped.data is not None
    assert stopped.data.folder == str(data_dir)
    resume(stopped, progress=False)
    assert_same_run(stopped, whole)
    assert evaluate(stopped, split="dev").examples == 64
    assert stopped.data_dir(tmp_path) == tmp_path
    record = stopped.folder / DATA_FILE
    record.write_text(record.read_text().replace(str(data_dir), str(tmp_path / "gone")))
    with refused(DataError, "is not prepared", str(tmp_path / "nothing")):
        evaluate(stopped)


def test_runs_on_other_data_are_not_averaged(tmp_path: Path) -> None:
    for seed, digest in enumerate(["a" * 16, "a" * 16, "b" * 16]):
        run = finish(a_config(seed=seed), tmp_path, accuracy=0.4 + seed / 10)
        assert run.result is not None
        run.write_result(run.result.model_copy(update={"data_digest": digest}))
    [summary] = summarise(collect_runs(tmp_path))
    assert [(mean.count, mean.options) for mean in summary.means] == [(2, ()), (1, ("data=" + "b" * 16,))]
