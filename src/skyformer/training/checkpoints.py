"""Checkpoints that can be trusted: written in one step, summed, checked before use, and never all at risk.

    checkpoints/step-000500.ckpt    what Lightning saves: weights, optimiser, schedule, progress, and the run's journal
    checkpoints/step-000500.json    written after it: size, SHA-256 sum, step, accuracy on the dev set

A checkpoint is the state right after a step, before the evaluation that may follow. The last two and the best stay,
and whatever those two say was the best in their time, so that going back one loses nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from skyformer.errors import CheckpointWarning, DataError
from skyformer.files import dump_json, read_json, write_atomic
from skyformer.model.storage import StoredModel

FORMAT = 1
JOURNAL = "skyformer"
"""The key of a checkpoint under which a run keeps what Lightning does not know."""

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.json")


class CheckpointRecord(BaseModel):
    """What stands beside a checkpoint; `best_weights` is the sum of the best model's weights when it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    step: int
    size: int
    sha256: str
    config: str
    best_step: int | None = None
    best_weights: str | None = None
    accuracy: float | None = None


class CheckpointStore(CheckpointIO):
    """A run's folder of checkpoints, for Lightning to save to and load from; `config` is the digest of its config."""

    def __init__(self, folder: Path, config: str) -> None:
        self.folder, self.config = folder, config

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.ckpt"

    def record_path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """All of it or nothing, and its record last."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        content, journal, step = buffer.getvalue(), checkpoint[JOURNAL], int(checkpoint["global_step"])
        record = CheckpointRecord(
            step=step,
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            config=journal["config"],
            best_step=journal["best_step"],
            best_weights=journal["best_weights"],
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        # The record of an older file of this name would not fit the new one.
        self.record_path(step).unlink(missing_ok=True)
        write_atomic(Path(path), content)
        self._write_record(record)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors and plain values, of a file that is what its record says."""
        file = Path(path)
        problem = self._problem(self._read_record(file.with_suffix(".json")))
        if problem is not None:
            raise DataError(f"{file} cannot be used: {problem}")
        return _load(file)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Its record first, so that no record is ever without its checkpoint."""
        file = Path(path)
        file.with_suffix(".json").unlink(missing_ok=True)
        file.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """The steps that have a record, the newest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(file.name) for file in self.folder.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self) -> Path | None:
        """The last checkpoint that was completed."""
        return next((self.path(step) for step in self.steps()), None)

    def newest_good(self, best_is_safe: Callable[[CheckpointRecord], bool]) -> CheckpointRecord | None:
        """The newest that is whole and whose best model is at hand, in its own checkpoint or where `best_is_safe`.

        A damaged one is passed over with a warning. None when there is none at all; an error when all are damaged.
        """
        damaged = []
        for step in self.steps():
            try:
                record = self._read_record(self.record_path(step))
                problem = self._problem(record) or self._problem_of_best(record, best_is_safe)
            except DataError as unreadable:
                problem = str(unreadable)
            if problem is None:
                return record
            damaged.append(f"{self.path(step)}: {problem}")
            warnings.warn(f"checkpoint {damaged[-1]}; the one before it is used", CheckpointWarning, stacklevel=2)
        if damaged:
            raise DataError(
                f"no checkpoint in {self.folder} can be used ({damaged[0]}); the run has to be trained again: "
                "with another --runs-dir, or after its folder is removed"
            )
        return None

    def mark(self, step: int, accuracy: float) -> None:
        """Note in a record what the evaluation came to."""
        record = self._read_record(self.record_path(step))
        self._write_record(record.model_copy(update={"accuracy": accuracy}))

    def prune(self, best_step: int | None) -> None:
        """Remove what is neither among the last two, nor the best, nor was the best for one of the last two."""
        steps = self.steps()
        last = steps[:KEPT]
        kept = {*last, best_step, *(self._read_record(self.record_path(step)).best_step for step in last)}
        for step in steps:
            if step not in kept:
                self.remove_checkpoint(self.path(step))

    def sweep(self, newest: int | None) -> None:
        """Remove what a killed process left unfinished, and what is newer than `newest` because it is damaged."""
        if not self.folder.is_dir():
            return
        for file in self.folder.iterdir():
            step = re.match(r"step-(\d+)\.", file.name)
            newer = step is not None and (newest is None or int(step[1]) > newest)
            unfinished = file.suffix == ".partial" or (
                file.suffix == ".ckpt" and not file.with_suffix(".json").exists()
            )
            if newer or unfinished:
                file.unlink(missing_ok=True)

    def load_weights(self, step: int) -> dict[str, Tensor]:
        """The weights of the model alone."""
        state: Mapping[str, Tensor] = self.load_checkpoint(self.path(step))["state_dict"]
        return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}

    def _write_record(self, record: CheckpointRecord) -> None:
        write_atomic(self.record_path(record.step), dump_json(record.model_dump(mode="json")))

    def _read_record(self, file: Path) -> CheckpointRecord:
        content = read_json(file)
        if isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise DataError(
                f"{file} has format {content['format']}, made by a newer skyformer; upgrade to use this run"
            )
        try:
            return CheckpointRecord.model_validate(content)
        except ValidationError as invalid:
            raise DataError(f"{file} is damaged: {invalid.errors()[0]['msg']}") from None

    def _problem(self, record: CheckpointRecord) -> str | None:
        """What is wrong with a checkpoint's file, if anything is."""
        file = self.path(record.step)
        if record.config != self.config:
            return f"it is of another run, whose config has the digest {record.config} and not {self.config}"
        try:
            with file.open("rb") as content:
                size, digest = os.fstat(content.fileno()).st_size, hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as failed:
            return f"it cannot be read ({failed.strerror})"
        if size != record.size:
            return f"it has {size:,} bytes and should have {record.size:,}"
        return None if digest == record.sha256 else "its content has changed since it was written"

    def _problem_of_best(
        self, record: CheckpointRecord, best_is_safe: Callable[[CheckpointRecord], bool]
    ) -> str | None:
        if record.best_step is None or best_is_safe(record):
            return None
        problem = self._problem(self._read_record(self.record_path(record.best_step)))
        return problem and f"the best model of its time, of step {record.best_step}, is lost: {problem}"


def export_model(model: StoredModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Leave weights of a checkpoint as a model for `from_pretrained`, in one step."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as unfit:
        raise DataError(f"the checkpoint does not hold the model of this run: {str(unfit).splitlines()[0]}") from unfit
    model.save_pretrained(folder)


def stored_weights_digest(folder: Path) -> str | None:
    """The sum of the weights that lie in a model's folder, if they are whole."""
    try:
        promised = str(read_json(folder / "config.json").get("weights_sha256"))
        content = (folder / f"weights-{promised[:16]}.safetensors").read_bytes()
    except (DataError, OSError):
        return None
    return promised if hashlib.sha256(content).hexdigest() == promised else None


def _load(file: Path) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as failed:
        raise DataError(f"{file} cannot be read: {failed.strerror}") from failed
    except Exception as damaged:
        raise DataError(f"{file} is not a checkpoint: {str(damaged).splitlines()[0]}") from damaged
    if not isinstance(content, dict) or JOURNAL not in content:
        raise DataError(f"{file} is a checkpoint from elsewhere: expected one that `skyformer train` wrote")
    return content
