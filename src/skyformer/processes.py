"""Processes: peak memory, memory limits, workers that end with their parent, work done in a fresh process, and a
probe for half precision."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from importlib import import_module
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from skyformer.errors import SkyformerError, UnsupportedError

_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")
_PARENT_DEATH_SIGNAL = 1
_OOM_MESSAGES = (
    "MemoryError",
    "allocate memory",
    "bad_alloc",
    "out of memory",
    "could not create a primitive",
    "could not create a memory object",
    "Thread creation failed",
)
"""What Python, torch and the libraries below it (oneDNN, OpenMP) print when an allocation fails."""

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""Signals after which a run saves its state and ends; Windows has only the first two."""

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
"""Set to this value before torch is first used, the variable keeps oneDNN from using AMX instructions."""

_CPUINFO = Path("/proc/cpuinfo")
_MATMUL_PROBE = """
import sys, torch
for size in (64, 256):
    inputs = torch.ones(size, size, dtype=getattr(torch, sys.argv[1]), requires_grad=True)
    torch.nn.functional.linear(inputs, inputs).sum().backward()
"""


def release_free_memory() -> None:
    """Return freed memory to the system, so that a later step cannot reuse it unseen; works with glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> int:
    """Reset the peak memory of this process; returns the bytes that it holds now."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
        return _status_bytes("VmRSS")
    return peak_bytes()


def peak_bytes() -> int:
    """The peak memory of this process since the last `reset_peak`, in bytes."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    import resource

    # Outside Linux the peak cannot be reset; macOS counts in bytes.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def written_bytes() -> int:
    """The bytes that this process has written so far, to files, pipes and sockets; Linux only."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError as missing:
        raise UnsupportedError(f"this system does not report how many bytes a process writes: {missing}") from missing
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def free_bytes() -> int | None:
    """Bytes that a new process can allocate without swapping; None where the system does not report it."""
    found = [_field_bytes(Path("/proc/meminfo"), "MemAvailable"), _container_free_bytes()]
    known = [each for each in found if each is not None]
    return min(known) if known else None


def limit_added_memory(more: int) -> None:
    """Make allocations fail once this process holds `more` bytes more than now.

    A failed allocation can be caught; a process that the system kills cannot. Has an effect on Linux only.
    """
    if _STATUS.exists():
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _status_bytes("VmData") + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def count_oom_kills() -> int | None:
    """How many processes the system has killed because it was out of memory; None where it does not report it."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        return counts[0] if counts else None
    return None


def is_oom_error(text: str) -> bool:
    """Whether an error message says that an allocation failed."""
    return any(words in text for words in _OOM_MESSAGES)


def prefer_as_oom_victim() -> None:
    """Ask the system to kill this process first if it runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with_parent() -> None:
    """Have this process killed when the process that started it ends; Linux only."""
    control = getattr(ctypes.CDLL(None), "prctl", None)
    if control is not None:
        control(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _container_free_bytes() -> int | None:
    """In a container: its limit minus what its processes hold, not counting cached files. Without a limit, the file
    contains the word "max"."""
    with suppress(OSError, ValueError, KeyError):
        limit, held = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - held + int(statistics["inactive_file"])
    return None


def _status_bytes(field: str) -> int:
    found = _field_bytes(_STATUS, field)
    if found is None:
        raise SkyformerError(f"{_STATUS} has no {field}")
    return found


def _field_bytes(file: Path, field: str) -> int | None:
    """A size in one of the system's files, which count in kB; None if it is not there."""
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def end_with_parent(ignored: Iterable[signal.Signals] = (signal.SIGINT,)) -> None:
    """Call this first in a worker: some signals are left to the parent, and the worker ends when the parent ends."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def process_exists(pid: int) -> bool:
    """Whether there is such a process; on Windows always True, because signal 0 would be Ctrl-C there."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class FreshRun:
    """How a call in a fresh process ended: exit code, what the function returned (None on failure), error output."""

    exit_code: int
    answer: dict[str, Any] | None
    stderr: str
    killed_by_oom: bool

    @property
    def out_of_memory(self) -> bool:
        return self.killed_by_oom or (self.exit_code != 0 and is_oom_error(self.stderr))

    def result(self, what: str) -> dict[str, Any]:
        """The answer; an error with the last line of the error output if `what` failed."""
        if self.answer is None:
            lines = self.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"exit code {self.exit_code}"
            raise SkyformerError(f"{what} failed in a process of its own: {reason}")
        return self.answer


def run_in_fresh_process(function: Callable[..., object], **arguments: Any) -> FreshRun:
    """Call a function of a module in a new process; arguments and answer, a dataclass or dict, travel as JSON.

    A fresh process makes peak memory comparable, because nothing was allocated or freed in it before.
    """
    kills_before = count_oom_kills()
    call = [function.__module__, function.__name__, json.dumps(arguments)]
    done = subprocess.run([sys.executable, "-c", _ANSWER_CALL, *call], capture_output=True, text=True, check=False)
    oom_was_possible = kills_before is None or count_oom_kills() != kills_before
    answer = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    return FreshRun(done.returncode, answer, done.stderr, done.returncode == -signal.SIGKILL and oom_was_possible)


_ANSWER_CALL = "from skyformer.processes import _answer_call; _answer_call()"


def _answer_call() -> None:
    """What the fresh process does: it ends with its parent, and is the first to be killed if memory runs out."""
    die_with_parent()
    prefer_as_oom_victim()
    module, name, arguments = sys.argv[1:]
    answer = getattr(import_module(module), name)(**json.loads(arguments))
    print(json.dumps(asdict(answer) if is_dataclass(answer) and not isinstance(answer, type) else answer))


def half_precision_crashes(dtype: str) -> bool:
    """Whether a matrix product of this dtype on the CPU kills the process (SIGILL).

    Some sandboxes do not allow the AMX instructions that the processor advertises; torch uses them all the same.
    This is tried once in a child process, and only where AMX is advertised and `ISA_VARIABLE` does not exclude it.

    Args:
        dtype: the name of torch's dtype, "bfloat16" or "float16".
    """
    return _may_use_amx() and _matmul_is_illegal(dtype)


def _may_use_amx() -> bool:
    allowed = os.environ.get(ISA_VARIABLE, "DEFAULT").upper()
    if allowed not in ("ALL", "DEFAULT") and "AMX" not in allowed:
        return False
    with suppress(OSError):
        lines = _CPUINFO.read_text(errors="replace").splitlines()
        return any("amx" in line for line in lines if line.startswith("flags"))
    return False


@cache
def _matmul_is_illegal(dtype: str) -> bool:
    done = subprocess.run([sys.executable, "-c", _MATMUL_PROBE, dtype], capture_output=True, check=False)
    return done.returncode == -signal.SIGILL


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
