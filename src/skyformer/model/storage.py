"""Models on disk: a folder with `config.json`, which describes the model, and its weights as safetensors.

    config.json                             format, version, the name of the model's class, its config, and the
                                            SHA-256 sum of its weights
    weights-0123456789abcdef.safetensors    named by the first 16 digits of that sum

The new weights are written first, in a file of their own, and then `config.json` is replaced in one step: if a save is
interrupted, the folder holds either the old model or the new one. Loading reads JSON and numbers; no code in the folder
is ever run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from skyformer.checks import FLOAT_DTYPES
from skyformer.errors import DataError, InputError, InterruptedRunError, MissingExtraError
from skyformer.files import dump_json, read_json, sha256_of, write_atomic
from skyformer.model.config import ModelConfig

FORMAT, VERSION = "skyformer", 1
CONFIG_FILE = "config.json"
_WEIGHTS_FILE = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


class StoredModel(nn.Module):
    """A module that is built from a `ModelConfig`, and can be saved to a folder and loaded from it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the model to `folder`, which is created if needed; a model that is already there is replaced."""
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as occupied:
            raise InputError(f"folder must be a folder, or not exist yet; {occupied.filename} is a file") from None
        weights = _to_bytes(self.state_dict())
        digest = hashlib.sha256(weights).hexdigest()
        description = {
            "format": FORMAT,
            "version": VERSION,
            "model": type(self).__name__,
            "weights_sha256": digest,
            "config": self.config.model_dump(),
        }
        write_atomic(_weights_file(target, digest), weights)
        write_atomic(target / CONFIG_FILE, dump_json(description))
        for file in target.iterdir():
            if _WEIGHTS_FILE.fullmatch(file.name) and file != _weights_file(target, digest):
                file.unlink()

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Self:
        """The model that `save_pretrained` wrote to `folder`, in `eval()` and in the dtype it was saved in.

        A file that is missing, damaged or of another kind is a `DataError` that names it.
        """
        described = Path(folder) / CONFIG_FILE
        config, digest = _read_description(described, cls.__name__)
        file = _weights_file(described.parent, digest)
        weights = _read_weights(file, digest)
        _check_fit(weights, cls._expected_state(config, weights, described), file)
        # The initial weights are replaced, so drawing them must not change the random state of the caller.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = cls(config)
        model.to(_common_dtype(weights)).load_state_dict(weights)
        return model.to(device).eval()

    @classmethod
    def _expected_state(cls, config: ModelConfig, weights: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
        """The state dict of a model with this config, as tensors that take no memory."""
        stored = {match[1] for name in weights if (match := re.search(r"\blayers\.(\d+)\.", name))}
        if len(stored) != config.num_layers:
            raise DataError(f"{file} describes {config.num_layers} layers; the weights have {len(stored)}")
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                return cls(config).state_dict()
        except (RuntimeError, OverflowError, TypeError) as too_large:
            raise DataError(f"{file} describes a model that cannot be built: {too_large}") from too_large


def stored_weights_digest(folder: Path) -> str | None:
    """The SHA-256 sum of the weights in the folder of a model; None if they are missing or damaged."""
    try:
        digest = str(read_json(folder / CONFIG_FILE).get("weights_sha256"))
        return digest if sha256_of(_weights_file(folder, digest)) == digest else None
    except (DataError, OSError):
        return None


def _weights_file(folder: Path, digest: str) -> Path:
    return folder / f"weights-{digest[:16]}.safetensors"


def _to_bytes(state: Mapping[str, Tensor]) -> bytes:
    # Copied, because safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    written: bytes = _safetensors().save(copies)
    return written


def _read_description(file: Path, model: str) -> tuple[ModelConfig, str]:
    """The config, and the SHA-256 sum of the weights."""
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise DataError(f"{file} does not describe a skyformer model: its 'format' must be {FORMAT!r}")
    version = content.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise DataError(f"{file} has format version {version!r}; this version of skyformer reads only {VERSION}")
    if content.get("model") != model:
        raise DataError(f"{file} describes a {content.get('model')!r}, not a {model!r}")
    digest, settings = content.get("weights_sha256"), content.get("config")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise DataError(f"{file} must have the SHA-256 sum of the weights as 'weights_sha256'; got {digest!r}")
    if not isinstance(settings, dict):
        raise DataError(f"{file} must have the settings of the model as 'config'; got {type(settings).__name__}")
    try:
        return ModelConfig(**settings), digest
    except InputError as invalid:
        raise DataError(f"{file} has a config that cannot be used: {invalid}") from invalid


def _read_weights(file: Path, digest: str) -> dict[str, Tensor]:
    try:
        content = file.read_bytes()
    except OSError as failed:
        raise DataError(f"{file} cannot be read: {failed.strerror}") from failed
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError(f"{file} is damaged: its SHA-256 sum is not the one in {CONFIG_FILE}")
    safetensors = _safetensors()
    try:
        weights: dict[str, Tensor] = safetensors.load(content)
    except InterruptedRunError:
        raise
    except Exception as damaged:
        raise DataError(f"{file} is not a safetensors file: {damaged}") from damaged
    return weights


def _check_fit(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], file: Path) -> None:
    """Compare names and shapes before the model is built, which takes the memory that the config asks for."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise DataError(
            f"{file} does not hold the weights that {CONFIG_FILE} describes: missing {missing or 'none'}, "
            f"unknown {unknown or 'none'}"
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape or tensor.is_floating_point() != expected[name].is_floating_point():
            raise DataError(
                f"{file} holds {name!r} as {tensor.dtype} of shape {tuple(tensor.shape)}; {CONFIG_FILE} describes "
                f"{expected[name].dtype} of shape {tuple(expected[name].shape)}"
            )
        if tensor.is_floating_point() and tensor.dtype not in FLOAT_DTYPES:
            raise DataError(
                f"{file} holds {name!r} as {tensor.dtype}; weights must be float16, bfloat16, float32 or float64"
            )


def _common_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of the model, which is that of its token embeddings."""
    return next(tensor.dtype for name, tensor in weights.items() if name.endswith("embeddings.token"))


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as missing:
        raise MissingExtraError("safetensors") from missing
    return safetensors.torch
