"""Further loggers of a run by name: those of Lightning, such as `wandb`, or any other by the path of its class.

`wandb:project=reviews,offline=true` is Weights & Biases with two options of its `WandbLogger`. The same names are given
with `--logger` and in `loop.loggers`. TensorBoard and metrics.csv are always there.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import Logger

from skyformer.errors import InputError, UnknownNameError
from skyformer.training.config import RunConfig, parse_yaml
from skyformer.training.runs import Run

_PACKAGES = {"comet": "comet-ml", "wandb": "wandb", "mlflow": "mlflow", "lit": "litlogger"}


def known_loggers() -> dict[str, type[Logger]]:
    """The loggers of Lightning by their short names: CSVLogger is `csv`, WandbLogger is `wandb`."""
    classes = {name: getattr(lightning_loggers, name) for name in lightning_loggers.__all__ if name != "Logger"}
    return {name.removesuffix("Logger").lower(): cls for name, cls in classes.items()}


def build_loggers(config: RunConfig, run: Run) -> list[Logger]:
    """The loggers that a config names. They get the run's name and folder, as far as they take them, and its config."""
    made = []
    for text in config.loop.loggers:
        name, _, options = text.partition(":")
        logger = _build(name, _parse(text, options), run)
        logger.log_hyperparams(config.model_dump(mode="json"))
        made.append(logger)
    return made


def check_loggers(config: RunConfig) -> None:
    """Report an unknown logger, a package that is not installed or a wrong option, before anything is created."""
    for text in config.loop.loggers:
        name, _, options = text.partition(":")
        cls, given = _find(name), _parse(text, options)
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        for option in given:
            if option not in parameters and not takes_any:
                raise UnknownNameError(f"option of the logger {name!r}:", option, list(parameters)[1:])
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise InputError(f"the logger {name!r} needs a package that is not installed: pip install {package}")


def _find(name: str) -> type[Logger]:
    known = known_loggers()
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UnknownNameError("logger", name, [*known, "or the path of a class, such as my_module.MyLogger"])
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"the logger {name!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Logger)):
        raise InputError(f"the logger {name!r} must be a subclass of Lightning's Logger; got {cls!r}")
    return cls


def _parse(text: str, options: str) -> dict[str, Any]:
    given = {}
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if not equals or not name.strip().isidentifier():
            raise InputError(f"a logger must be NAME or NAME:OPTION=VALUE,...; got {text!r}")
        given[name.strip()] = parse_yaml(value, f"the value of {name} in the logger {text!r}")
    return given


def _build(name: str, options: dict[str, Any], run: Run) -> Logger:
    cls = _find(name)
    parameters = inspect.signature(cls.__init__).parameters
    own: dict[str, Any] = {"save_dir": str(run.folder), "name": run.name}
    if name == "wandb":
        # A resumed run continues the same curves.
        own |= {"id": run.name, "resume": "allow"}
    if name == "csv":
        own |= {"name": "csv", "version": ""}
    defaults = {option: value for option, value in own.items() if option in parameters or name == "wandb"}
    try:
        return cls(**{**defaults, **options})
    except (TypeError, ValueError, ImportError) as error:
        raise InputError(f"the logger {name!r} cannot be started: {' '.join(str(error).split())}") from error
