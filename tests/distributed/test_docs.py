"""The code in docs/distributed.md runs on four ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.world import World

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def run_page(group: dist.ProcessGroup, code: list[str]) -> Any:
    """With what the page takes for granted; the group exists already."""
    from skyformer.model import SequenceClassifier

    names: dict[str, Any] = {"DistributedDataParallel": DistributedDataParallel}
    names["query"], names["key"], names["value"] = torch.randn(3, 1, 2, 10, 8)
    names["tokens"], names["mask"] = torch.zeros(2, 10, dtype=torch.int64), torch.ones(2, 10, dtype=torch.bool)
    for block in code:
        torch.manual_seed(0)
        names["model"] = SequenceClassifier(vocab_size=4, max_length=10, dim=8, hidden_dim=8)
        exec(re.sub(r"dist.init_process_group.*", "", block), names)
    return names["logits"].detach(), type(names["model"]).__name__


def test_the_code_runs(world: World) -> None:
    found = world.check(4, run_page, re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert all(torch.equal(logits, found[0][0]) for logits, _ in found)
    assert {name for _, name in found} == {"DistributedDataParallel"}
