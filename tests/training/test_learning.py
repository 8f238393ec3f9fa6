"""A run learns a task that needs attention, and does not learn it with a broken attention.

The task: eight digits, one of them replaced by a mark; which digit follows the mark? No token knows without attending
to its neighbour, and the mean over tokens does not contain which tokens were neighbours. Chance is one in ten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyformer.attention import Inputs, registry
from skyformer.attention.skyformer import SkyformerAttention
from skyformer.lra import Example, Split, Task, task_spec
from skyformer.lra.folders import Manifest, SplitRecord, Variant
from skyformer.lra.tasks import FIRST_SYMBOL_ID
from skyformer.training import RunConfig, fit
from skyformer.training.config import TaskConfig

LENGTH, MARK = 8, 11
LEARNT, NOT_LEARNT = 0.9, 0.6
SIZES = {Split.TRAIN: 20_000, Split.DEV: 500, Split.TEST: 1000}


@dataclass
class AfterTheMark:
    """One split of the task, with the methods of a `TaskDataset`."""

    tokens: Tensor
    labels: Tensor
    spec = replace(task_spec("listops"), max_length=64)

    @classmethod
    def drawn(cls, count: int, seed: int) -> AfterTheMark:
        generator = torch.Generator().manual_seed(seed)
        digits = torch.randint(10, (count, LENGTH), generator=generator)
        place = torch.randint(LENGTH - 1, (count, 1), generator=generator)
        labels = digits.gather(1, place + 1).squeeze(1)
        return cls(digits.scatter(1, place, MARK) + FIRST_SYMBOL_ID, labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        return Example(self.tokens[index], int(self.labels[index]), index)

    def lengths(self) -> Any:
        return np.full(len(self), LENGTH)


class ShuffledValues(SkyformerAttention):
    """Skyformer with the right weights and shuffled values."""

    name = "shuffled"

    def attend(self, inputs: Inputs) -> Tensor:
        shuffled = inputs.value[:, :, torch.randperm(inputs.value.shape[2])]
        return super().attend(replace(inputs, value=shuffled))


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = [AfterTheMark.drawn(size, seed) for seed, size in enumerate(SIZES.values())]
    record = SplitRecord(file="", examples=1, symbols=1, shortest=1, longest=1, label_counts=(1,), bytes=1, sha256="0")
    splits = dict.fromkeys(Split, record)
    manifest = Manifest(format=1, skyformer="", variant=Variant(task="listops"), source="drawn", splits=splits)
    made = Task(AfterTheMark.spec, *parts, folder=Path(), manifest=manifest)
    monkeypatch.setattr(TaskConfig, "load", lambda config, data_dir: made)


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(("attention", "learns"), [("skyformer", True), (ShuffledValues.name, False)])
def test_attention_learns_unless_it_is_broken(
    attention: str, learns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.list_attentions()
    monkeypatch.setitem(registry._ATTENTIONS._parts, ShuffledValues.name, ShuffledValues)
    config = RunConfig(
        preset="learning",
        seed=1,
        task={"name": "listops", "max_length": 64},
        model={
            "attention": attention,
            "attention_options": {"num_landmarks": 12},
            "num_layers": 1,
            "dim": 32,
            "hidden_dim": 32,
            "dropout": 0.0,
        },
        optim={"lr": 1e-2, "warmup_steps": 30},
        loop={"steps": 200, "batch_size": 64, "eval_every": 100, "checkpoint_every": 100, "log_every": 50},
        hardware={"accelerator": "cpu", "threads": 1},
    )
    accuracy = fit.train(config, runs_dir=tmp_path, progress=False).test_accuracy
    assert accuracy > LEARNT if learns else accuracy < NOT_LEARNT
