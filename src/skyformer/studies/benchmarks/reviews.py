"""Fine-tuning a pretrained encoder on IMDb reviews: the reviews, their batches, a classifier and its training steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from skyformer.errors import DataError
from skyformer.studies.heads import HeadSource

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens (B, n), mask (B, n), labels (B,)."""


class Reviews:
    """The reviews in IMDb's archive or its unpacked folder, in the tokens of a model."""

    def __init__(self, path: str, source: HeadSource, seed: int) -> None:
        self._path, self._source, self._seed = Path(path), source, seed

    @cached_property
    def _reviews(self) -> dict[str, list[tuple[bytes, int]]]:
        """The text and the label of every review, by split."""
        from skyformer.lra.text import read

        found: dict[str, list[tuple[bytes, int]]] = {}
        for split, examples in read(self._path):
            texts = (row.tobytes() for row in examples.tokens.rows())
            found.setdefault(str(split), []).extend(zip(texts, examples.labels.tolist(), strict=True))
        return found

    def digest(self) -> str:
        """16 hexadecimal digits that are equal for equal reviews."""
        content = hashlib.sha256()
        for reviews in self._reviews.values():
            for text, _ in reviews:
                content.update(text)
        return content.hexdigest()[:16]

    def draw(self, split: str, count: int) -> tuple[list[str], Tensor]:
        """At most `count` reviews, half of them positive, in random order, and their labels."""
        reviews = self._reviews[split]
        labels = torch.tensor([label for _, label in reviews])
        generator = torch.Generator().manual_seed(self._seed)
        chosen = []
        for label in (0, 1):
            rows = (labels == label).nonzero().squeeze(1)
            chosen.append(rows[torch.randperm(len(rows), generator=generator)[: count // 2]])
        order = torch.cat(chosen)
        order = order[torch.randperm(len(order), generator=generator)]
        texts = [reviews[row][0].decode(errors="replace").replace("<br />", " ") for row in order.tolist()]
        return texts, labels[order]

    def batches(self, split: str, count: int, size: int, length: int, pad_token: int) -> list[Batch]:
        """Reviews cut at `length` tokens and padded to the longest of their batch."""
        texts, labels = self.draw(split, count)
        if len(texts) < count - count % 2:
            what = f"{count // 2} {split} reviews of each label"
            raise DataError(f"{self._path.name} must have at least {what}; got {len(texts)} in total")
        first, last = self._source.marks
        inner = length - len(first) - len(last)
        rows = [torch.tensor([*first, *self._source.encode(text)[:inner], *last]) for text in texts]
        made = []
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            tokens = pad_sequence(chosen, batch_first=True, padding_value=pad_token)
            mask = pad_sequence([torch.ones_like(row) for row in chosen], batch_first=True)
            made.append((tokens, mask, labels[start : start + size]))
        return made

    def joined(self, count: int, length: int, reviews: int = 400) -> Tensor:
        """Test reviews joined end to end into `count` texts of exactly `length` tokens: (count, length)."""
        first, last = self._source.marks
        inner = length - len(first) - len(last)
        tokens: list[int] = []
        for text in self.draw("test", reviews)[0]:
            tokens += self._source.encode(text)
        if len(tokens) < count * inner:
            raise DataError(
                f"{self._path.name} has too few reviews for {count} texts of {length} tokens: {reviews} reviews have "
                f"{len(tokens)} tokens. Use a smaller --long-length or fewer --long-texts"
            )
        return torch.tensor([[*first, *tokens[i * inner : (i + 1) * inner], *last] for i in range(count)])


def mean_pooled(encoder: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, n) to (B, E): the mean over the tokens that are not padding."""
    hidden: Tensor = encoder(tokens, attention_mask=mask).last_hidden_state
    if mask is None:
        return hidden.mean(1)
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


class Classifier(nn.Module):
    """An encoder, the mean over its tokens, and a linear head for two classes."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(mean_pooled(self.encoder, tokens, mask))
        return logits


class FineTuning:
    """Training steps of a classifier with AdamW and a learning rate that rises, then falls linearly."""

    def __init__(self, encoder: Any, *, steps: int, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Classifier(encoder).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01)
        warmup = max(1, steps // 10)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
        )

    def step(self, batch: Batch) -> float:
        """One training step; returns the loss before it."""
        tokens, mask, labels = batch
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(tokens, mask), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, batches: Sequence[Batch]) -> float:
        self.model.eval()
        right = sum(int((self.model(tokens, mask).argmax(-1) == labels).sum()) for tokens, mask, labels in batches)
        return right / sum(len(labels) for *_, labels in batches)
