"""Keeps Lightning's announcements, tips and advice away from our own output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("lightning.pytorch", "lightning.fabric")
_ADVICE = (
    # A batch is ready in a thousandth of the time its step takes, and `loop.workers` is there for other cases.
    ".*does not have many workers.*",
    # The user chose the device.
    ".*available but not used.*",
    # Of Lightning's own making, about torch's insides.
    ".*isinstance\\(treespec, LeafSpec\\).*is deprecated.*",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Neither announcements nor advice that the config has settled already; other warnings pass."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in _ADVICE:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
