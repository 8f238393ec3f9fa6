"""Durable checkpoints. Lightning's own are neither written atomically nor checked when they are loaded; these are.

    checkpoints/step-000500.ckpt    Lightning's checkpoint (weights, optimizer, schedule) and the run's own journal
    checkpoints/step-000500.json    written after it: size, SHA-256 sum, step, accuracy on the dev set

A checkpoint is the state right after a step, before the evaluation that may follow. The last two checkpoints and the
best one are kept, and also the ones that were the best when the last two were written, so that a run can resume from
the second-last checkpoint if the last one is damaged.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from skyformer.errors import CheckpointWarning, DataError, InterruptedRunError
from skyformer.files import dump_json, sha256_of, write_atomic
from skyformer.model.storage import StoredModel
from skyformer.settings import Accuracy, JsonRecord, read_json_record

JOURNAL = "skyformer"
"""The key in a checkpoint for what the run stores besides Lightning's state."""

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.json")


class CheckpointRecord(JsonRecord):
    """The JSON file of a checkpoint; `best_weights` is the SHA-256 sum of the best model's weights at that step.

    `config` and `data` are the digests of the run's settings and of its data.
    """

    step: int
    size: int
    sha256: str
    config: str
    data: str | None = None
    best_step: int | None = None
    best_weights: str | None = None
    accuracy: Accuracy | None = None


class CheckpointStore(CheckpointIO):
    """A run's folder of checkpoints, which Lightning saves to and loads from; `config` and `data` are digests."""

    def __init__(self, folder: Path, config: str, data: str | None = None) -> None:
        self.folder, self.config, self.data = folder, config, data

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.ckpt"

    def record_path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint atomically, then its record."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        content, journal, step = buffer.getvalue(), checkpoint[JOURNAL], int(checkpoint["global_step"])
        record = CheckpointRecord(
            step=step,
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            config=journal["config"],
            data=self.data,
            best_step=journal["best_step"],
            best_weights=journal["best_weights"],
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        # The record of an older checkpoint of this step would not match the new file.
        self.record_path(step).unlink(missing_ok=True)
        write_atomic(Path(path), content)
        self._write_record(record)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint if its file matches its record; only tensors and plain values are accepted."""
        file = Path(path)
        problem = self._problem(read_json_record(file.with_suffix(".json"), CheckpointRecord))
        if problem is not None:
            raise DataError(f"{file} cannot be used: {problem}")
        return _load(file)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the record first, so that there is never a record without its checkpoint."""
        file = Path(path)
        file.with_suffix(".json").unlink(missing_ok=True)
        file.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """The steps that have a record, newest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(file.name) for file in self.folder.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        return next((self.path(step) for step in self.steps()), None)

    def newest_good(self, best_is_safe: Callable[[CheckpointRecord], bool]) -> CheckpointRecord | None:
        """The newest checkpoint that is intact and whose best model is available.

        Damaged checkpoints are skipped with a warning. None if there is no checkpoint; an error if all are damaged.

        Args:
            best_is_safe: whether the best model of a record is available without its checkpoint.
        """
        damaged = []
        for step in self.steps():
            try:
                record = self._record(step)
                problem = self._problem(record) or self._problem_of_best(record, best_is_safe)
            except DataError as unreadable:
                problem = str(unreadable)
            if problem is None:
                return record
            damaged.append(f"{self.path(step)}: {problem}")
            warnings.warn(f"checkpoint {damaged[-1]}; using the previous one", CheckpointWarning, stacklevel=2)
        if damaged:
            raise DataError(
                f"no checkpoint in {self.folder} can be used ({damaged[0]}); train the run again, with another "
                "--runs-dir or after removing its folder"
            )
        return None

    def accuracy(self, step: int | None) -> float | None:
        """The accuracy on the dev set in a record; None if there is none."""
        record = None if step is None else self._readable_record(step)
        return None if record is None else record.accuracy

    def mark(self, step: int, accuracy: float) -> None:
        """Add the accuracy on the dev set to a record."""
        self._write_record(self._record(step).model_copy(update={"accuracy": accuracy}))

    def prune(self, best_step: int | None) -> None:
        """Remove all but the last two checkpoints, the best one, and the best ones of the last two records."""
        # Nothing can resume from a checkpoint with a damaged record, so it is not one of the last two.
        records = [record for step in self.steps() if (record := self._readable_record(step))]
        last = records[:KEPT]
        kept = {best_step, *(record.step for record in last), *(record.best_step for record in last)}
        for record in records:
            if record.step not in kept:
                self.remove_checkpoint(self.path(record.step))

    def sweep(self, newest: int | None) -> None:
        """Remove checkpoints without a record, and those after step `newest`, which are damaged."""
        for file in self.folder.glob("step-*.*"):
            step = re.match(r"step-(\d+)\.", file.name)
            newer = step is not None and (newest is None or int(step[1]) > newest)
            if newer or (file.suffix == ".ckpt" and not file.with_suffix(".json").exists()):
                file.unlink(missing_ok=True)

    def load_weights(self, step: int) -> dict[str, Tensor]:
        """The model's weights in a checkpoint."""
        state: Mapping[str, Tensor] = self.load_checkpoint(self.path(step))["state_dict"]
        return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}

    def _write_record(self, record: CheckpointRecord) -> None:
        write_atomic(self.record_path(record.step), dump_json(record.model_dump(mode="json")))

    def _record(self, step: int) -> CheckpointRecord:
        return read_json_record(self.record_path(step), CheckpointRecord)

    def _readable_record(self, step: int) -> CheckpointRecord | None:
        with suppress(DataError):
            return self._record(step)
        return None

    def _problem(self, record: CheckpointRecord) -> str | None:
        """What is wrong with a checkpoint; None if nothing is."""
        file = self.path(record.step)
        if record.config != self.config:
            return f"it belongs to another run: its config has the digest {record.config}, not {self.config}"
        if None not in (record.data, self.data) and record.data != self.data:
            return f"it was trained on other data: its data has the digest {record.data}, not {self.data}"
        try:
            size, digest = file.stat().st_size, sha256_of(file)
        except OSError as failed:
            return f"it cannot be read ({failed.strerror})"
        if size != record.size:
            return f"it has {size:,} bytes instead of {record.size:,}"
        return None if digest == record.sha256 else "its content has changed since it was written"

    def _problem_of_best(
        self, record: CheckpointRecord, best_is_safe: Callable[[CheckpointRecord], bool]
    ) -> str | None:
        if record.best_step is None or best_is_safe(record):
            return None
        problem = self._problem(self._record(record.best_step))
        return problem and f"the best model so far, of step {record.best_step}, is lost: {problem}"


def export_model(model: StoredModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Save the weights of a checkpoint as a model for `from_pretrained`, atomically."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as unfit:
        raise DataError(
            f"the checkpoint does not contain the model of this run: {str(unfit).splitlines()[0]}"
        ) from unfit
    model.save_pretrained(folder)


def _load(file: Path) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as failed:
        raise DataError(f"{file} cannot be read: {failed.strerror}") from failed
    except InterruptedRunError:
        # A second signal stops at any point, also here.
        raise
    except Exception as damaged:
        raise DataError(f"{file} is not a checkpoint: {str(damaged).splitlines()[0]}") from damaged
    if not isinstance(content, dict) or JOURNAL not in content:
        raise DataError(f"{file} was not written by `skyformer train`")
    return content
