"""Every error and warning of the package; a message names the argument, what was expected and what was given."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit


class SkyformerError(Exception):
    """Base class of all errors raised on purpose; the command line prints them without a traceback."""

    exit_code = 2
    """Exit code of the command line."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message instead of the constructor's arguments, which may differ from it."""
        return _unpickle, (type(self), self.args, self.__dict__)


def _unpickle(kind: type[SkyformerError], args: tuple[Any, ...], state: dict[str, Any]) -> SkyformerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InputError(SkyformerError, ValueError):
    """An argument has a value that cannot be used."""


class ShapeError(InputError):
    """A tensor has the wrong number of dimensions, or sizes that do not match the other tensors."""


class MaskError(InputError):
    """A mask has the wrong shape or dtype."""


class UnknownNameError(InputError):
    """A name is not registered; the message contains `suggestion`, or else the most similar known name."""

    def __init__(
        self, what: str, name: object, known: Iterable[str], suggestion: str | None = None, advice: str = ""
    ) -> None:
        names = sorted(known)
        close = [suggestion] if suggestion else difflib.get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" {advice}" if advice else ""
        super().__init__(f"unknown {what} {name!r}; known: {', '.join(names)}.{hint}")


class UnsupportedError(SkyformerError, NotImplementedError):
    """The attention does not support what was requested; the message names one that does."""


class SolveError(SkyformerError, ArithmeticError):
    """A linear system could not be solved, even after adding regularisation."""


class DataError(SkyformerError):
    """A file or a data set is missing, damaged or not of the expected kind."""


class InterruptedRunError(SkyformerError):
    """A signal stopped the run; it saved its state and can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class TrainingError(SkyformerError):
    """Training had to stop, for example because the disk is full; earlier checkpoints are still there."""


class DivergedError(TrainingError):
    """A loss or a gradient is not finite; running it again would give the same."""


class RanksDisagreeError(InputError):
    """Processes that share a sequence were given different shapes, options or seeds; all raise it alike."""


class RankLostError(TrainingError):
    """Another process that shares the sequence ended, or did not answer within the timeout of the group."""


class MissedTargetError(SkyformerError):
    """A benchmark measured a value outside its target."""

    exit_code = 1


EXTRA_OF_MODULE = MappingProxyType(
    {
        "typer": "cli",
        "rich": "cli",
        "matplotlib": "cli",
        "pandas": "cli",
        "numpy": "model",
        "pydantic": "model",
        "safetensors": "model",
        "datasets": "lra",
        "filelock": "lra",
        "PIL": "lra",
        "platformdirs": "lra",
        "pyarrow": "lra",
        "lightning": "train",
        "tensorboard": "train",
        "torchmetrics": "train",
        "yaml": "train",
        "ray": "ray",
        "jinja2": "report",
        "plotly": "report",
        "accelerate": "hf",
        "transformers": "hf",
        "linformer": "peers",
        "nystrom_attention": "peers",
        "performer_pytorch": "peers",
        "pytest": "testing",
        "hypothesis": "testing",
    }
)
"""Modules of the optional dependencies, and the extra of pyproject.toml that installs them."""


def install_command(extra: str) -> str:
    """The command that installs an extra from where this package comes from: the clone or the wheel at hand.

    The name alone would not do: `skyformer` on the package index is not this package.
    """
    origin = _origin()
    return f"pip install '{origin}[{extra}]'" if origin else f"pip install '.[{extra}]' in a clone of this package"


def _origin() -> Path | None:
    """The clone that this file is in, or else the clone or wheel that pip installed the package from."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return clone
    try:
        recorded = metadata.distribution("skyformer").read_text("direct_url.json")
        path = Path(unquote(urlsplit(json.loads(recorded or "{}").get("url", "")).path))
    except (metadata.PackageNotFoundError, ValueError):
        return None
    return path if path.is_absolute() and path.exists() else None


class MissingExtraError(SkyformerError, ImportError):
    """An optional dependency is not installed; `extra` is needed only if it differs from EXTRA_OF_MODULE."""

    def __init__(self, module: str, extra: str | None = None) -> None:
        package = module.partition(".")[0]
        extra = extra or EXTRA_OF_MODULE[package]
        super().__init__(f"{package!r} is not installed: {install_command(extra)}")
        self.package = package


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The one-line error for a missing optional dependency; None if the module belongs to no extra, which is a bug."""
    cause: BaseException | None = error
    while cause is not None:
        # Some packages raise an error of their own, without a name, because of the one that names the module.
        module = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else ""
        if module.partition(".")[0] in EXTRA_OF_MODULE:
            return MissingExtraError(module)
        cause = cause.__cause__ or cause.__context__
    return None


class SkyformerWarning(UserWarning):
    """Base class of all warnings raised on purpose."""


class JitterWarning(SkyformerWarning):
    """A Cholesky factorisation succeeded only after adding to the diagonal."""


class CheckpointWarning(SkyformerWarning):
    """A checkpoint is damaged; the previous one is used instead."""


class DataWarning(SkyformerWarning):
    """The data that a run was trained on is not known."""


class IgnoredSettingWarning(SkyformerWarning):
    """The chosen attention does not support a setting of the model, which is ignored."""


class ReplacedWarning(SkyformerWarning):
    """Something that is known by name got another definition or other options under the same name."""


class PluginWarning(SkyformerWarning):
    """An installed package offers a part that cannot be loaded."""


class AttentionWarning(SkyformerWarning):
    """Weights are used with another attention than they were trained with."""
