"""Training runs that can be killed and resumed, and that give the same result for the same seed.

    from skyformer.training import load_preset, train

    result = train(load_preset("listops", "cpu", attention="skyformer", seed=1))

What happens in `skyformer train listops`, file by file:

    cli/train.py      reads the options
    presets.py        turns the task, the preset and the changed settings into a RunConfig (config.py)
    fit.py            train(): loads the data, creates the run's folder (runs.py), and starts Lightning with
      data.py           the batches
      module.py         the model with its loss and optimizer (building.py), and its evaluation
      callbacks.py      logging (metrics.py, progress.py), checkpoints.py, evaluations, and signals.py
    fit.py            tests the best model and returns the RunResult (runs.py)

`evaluate` is in fit.py too, `predict` in prediction.py. Names are imported when they are first used, so that importing
this package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from skyformer.errors import MissingExtraError, missing_extra

if TYPE_CHECKING:
    from skyformer.training.config import RunConfig
    from skyformer.training.fit import evaluate, resume, train, train_or_resume
    from skyformer.training.prediction import predict
    from skyformer.training.presets import list_presets, load_preset
    from skyformer.training.runs import RunResult, RunState, list_runs, open_run
    from skyformer.training.sweeps import sweep

_MODULE_OF = {
    "RunConfig": "config",
    "RunResult": "runs",
    "RunState": "runs",
    "evaluate": "fit",
    "list_presets": "presets",
    "list_runs": "runs",
    "load_preset": "presets",
    "open_run": "runs",
    "predict": "prediction",
    "resume": "fit",
    "sweep": "sweeps",
    "train": "fit",
    "train_or_resume": "fit",
}

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
    "train_or_resume",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"skyformer.training.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if missing_extra(error) is None:
            raise
        raise MissingExtraError(str(error.name), "train") from error
