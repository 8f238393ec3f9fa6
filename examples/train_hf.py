"""Train a Skyformer classifier with transformers' Trainer, save it, and load it with an Auto class.

Nothing is downloaded: the examples are sequences of 16 symbols, and the label says which of two is more frequent.

python examples/train_hf.py --steps 60
"""

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from skyformer.hf import SkyformerConfig, SkyformerForSequenceClassification

LENGTH, SYMBOLS, MARKS = 256, 16, (1, 2)


def make_examples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for label in torch.randint(2, (count,), generator=generator):
        tokens = torch.randint(3, SYMBOLS, (LENGTH,), generator=generator)
        places = torch.randperm(LENGTH, generator=generator)
        tokens[places[:64]] = MARKS[int(label)]
        tokens[places[64:96]] = MARKS[1 - int(label)]
        examples.append({"input_ids": tokens, "attention_mask": torch.ones(LENGTH, dtype=torch.int64), "labels": label})
    return examples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--attention", default="skyformer")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = SkyformerConfig(vocab_size=SYMBOLS, max_position_embeddings=LENGTH, attention=options.attention)
    model = SkyformerForSequenceClassification(config)
    unseen = make_examples(100, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_steps=max(options.steps // 4, 1),
            save_strategy="no",
            report_to="none",
        )
        Trainer(model=model, args=settings, train_dataset=make_examples(16 * 20, seed=0)).train()
        model.save_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.stack([example["input_ids"] for example in unseen])).logits
    right = sum(int(answer == example["labels"]) for answer, example in zip(logits.argmax(-1), unseen, strict=True))
    print(f"{model.config.attention} after {options.steps} steps: {right} of {len(unseen)} unseen examples are right")


if __name__ == "__main__":
    main()
