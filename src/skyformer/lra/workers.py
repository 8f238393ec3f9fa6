"""How a worker process ends: with its parent, neither before nor after it."""

from __future__ import annotations

import os
import signal
from multiprocessing import parent_process
from threading import Thread


def end_with_parent() -> None:
    """To be called in a worker: an interrupt, which reaches the whole group, is left to the parent, and when the parent
    is gone, so is the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
