"""One step in a process of its own: `python -m skyformer.bench.fresh REQUEST` prints its seconds and memory as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import torch

from skyformer.bench.contenders import (
    PEERS,
    PLAIN_LINFORMER,
    SDPA,
    Contender,
    Setting,
    attention_contender,
    layer_contender,
)
from skyformer.bench.measure import Fresh, run_step, step_memory


def find_contender(name: str) -> Contender:
    """A contender by the name it is listed under."""
    known = {c.name: c for c in (SDPA, PLAIN_LINFORMER, *PEERS)}
    if name in known:
        return known[name]
    if name.endswith(" layer"):
        return layer_contender(name.removesuffix(" layer"))
    return attention_contender(name)


def measure_here(name: str, setting: Setting) -> Fresh:
    """One step of a contender in this process."""
    contender = find_contender(name)
    # Libraries and thread pools are loaded before the measurement begins.
    run_step(contender.job(replace(setting, length=min(setting.length, 8 * setting.landmarks), batch=1)))
    job = contender.job(setting)
    seconds, added = step_memory(job)
    return Fresh(seconds, added, sum(x.numel() * x.element_size() for x in job.inputs))


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    print(json.dumps(asdict(measure_here(request["name"], Setting(**request["setting"])))))


if __name__ == "__main__":
    main()
