"""A run from its config to its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from skyformer.errors import DataError, InputError, TrainingError, UnknownNameError
from skyformer.lra import Example, TaskDataset, prepare
from skyformer.model import PairClassifier, SequenceClassifier
from skyformer.processes import peak_bytes
from skyformer.training import fit
from skyformer.training.building import build_model
from skyformer.training.config import TaskConfig
from skyformer.training.fit import evaluate, resume, train
from skyformer.training.module import ClassifierModule
from skyformer.training.runs import Run
from tests.helpers import refused
from tests.lra.fake_files import pair_files, write_folder
from tests.training.conftest import Finished
from tests.training.tiny import STEPS, assert_same_run, checkpoint, rows, tiny_config


def test_a_run_leaves_everything_behind(whole: Run) -> None:
    result = whole.result
    assert result is not None
    assert whole.state.state == "finished"
    assert (result.steps, result.test_examples, result.dev_examples) == (STEPS, 64, 64)
    assert result.steps_per_second > 0
    assert result.seconds > STEPS / result.steps_per_second
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_bytes > 10**8
    assert result.parameters == sum(p.numel() for p in build_model(whole.config).parameters())
    assert any(whole.tensorboard.glob("events*"))
    assert not list(whole.folder.rglob("*.partial"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system cannot reset the peak")
def test_the_peak_memory_is_that_of_the_run(runs_dir: Path, data_dir: Path) -> None:
    before = torch.ones(500_000_000, dtype=torch.uint8).sum()
    assert before == 500_000_000
    held = peak_bytes()
    result = train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_bytes < held - 250_000_000


def test_a_peak_that_cannot_be_reset_stops_no_run(
    runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise PermissionError("read-only /proc")

    monkeypatch.setattr(fit, "reset_peak", refuse)
    assert train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False).steps == STEPS


def test_metrics_have_a_row_for_every_log_point(whole: Run) -> None:
    train_steps = [row.step for row in whole.metrics() if row.split == "train"]
    dev = [row for row in whole.metrics() if row.split == "dev"]
    assert train_steps == [2, 4, 6, 8, 10, 12, 14]
    assert [row.step for row in dev] == [5, 10, 14]
    assert all(row.lr is not None for row in whole.metrics() if row.split == "train")
    assert whole.result is not None
    best = max(dev, key=lambda row: row.accuracy)
    assert (best.step, best.accuracy) == (whole.result.best_step, whole.result.dev_accuracy)


def test_the_model_is_that_of_the_best_step(whole: Run, data_dir: Path) -> None:
    assert whole.result is not None
    model = SequenceClassifier.from_pretrained(whole.model_folder)
    saved = checkpoint(whole, whole.result.best_step)["state_dict"]
    assert all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in model.state_dict().items())
    test = evaluate(whole, data_dir=data_dir)
    assert (test.accuracy, test.loss, test.examples) == (whole.result.test_accuracy, whole.result.test_loss, 64)
    dev = evaluate(whole, split="dev", data_dir=data_dir)
    assert (dev.accuracy, dev.loss) == (whole.result.dev_accuracy, whole.result.dev_loss)


def test_evaluation_does_not_depend_on_the_batch_size(whole: Run, data_dir: Path) -> None:
    assert whole.result is not None
    other = evaluate(whole, data_dir=data_dir, batch_size=7)
    assert (other.accuracy, other.examples) == (whole.result.test_accuracy, 64)
    assert other.loss == pytest.approx(whole.result.test_loss, rel=1e-5)


class FirstBatches(Callback):
    """Remembers the examples of each step and the first weights."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.weights: torch.Tensor | None = None

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_idx: int) -> None:
        assert isinstance(module, ClassifierModule)
        if self.weights is None:
            self.weights = module.model.encoder.embeddings.token.detach().clone()
        self.ids.append(batch.ids.tolist())


def test_the_same_seed_is_the_same_run_and_reads_the_test_set_once_at_the_end(
    whole: Run, runs_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = TaskDataset.__getitem__

    def notice(dataset: TaskDataset, index: int) -> Example:
        read.append(dataset._path.name.partition("-")[0])
        return original(dataset, index)

    monkeypatch.setattr(TaskDataset, "__getitem__", notice)
    train(tiny_config(), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    assert read.count("test") == 64
    assert read[-64:] == ["test"] * 64
    assert read.count("dev") == 3 * 64
    assert_same_run(Run(runs_dir / whole.name), whole)


def test_ties_go_to_the_earlier_step(runs_dir: Path, data_dir: Path) -> None:
    # With a learning rate close to zero all evaluations are equal.
    config = tiny_config(steps=6, eval_every=3)
    config = config.replace(optim=config.optim.replace(lr=1e-12))
    result = train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False)
    accuracies = {row.accuracy for row in Run(runs_dir / result.run).metrics() if row.split == "dev"}
    assert len(accuracies) == 1
    assert result.best_step == 3


STOPPED = tiny_config(stop_after=9)


def test_a_run_can_end_inside_its_schedule(whole: Run, finished: Finished) -> None:
    """Its steps are those of the whole run, and its last step is evaluated."""
    run = finished(STOPPED)
    before = [row[:5] for row in rows(whole) if row[0] == "step" or int(row[0]) <= 8]
    assert rows(run)[: len(before)] == before
    assert [(row.step, row.split) for row in run.metrics() if row.step == 9] == [(9, "train"), (9, "dev")]
    assert run.result is not None
    assert (run.result.steps, run.result.test_examples) == (9, 64)
    assert run.state.steps == 9


def test_a_run_that_ends_inside_its_schedule_resumes(finished: Finished, runs_dir: Path, data_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        train(STOPPED, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[StopAtStep(7)])
    run = Run(runs_dir / STOPPED.run_name())
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, finished(STOPPED))


def test_early_models_are_not_kept(runs_dir: Path, data_dir: Path) -> None:
    # With a learning rate close to zero all evaluations are equal, and the first that counts is the best.
    config = tiny_config(steps=8, eval_every=2, keep_after=0.5)
    config = config.replace(optim=config.optim.replace(lr=1e-12))
    assert config.loop.first_kept() == 6
    result = train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False)
    run = Run(runs_dir / result.run)
    assert [row.step for row in run.metrics() if row.split == "dev"] == [2, 4, 6, 8]
    assert result.best_step == 6
    saved = checkpoint(run, 6)["state_dict"]
    model = SequenceClassifier.from_pretrained(run.model_folder)
    assert all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in model.state_dict().items())


def test_resuming_before_any_model_is_kept(runs_dir: Path, data_dir: Path, finished: Finished) -> None:
    config = tiny_config(keep_after=0.8)
    with pytest.raises(RuntimeError, match="stop"):
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[StopAtStep(11)])
    run = Run(runs_dir / config.run_name())
    assert run.state.best_step is None
    assert not run.model_folder.exists()
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, finished(config))
    assert run.result is not None
    assert run.result.best_step == STEPS


def test_a_run_of_an_earlier_version_resumes(whole: Run, runs_dir: Path, data_dir: Path) -> None:
    """Its config has none of the settings that were added since."""
    config = tiny_config()
    with pytest.raises(RuntimeError, match="stop"):
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[StopAtStep(8)])
    file = runs_dir / config.run_name() / "config.yaml"
    added = ("_output_dropout:", "embedding_dropout:", "mlp_hidden_dropout:", "head_activation:", "cycle_beta1:")
    lines = [line for line in file.read_text().splitlines() if not any(name in line for name in added)]
    file.write_text("\n".join(line for line in lines if "stop_after:" not in line and "keep_after:" not in line))
    run = Run(file.parent)
    resume(run, data_dir=data_dir, progress=False)
    assert_same_run(run, whole)


class StopAtStep(Callback):
    """Fails as a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, module: object, batch: object, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stop")


def test_pairs(runs_dir: Path, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "pairs", pair_files(12))
    prepare("retrieval", data_dir=tmp_path / "data", source=source)
    config = tiny_config(steps=4, eval_every=4)
    config = config.replace(task=TaskConfig(name="retrieval", max_length=64))
    result = train(config, runs_dir=runs_dir, data_dir=tmp_path / "data", progress=False)
    assert (result.test_examples, result.task) == (12, "retrieval")
    model = PairClassifier.from_pretrained(runs_dir / result.run / "model")
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precisions(precision: str, runs_dir: Path, data_dir: Path) -> None:
    config = tiny_config(steps=4, eval_every=4)
    config = config.replace(hardware=config.hardware.replace(precision=precision))
    result = train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False)
    again = evaluate(Run(runs_dir / result.run), data_dir=data_dir)
    assert (again.accuracy, again.loss) == (result.test_accuracy, pytest.approx(result.test_loss, rel=1e-2))


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
def test_half_precision_that_would_crash_makes_no_folder(
    runs_dir: Path, data_dir: Path, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "half_precision_crashes", lambda dtype: True)
    for precision in ("bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        config = tiny_config()
        config = config.replace(hardware=config.hardware.replace(precision=precision))
        with refused(InputError, f"hardware.precision={precision}", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
            train(config, runs_dir=runs_dir, data_dir=data_dir)
    assert not runs_dir.exists()
    # Single precision is not affected.
    assert evaluate(whole, data_dir=data_dir).examples == 64


def test_padding_to_the_longest_changes_little(whole: Run, runs_dir: Path, data_dir: Path) -> None:
    result = train(tiny_config(pad_to_max=True), runs_dir=runs_dir, data_dir=data_dir, progress=False)
    padded, cut = (run.metrics() for run in (Run(runs_dir / result.run), whole))
    assert [row.loss for row in padded] == pytest.approx([row.loss for row in cut], rel=1e-4)


def test_a_finished_run_is_left_alone(whole: Run, data_dir: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in whole.folder.rglob("*") if file.name != ".lock"}
    with refused(InputError, "finished already", "skyformer evaluate"):
        resume(whole, data_dir=data_dir)
    with refused(InputError, "finished already", "--seed"):
        train(tiny_config(), runs_dir=whole.folder.parent, data_dir=data_dir)
    assert before == {file: file.stat().st_mtime_ns for file in whole.folder.rglob("*") if file.name != ".lock"}


def test_bad_input_makes_no_folder(runs_dir: Path, tmp_path: Path, data_dir: Path) -> None:
    with refused(DataError, "skyformer data prepare listops", "--limit 64"):
        train(tiny_config(), runs_dir=runs_dir, data_dir=tmp_path / "nothing")
    impossible = tiny_config().replace(hardware=tiny_config().hardware.replace(strategy="fsdp"))
    with refused(InputError, "hardware.strategy=fsdp", "Lightning says"):
        train(impossible, runs_dir=runs_dir, data_dir=data_dir)
    assert not runs_dir.exists()


def test_unknown_split_and_missing_model(whole: Run, data_dir: Path, tmp_path: Path) -> None:
    with refused(UnknownNameError, "split", "tset", "Did you mean 'test'?"):
        evaluate(whole, split="tset", data_dir=data_dir)
    bare = tmp_path / whole.name
    bare.mkdir()
    (bare / "config.yaml").write_text((whole.folder / "config.yaml").read_text())
    with refused(InputError, "no model yet", "at step 5"):
        evaluate(Run(bare), data_dir=data_dir)


class Poison(Callback):
    """Makes the loss or a gradient not finite at a step."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_train_batch_start(self, trainer: object, module: ClassifierModule, batch: object, batch_idx: int) -> None:
        if batch_idx + 1 == self.step and self.what == "loss":
            module.model.head[0].weight.data.fill_(float("nan"))
        if batch_idx + 1 == self.step and self.what == "gradient":
            module.model.head[0].weight.register_hook(lambda grad: grad * float("inf"))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_non_finite_numbers_end_the_run(what: str, runs_dir: Path, data_dir: Path) -> None:
    config, seen = tiny_config(accumulate=2), FirstBatches()
    poison = Poison(8 * 2, what)
    with pytest.raises(TrainingError) as caught:
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=False, callbacks=[poison, seen])
    message, run = str(caught.value), Run(runs_dir / config.run_name())
    # A loss is that of the last part of the step, a gradient is of both parts.
    ids = seen.ids[-1] if what == "loss" else seen.ids[-2] + seen.ids[-1]
    assert f"{what} is" in message
    for words in ("at step 8", f"examples {', '.join(map(str, ids))};", "step-000006.ckpt", "optim.lr"):
        assert words in message
    assert (run.state.state, run.state.reason) == ("failed", message)
    assert not (run.checkpoints / "step-000008.ckpt").exists()


def test_tensorboard_has_what_the_table_has(whole: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole.tensorboard)).Reload()
    for split in ("train", "dev"):
        logged = [(event.step, event.value) for event in events.Scalars(f"{split}/loss")]
        table = [(row.step, pytest.approx(row.loss)) for row in whole.metrics() if row.split == split]
        assert logged == table


def test_another_seed_is_another_run_and_only_wanted_progress_is_printed(
    runs_dir: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed, seen = [], [FirstBatches(), FirstBatches()]
    for seed, callback in enumerate(seen):
        config, shown = tiny_config(steps=4, eval_every=2, seed=seed), seed == 1
        train(config, runs_dir=runs_dir, data_dir=data_dir, progress=shown, callbacks=[callback])
        printed.append(capfd.readouterr())
    assert printed[0] == ("", "")
    assert printed[1].out == ""
    shown_lines = [line.partition(":")[0] for line in printed[1].err.splitlines()][1:]
    assert shown_lines == ["training steps", "step 2", "step 4"]
    assert seen[0].ids != seen[1].ids
    assert seen[0].weights is not None
    assert seen[1].weights is not None
    assert not torch.equal(seen[0].weights, seen[1].weights)
