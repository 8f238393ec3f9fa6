"""Where a run was computed: versions, machine, commit and command, as kept in its `environment.json`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

FORMAT = 1
_GIT_PATIENCE_SECONDS = 5
_DECIDES_NOTHING = {"command", "started", "host"}


class Environment(BaseModel):
    """What a result may depend on besides its config."""

    model_config = ConfigDict(frozen=True)

    format: int = FORMAT
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

    def digest(self) -> str:
        """Eight hexadecimal digits over all but the command, its time and the machine's name."""
        content = self.model_dump(mode="json", exclude=_DECIDES_NOTHING)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def describe_environment(threads: int | None = None) -> Environment:
    """This process, now; `threads` are those it is going to use, if they are not torch's own."""
    return Environment(
        skyformer=installed_version("skyformer"),
        commit=_commit(),
        python=platform.python_version(),
        torch=torch.__version__,
        lightning=installed_version("lightning"),
        platform=platform.platform(),
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads or torch.get_num_threads(),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        host=platform.node(),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        started=now(),
    )


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_version(package: str) -> str | None:
    """The version of a package, or nothing when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The processor's name; `platform` alone does not know it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package is used from, marked when its source has changed since."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", "src")
    return f"{head}-modified" if head and changes else head


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_PATIENCE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
