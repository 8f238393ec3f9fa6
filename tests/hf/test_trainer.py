"""transformers' Trainer on the CPU: losses fall, checkpoints load, accumulated gradients equal those of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from skyformer.hf import SkyformerForMaskedLM
from tests.hf.own_models import VOCAB, classifier, small_config

LENGTH = 40


class Texts(Dataset[dict[str, Tensor]]):
    """Texts whose label says which of two tokens they are full of; as labels of masked tokens, the tokens."""

    def __init__(self, count: int, masked: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(2, (count,), generator=generator)
        noise = torch.randint(2, VOCAB, (count, LENGTH), generator=generator)
        marked = torch.rand(count, LENGTH, generator=generator) < 0.5
        self.ids = torch.where(marked, self.labels[:, None], noise)
        self.masked = masked

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.arange(LENGTH) < LENGTH - 3 * (index % 4)
        ids = self.ids[index]
        return {
            "input_ids": ids * mask,
            "attention_mask": mask.long(),
            "labels": ids.masked_fill(~mask, -100) if self.masked else self.labels[index],
        }


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return TrainingArguments(**{**defaults, **settings})


CHECKPOINTING = {
    next(
        name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
    ): True
}
"""By the name of the setting in the installed transformers, which changed in 5.23."""


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_twenty_steps_of_classification(tmp_path: Path) -> None:
    model = classifier(initializer_range=0.1, num_labels=2)
    settings = arguments(tmp_path, **CHECKPOINTING, save_strategy="steps", save_steps=20)
    trainer = Trainer(model=model, args=settings, train_dataset=Texts(160), eval_dataset=Texts(40))
    trainer.train()
    log = losses(trainer)
    assert len(log) == 20
    assert sum(log[-5:]) < 0.6 * sum(log[:5])
    result = trainer.evaluate()
    assert result["eval_loss"] < log[0]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-20").eval()
    inputs = {name: value[None] for name, value in Texts(1)[0].items()}
    torch.testing.assert_close(loaded(**inputs).logits, model.eval()(**inputs).logits, rtol=0, atol=1e-6)


def test_twenty_steps_of_masked_language_modelling(tmp_path: Path) -> None:
    model = SkyformerForMaskedLM(small_config(initializer_range=0.1))
    settings = arguments(tmp_path, learning_rate=2e-2)
    trainer = Trainer(model=model, args=settings, train_dataset=Texts(160, masked=True))
    trainer.train()
    log = losses(trainer)
    assert sum(log[-5:]) < 0.8 * sum(log[:5])


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    steps = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
    weights = []
    for size, accumulated in ((8, 1), (2, 4)):
        torch.manual_seed(3)
        model = classifier("softmax", hidden_dropout_prob=0.0, num_labels=2)
        settings = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, **steps
        )
        Trainer(model=model, args=settings, train_dataset=Texts(8)).train()
        weights.append(model.classifier[2].weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)
