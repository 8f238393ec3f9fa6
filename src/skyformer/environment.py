"""The environment of a result: versions, machine, commit and command. Runs, studies and benchmarks all record it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

FORMAT = 1
_GIT_TIMEOUT_SECONDS = 5
_EXCLUDED_FROM_DIGEST = {"command", "started", "host"}
"""They differ from run to run and cannot change a result."""


@dataclass(frozen=True)
class Environment:
    """What a result may depend on besides its config."""

    skyformer: str | None
    commit: str | None
    python: str
    torch: str
    lightning: str | None
    platform: str
    cpu: str
    cores: int
    threads: int
    gpus: tuple[str, ...]
    host: str
    command: str
    started: str
    format: int = FORMAT

    def digest(self) -> str:
        """Eight hexadecimal digits that are equal for equal environments; command, time and host name do not count."""
        content = {name: value for name, value in asdict(self).items() if name not in _EXCLUDED_FROM_DIGEST}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def describe_environment(threads: int | None = None) -> Environment:
    """Describe this process.

    Args:
        threads: the number of threads it is going to use; torch's current number by default.
    """
    return Environment(
        skyformer=installed_version("skyformer"),
        commit=_commit(),
        python=platform.python_version(),
        torch=torch.__version__,
        lightning=installed_version("lightning"),
        platform=platform.platform(),
        cpu=processor_name(),
        cores=os.cpu_count() or 1,
        threads=threads or torch.get_num_threads(),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        host=platform.node(),
        # Names of files that are not UTF-8 could not be read back from JSON.
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]).encode(errors="backslashreplace").decode(),
        started=now(),
    )


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """The processor's name; `platform` alone does not know it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package is used from, marked when its source has changed since."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", "src")
    return f"{head}-modified" if head and changes else head


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
