"""The running means of a run, and how its steps reach the progress display."""

from __future__ import annotations

import pytest

from skyformer.report import progress
from skyformer.report.progress import Lines
from skyformer.training.progress import RunningMean, RunProgress


def test_the_running_mean_forgets_old_values() -> None:
    mean = RunningMean()
    assert mean.value != mean.value
    mean.add(4.0)
    assert mean.value == 4.0
    for _ in range(1000):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0)


def test_a_run_is_shown_with_loss_accuracy_pace_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    run = RunProgress(Lines(seconds=15))
    run.evaluating("dev")
    run.begin("a run", 100, 500)
    for step in range(101, 106):
        run.advance(step, 2.0, 0.5)
    assert capsys.readouterr().err.splitlines() == [
        "a run: from step 100 to 500",
        "training steps: 101 of 500  10.0 s each  66 min left  loss 2.0000  accuracy 0.5000",
        "training steps: 103 of 500  10.0 s each  66 min left  loss 2.0000  accuracy 0.5000",
        "training steps: 105 of 500  10.0 s each  66 min left  loss 2.0000  accuracy 0.5000",
    ]
