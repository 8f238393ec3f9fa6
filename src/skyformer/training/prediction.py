"""Predictions of a trained run for new inputs: texts, ListOps expressions, pairs of texts, and images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from skyformer.errors import DataError, InputError
from skyformer.files import read_up_to
from skyformer.lra import listops
from skyformer.lra.batching import collate
from skyformer.lra.dataset import Example, fit
from skyformer.lra.examples import Symbols
from skyformer.lra.image import grey, load_image
from skyformer.lra.tasks import FIRST_SYMBOL_ID, TaskSpec
from skyformer.model import PairClassifier, SequenceClassifier
from skyformer.own.encoding import Encoder, make_encoder
from skyformer.training.building import classifier_class, logits_of
from skyformer.training.runs import Run

Input = str | bytes | Path
_LARGEST_INPUT = 2**26


@dataclass(frozen=True)
class Prediction:
    """The most likely label, its name, and the probabilities of all labels."""

    label: int
    name: str
    probabilities: tuple[float, ...]


def predict(run: Run, *inputs: Input, cut: bool = False) -> Prediction:
    """Classify one example with the best model of a run.

    Args:
        run: a trained run.
        inputs: a text (str or bytes), a ListOps expression, or the path (or bytes) of a 32 x 32 PNG or JPEG image; two
            texts for retrieval. A `Path` is read as a file.
        cut: cut a text that is too long, as the training data was cut, instead of raising an error.
    """
    return Predictor(run)(*inputs, cut=cut)


class Predictor:
    """The best model of a run, loaded once for many predictions."""

    def __init__(self, run: Run) -> None:
        self.task = run.config.task
        self.spec = self.task.spec
        self.longest = self.task.longest
        self.model = load_best_model(run)
        self._encoder = encoder_of(run) if self.task.own is not None else None

    @property
    def inputs_per_example(self) -> int:
        return 2 if self.spec.paired else 1

    def __call__(self, *inputs: Input, cut: bool = False) -> Prediction:
        if len(inputs) != self.inputs_per_example:
            raise InputError(f"{self.spec.name} needs {self.inputs_per_example} inputs per example; got {len(inputs)}")
        tokens = [self._tokens(self._read(given), cut) for given in inputs]
        return self._classify([Example(tokens[0], 0, 0, *tokens[1:])])[0]

    def classify(self, examples: Sequence[Sequence[str]], batch_size: int = 64) -> list[Prediction]:
        """Predictions for many texts or pairs of texts, which are cut as the training data was; in their order."""
        columns = [self._encode(texts) for texts in zip(*examples, strict=True)]
        tokens = [[self._tokens(symbols, cut=True) for symbols in column] for column in columns]
        rows = [Example(row[0], 0, number, *row[1:]) for number, row in enumerate(zip(*tokens, strict=True))]
        rows.sort(key=lambda row: max(len(row.tokens), 0 if row.second is None else len(row.second)))
        found: dict[int, Prediction] = {}
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            found |= zip((row.id for row in batch), self._classify(batch), strict=True)
        return [found[number] for number in range(len(rows))]

    def _classify(self, examples: Sequence[Example]) -> list[Prediction]:
        with torch.inference_mode():
            probabilities = torch.softmax(logits_of(self.model, collate(examples)).double(), -1)
        labels, names = probabilities.argmax(-1).tolist(), self.spec.label_names
        return [
            Prediction(label, names[label], tuple(row.tolist()))
            for label, row in zip(labels, probabilities, strict=True)
        ]

    def _encode(self, texts: Sequence[str]) -> list[Symbols]:
        return [self._read(text) for text in texts] if self._encoder is None else self._encoder(texts)

    def _read(self, given: Input) -> Symbols:
        if self._encoder is None:
            return _reader(self.spec)(given)
        return self._encoder([_content(given).decode(errors="replace")])[0]

    def _tokens(self, symbols: Symbols, cut: bool) -> Tensor:
        if self.spec.image_side is not None or (cut and self._is_text):
            symbols = fit(symbols, self.spec.cut_to(self.longest))
        self._check_length(len(symbols))
        return torch.from_numpy(symbols.astype(np.int64) + FIRST_SYMBOL_ID)

    def _check_length(self, length: int) -> None:
        as_bytes = self._is_text and (self.task.own is None or self.task.own.tokenizer is None)
        unit, advice = "bytes" if as_bytes else "tokens", " or use --cut" if self._is_text else ""
        if length == 0:
            raise InputError(f"the input is empty; {self.spec.name} needs 1 to {self.longest:,} {unit}")
        if length > self.longest:
            raise InputError(
                f"the input has {length:,} {unit}, and this model reads at most {self.longest:,}; shorten it{advice}"
            )

    @property
    def _is_text(self) -> bool:
        return self.spec.image_side is None and self.spec.name != "listops"


def encoder_of(run: Run) -> Encoder:
    """What turns texts into the tokens of a run on own data."""
    own = run.config.task.own
    if own is None or own.tokenizer is None:
        return make_encoder(None)
    if not run.tokenizer.is_dir():
        raise DataError(f"{run.tokenizer} is missing: it is the tokenizer that this run was trained with")
    encoder = make_encoder(run.tokenizer)
    if encoder.num_symbols != own.num_symbols:
        raise DataError(f"{run.tokenizer} has {encoder.num_symbols} tokens, not the {own.num_symbols} of this run")
    return encoder


def load_best_model(run: Run) -> SequenceClassifier | PairClassifier:
    """The best model of a run; a `DataError` if it does not match the run's config."""
    if not run.model_folder.is_dir():
        raise InputError(f"{run.folder} has no model yet: {_why_not_yet(run)}")
    model = classifier_class(run.config.task.spec).from_pretrained(run.model_folder)
    expected = run.config.build_model_config()
    if model.config != expected:
        names = [name for name, value in expected if getattr(model.config, name) != value]
        raise DataError(f"{run.model_folder} is not the model of this run: {', '.join(names)} do not match its config")
    return model


def _why_not_yet(run: Run) -> str:
    state, loop = run.state, run.config.loop
    advice = "" if state.state == "running" else f"; resume it with: skyformer train --resume {run.folder}"
    return f"it is {state.state} at step {state.step}, and its first model is kept at step {loop.first_kept()}{advice}"


def _reader(spec: TaskSpec) -> Callable[[Input], Symbols]:
    if spec.image_side is not None:
        side = spec.image_side
        return lambda given: _read_image(given, side)
    return _read_expression if spec.name == "listops" else _read_text


def _read_text(given: Input) -> Symbols:
    return np.frombuffer(_content(given), np.uint8)


def _read_expression(given: Input) -> Symbols:
    try:
        source = _content(given).decode("ascii")
    except UnicodeDecodeError:
        raise InputError("a ListOps expression must be plain ASCII, such as '[MAX 2 9 [MIN 4 7 ] ]'") from None
    symbols = listops.to_symbols(source)
    if symbols:
        listops.evaluate_symbols(symbols)
    return np.array(symbols, np.uint8)


def _content(given: Input) -> bytes:
    if isinstance(given, str):
        return given.encode("utf-8", errors="surrogateescape")
    return given if isinstance(given, bytes) else read_up_to(given, _LARGEST_INPUT)


def _read_image(given: Input, side: int) -> Symbols:
    image = load_image(Path(given) if isinstance(given, str) else given, side, "PNG", "JPEG")
    if image.mode == "L":
        return np.asarray(image, np.uint8).reshape(-1)
    planes = np.asarray(image.convert("RGB"), np.uint8).reshape(1, side * side, 3)
    return grey(planes.transpose(0, 2, 1))[0]
