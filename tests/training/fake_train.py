"""A fake of `skyformer train` that ends at once, as ordered. Standard library only, so that it starts quickly.

`orders.json` in the folder of runs lists for each run what each of its processes does; `library/` has the finished
runs. Every call appends a line to `calls.txt`: the run, the option, and the threads it was given.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    how, file = sys.argv[2], Path(sys.argv[3])
    name = file.stem if how == "--config" else file.name
    root = file.parent.parent if how == "--config" else file.parent
    threads = (
        [line.split()[1] for line in file.read_text().splitlines() if "threads:" in line] if file.is_file() else []
    )
    with (root / "calls.txt").open("a") as calls:
        calls.write(f"{name} {how} {','.join(threads)} {os.environ.get('OMP_NUM_THREADS')}\n")
    attempt = sum(line.startswith(f"{name} ") for line in (root / "calls.txt").read_text().splitlines())
    orders = json.loads((root / "orders.json").read_text()).get(name, ["finish"])
    order = orders[min(attempt, len(orders)) - 1]
    {"finish": finish, "fail": fail, "die": die, "obey": obey, "defy": defy}[order](root, name)


def finish(root: Path, name: str) -> None:
    """Replace the folder by the finished one in one step."""
    draft = root / f".{name}"
    shutil.copytree(root / "library" / name, draft)
    shutil.rmtree(root / name, ignore_errors=True)
    draft.rename(root / name)


def begin(root: Path, name: str) -> None:
    """The folder as it is while a process trains the run."""
    finish(root, name)
    (root / name / "result.json").unlink()
    state = json.loads((root / name / "state.json").read_text())
    state |= {"state": "running", "step": 7, "pid": os.getpid(), "host": platform.node()}
    # In one step, because the sweep reads it at the same time.
    (root / name / "state.new").write_text(json.dumps(state))
    (root / name / "state.new").replace(root / name / "state.json")


def fail(root: Path, name: str) -> None:
    print("step 7 ...\nerror: the loss is nan at step 8", file=sys.stderr)
    sys.exit(2)


def die(root: Path, name: str) -> None:
    begin(root, name)
    os.kill(os.getpid(), signal.SIGKILL)


def obey(root: Path, name: str) -> None:
    """Train until a signal comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    begin(root, name)
    time.sleep(60)


def defy(root: Path, name: str) -> None:
    """Train and ignore signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    begin(root, name)
    time.sleep(60)


if __name__ == "__main__":
    main()
