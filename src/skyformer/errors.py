"""What bad input gets: every error and warning of the package, each saying what was expected and what came."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class SkyformerError(Exception):
    """Root of every error raised on purpose; the command line prints these without a traceback."""

    exit_code = 2
    """What the command line exits with."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes, also those whose arguments are not their message."""
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[SkyformerError], args: tuple[Any, ...], state: dict[str, Any]) -> SkyformerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InputError(SkyformerError, ValueError):
    """An argument has a value that cannot be used."""


class ShapeError(InputError):
    """A tensor has the wrong rank, or its sizes do not fit its partners'."""


class MaskError(InputError):
    """A mask has the wrong shape or dtype."""


class UnknownNameError(InputError):
    """A name was looked up and is not known; `meant` is what was probably meant, unless spelling tells that."""

    def __init__(self, what: str, name: object, known: Iterable[str], meant: str | None = None) -> None:
        names = sorted(known)
        close = [meant] if meant else difflib.get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {what} {name!r}; known: {', '.join(names)}.{hint}")


class UnsupportedError(SkyformerError, NotImplementedError):
    """The mechanism cannot do what was asked; the message says which one can."""


class SolveError(SkyformerError, ArithmeticError):
    """A linear system could not be solved, even with more regularisation."""


class DataError(SkyformerError):
    """A file or a data set is missing, damaged or not what it claims to be."""


class InterruptedRunError(SkyformerError):
    """A run was told to stop by a signal, saved its state and can go on later."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class TrainingError(SkyformerError):
    """A run cannot go on: a loss that is no number, a disk without space. What it saved before stays."""


class DivergedError(TrainingError):
    """A loss or a gradient is not finite; the same run would end so again."""


class MissingExtraError(SkyformerError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package!r} is not installed: pip install 'skyformer[{extra}]', or in a clone pip install '.[{extra}]'"
        )


class SkyformerWarning(UserWarning):
    """Root of every warning raised on purpose."""


class JitterWarning(SkyformerWarning):
    """A factorisation succeeded only after its diagonal was raised."""


class CheckpointWarning(SkyformerWarning):
    """A checkpoint is damaged, and the one before it is used."""


class IgnoredSettingWarning(SkyformerWarning):
    """A model has a setting that the attention chosen for it cannot honour, and goes on without."""
