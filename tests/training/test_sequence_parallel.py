"""Two processes that share each sequence train the run of one process; a killed one resumes to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyformer.errors import InputError, UnsupportedError
from skyformer.training.config import RunConfig, to_yaml
from skyformer.training.fit import train
from skyformer.training.runs import Run
from tests.training.killing import Kill, Rank, end, start
from tests.training.test_ddp import free_port
from tests.training.tiny import assert_same_run, tiny_config

STEPS = 5


def shared_config(dropout: float = 0.0, processes: int = 2, **hardware: object) -> RunConfig:
    config = tiny_config(steps=STEPS, eval_every=4, checkpoint_every=2, log_every=1)
    config = config.replace(model=config.model.replace(dropout=dropout))
    return config.replace(hardware=config.hardware.replace(sequence_parallel=processes, **hardware))


def train_together(config: RunConfig, runs_dir: Path, data_dir: Path, kill: Kill | None = None) -> list[int]:
    """Exit codes of both processes; the second may be killed."""
    port = free_port()
    changes = [Rank(0, 2, port), Rank(1, 2, port, kill)]
    return [end(process) for process in [start(to_yaml(config), runs_dir, data_dir, change) for change in changes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Run:
    """The run of two processes, with the losses of one: without dropout they are the same."""
    runs_dir = tmp_path_factory.mktemp("whole")
    assert train_together(shared_config(), runs_dir, data_dir) == [0, 0]
    return Run(runs_dir / shared_config().run_name())


def test_two_processes_and_one(whole: Run, runs_dir: Path, data_dir: Path) -> None:
    single = train(shared_config(processes=1), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    ours, theirs = whole.metrics(), Run(runs_dir / single.run).metrics()
    assert [(row.step, row.split) for row in ours] == [(row.step, row.split) for row in theirs]
    assert [row.loss for row in ours] == pytest.approx([row.loss for row in theirs], rel=1e-5)
    assert [row.accuracy for row in ours] == pytest.approx([row.accuracy for row in theirs], abs=1 / 64)
    assert whole.result is not None
    assert (whole.result.dev_examples, whole.result.test_examples) == (64, 64)
    assert whole.result.test_loss == pytest.approx(single.test_loss, rel=1e-5)


def test_a_lost_process_ends_the_run_which_resumes_to_the_same_bits(whole: Run, tmp_path: Path, data_dir: Path) -> None:
    codes = train_together(shared_config(), tmp_path, data_dir, Kill("module:step_seed", call=4))
    assert codes[1] == -9
    assert codes[0] == 1
    run = Run(tmp_path / whole.name)
    assert run.state.state == "failed"
    assert "ended or did not answer" in str(run.state.reason)
    assert "resume with: skyformer train --resume" in str(run.state.reason)
    assert train_together(shared_config(), tmp_path, data_dir) == [0, 0]
    assert_same_run(run, whole)


def test_contradictions_are_named() -> None:
    with pytest.raises(
        InputError, match=r"hardware.devices must be a multiple of hardware.sequence_parallel; got 3 and 2"
    ):
        shared_config(devices=3)
    with pytest.raises(InputError, match=r"hardware.sequence_parallel needs hardware.strategy=ddp or auto; got fsdp"):
        shared_config(strategy="fsdp")
    config = shared_config()
    with pytest.raises(UnsupportedError, match="'tilted' attention is not supported for a sequence in pieces"):
        config.replace(model=config.model.replace(attention="tilted", attention_options={}))
    with pytest.raises(UnsupportedError, match="landmarks='leverage' is not supported for a sequence in pieces"):
        config.replace(model=config.model.replace(attention_options={"landmarks": "leverage"}))


def test_only_several_processes_are_part_of_the_digest() -> None:
    assert (
        shared_config(processes=1).digest()
        == tiny_config(steps=STEPS, eval_every=4, checkpoint_every=2, log_every=1)
        .replace(model=shared_config().model)
        .digest()
    )
    assert shared_config(processes=2).digest() != shared_config(processes=1).digest()
