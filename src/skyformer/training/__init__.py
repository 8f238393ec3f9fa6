"""Training that can be trusted: runs that survive being killed, the same seed for the same result.

    from skyformer.training import load_preset, train

    result = train(load_preset("listops", "cpu", attention="skyformer", seed=1))

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from skyformer.errors import MissingExtraError

if TYPE_CHECKING:
    from skyformer.training.config import RunConfig
    from skyformer.training.fit import evaluate, resume, train
    from skyformer.training.prediction import predict
    from skyformer.training.presets import list_presets, load_preset
    from skyformer.training.runs import RunResult, RunState, list_runs, open_run
    from skyformer.training.sweeps import sweep

__all__ = [
    "RunConfig",
    "RunResult",
    "RunState",
    "evaluate",
    "list_presets",
    "list_runs",
    "load_preset",
    "open_run",
    "predict",
    "resume",
    "sweep",
    "train",
]

_HOME = {
    "config": ("RunConfig",),
    "fit": ("evaluate", "resume", "train"),
    "prediction": ("predict",),
    "presets": ("list_presets", "load_preset"),
    "runs": ("RunResult", "RunState", "list_runs", "open_run"),
    "sweeps": ("sweep",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            try:
                return getattr(import_module(f"skyformer.training.{module}"), name)
            except ModuleNotFoundError as error:
                raise MissingExtraError(str(error.name), "train") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
