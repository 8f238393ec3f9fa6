"""Texts as tokens: their UTF-8 bytes, or the ids of a Hugging Face tokenizer without its special tokens."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from skyformer.errors import DataError, MissingExtraError
from skyformer.files import sha256_of
from skyformer.lra.examples import Symbols
from skyformer.lra.own import LARGEST_VOCABULARY, TOKENIZER_FOLDER
from skyformer.lra.tasks import symbol_type


class Encoder(Protocol):
    """Turns texts into symbols from 0 to `num_symbols` - 1."""

    num_symbols: int

    def __call__(self, texts: Sequence[str]) -> list[Symbols]: ...

    def decode(self, symbols: Symbols) -> str:
        """The text of symbols, for showing it."""

    def save(self, folder: Path) -> None:
        """Write what is needed to encode the same way later."""

    def digest(self) -> str:
        """A hash that is equal for encoders that give the same tokens."""


class Bytes:
    """A text as its UTF-8 bytes."""

    num_symbols = 256

    def __call__(self, texts: Sequence[str]) -> list[Symbols]:
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts]

    def decode(self, symbols: Symbols) -> str:
        return symbols.tobytes().decode(errors="replace")

    def save(self, folder: Path) -> None:
        pass

    def digest(self) -> str:
        return "bytes"


class Tokenizer:
    """A tokenizer of `transformers`. Special tokens are left out: the model averages over all tokens of a text."""

    def __init__(self, name: str) -> None:
        try:
            import transformers
        except ModuleNotFoundError as missing:
            raise MissingExtraError("transformers") from missing
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
        except Exception as error:  # transformers raises many kinds for a missing or damaged tokenizer
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"the tokenizer {name!r} cannot be loaded: {reason}") from error
        self.num_symbols = len(self._tokenizer)
        if self.num_symbols > LARGEST_VOCABULARY:
            raise DataError(f"the tokenizer {name!r} has {self.num_symbols:,} tokens; at most {LARGEST_VOCABULARY:,}")

    def __call__(self, texts: Sequence[str]) -> list[Symbols]:
        kind = symbol_type(self.num_symbols)
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array(ids, kind) for ids in encoded["input_ids"]]

    def decode(self, symbols: Symbols) -> str:
        return str(self._tokenizer.decode(symbols.tolist()))

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)

    def digest(self) -> str:
        from tempfile import TemporaryDirectory

        digest = hashlib.sha256()
        with TemporaryDirectory() as folder:
            self.save(Path(folder))
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file() and file.name != "tokenizer_config.json":
                    digest.update(f"{file.name} {sha256_of(file)}\n".encode())
        return digest.hexdigest()


def make_encoder(tokenizer: str | Path | None) -> Encoder:
    """The encoder for a tokenizer's name or folder, or for bytes."""
    return Bytes() if tokenizer is None else Tokenizer(str(tokenizer))
