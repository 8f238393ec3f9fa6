"""How much memory this process holds, has held at most, and may still take."""

from __future__ import annotations

import ctypes
import signal
import sys
from contextlib import suppress
from pathlib import Path

from skyformer.errors import SkyformerError

_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")
_PARENT_DEATH_SIGNAL = 1
_NO_MEMORY = (
    "MemoryError",
    "allocate memory",
    "bad_alloc",
    "out of memory",
    "could not create a primitive",
    "could not create a memory object",
    "Thread creation failed",
)
"""What Python, torch and the libraries below it (oneDNN, OpenMP) say when an allocation fails."""


def return_free_memory() -> None:
    """Gives freed memory back to the system, so that a later step cannot hide in it; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> int:
    """Makes the kernel forget the peak of this process, and returns what it holds now."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
        return _status_bytes("VmRSS")
    return peak_bytes()


def peak_bytes() -> int:
    """The most that this process has held since the last `reset_peak`."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    import resource

    # Outside Linux the peak cannot be reset; macOS counts in bytes.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def free_bytes() -> int | None:
    """What a new process may take without anything being swapped or killed; None where the system does not say."""
    found = [_available_bytes(), _left_in_group()]
    known = [each for each in found if each is not None]
    return min(known) if known else None


def allow_more(more: int) -> None:
    """From now on this process may allocate `more` bytes beyond what it has; then allocating fails, which can be
    caught, where the system would otherwise kill. Linux only, elsewhere nothing happens."""
    if _STATUS.exists():
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _status_bytes("VmData") + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def killed_for_memory() -> int | None:
    """How many processes the system has ended for want of memory since it started; None where it does not say."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        return counts[0] if counts else None
    return None


def is_want_of_memory(text: str) -> bool:
    """Whether an error says that an allocation failed."""
    return any(words in text for words in _NO_MEMORY)


def volunteer_to_be_killed() -> None:
    """If the system runs out of memory all the same, it is to end this process and no other."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with_parent() -> None:
    """If the process that started this one is killed, this one is not to go on without it; Linux only."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is not None:
        control(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _available_bytes() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_group() -> int | None:
    """In a container: its limit less what its processes hold, files that can be read again apart; the limit reads
    "max" where there is none."""
    with suppress(OSError, ValueError, KeyError):
        limit, held = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - held + int(statistics["inactive_file"])
    return None


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SkyformerError(f"{_STATUS} has no {field}")
