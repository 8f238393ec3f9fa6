"""The results of the paper as constants, for comparison with ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

# In the order of the columns of Table 1.
TASK_TITLES = MappingProxyType(
    {"text": "Text", "listops": "ListOps", "retrieval": "Retrieval", "pathfinder": "Pathfinder", "image": "Image"}
)


@dataclass(frozen=True)
class PaperAccuracy:
    """One row of Table 1: test accuracy in percent, the average of three seeds."""

    attention: str
    title: str
    text: float
    listops: float
    retrieval: float
    pathfinder: float
    image: float

    def on(self, task: str) -> float:
        accuracy: float = getattr(self, task)
        return accuracy

    def average(self, tasks: Iterable[str] = TASK_TITLES) -> float:
        """The average over tasks; over all five it is the column AVG of Table 1."""
        accuracies = [self.on(task) for task in tasks]
        return sum(accuracies) / len(accuracies)


# Table 1, "Classification accuracy (%) on LRA benchmark", in the blocks of the paper.
ACCURACY_BLOCKS = (
    (
        PaperAccuracy("softmax", "Self-Attention", 61.95, 38.37, 80.69, 65.26, 40.57),
        PaperAccuracy("kernelized", "Kernelized Attention", 60.22, 38.78, 81.77, 70.73, 41.29),
    ),
    (
        PaperAccuracy("nystromformer", "Nystromformer", 64.83, 38.51, 80.52, 69.48, 41.30),
        PaperAccuracy("linformer", "Linformer", 58.93, 37.45, 78.19, 60.93, 37.96),
        PaperAccuracy("informer", "Informer", 62.64, 32.53, 77.57, 57.83, 38.10),
        PaperAccuracy("performer", "Performer", 64.19, 38.02, 80.04, 66.30, 41.43),
        PaperAccuracy("reformer", "Reformer", 62.93, 37.68, 78.99, 66.49, 48.87),
        PaperAccuracy("bigbird", "BigBird", 63.86, 39.25, 80.28, 68.72, 43.16),
    ),
    (PaperAccuracy("skyformer", "Skyformer", 64.70, 38.69, 82.06, 70.73, 40.77),),
)

ACCURACY = MappingProxyType({row.attention: row for block in ACCURACY_BLOCKS for row in block})


@dataclass(frozen=True)
class PaperCost:
    """One row of Table 2: hours for 50,000 steps and peak memory in GB on a V100, in the order of TASK_TITLES."""

    hours: tuple[float, ...]
    memory: tuple[float, ...]


COSTS = MappingProxyType(
    {
        "softmax": PaperCost((4.30, 2.24, 8.33, 2.57, 4.22), (10.37, 5.37, 10.77, 5.74, 11.47)),
        "kernelized": PaperCost((3.91, 1.99, 7.46, 2.42, 4.05), (5.73, 5.94, 10.46, 6.38, 6.38)),
        "nystromformer": PaperCost((0.71, 0.71, 1.29, 1.49, 2.70), (1.21, 1.37, 2.39, 3.35, 6.71)),
        "linformer": PaperCost((0.65, 0.60, 1.13, 1.09, 2.19), (0.99, 0.99, 1.89, 1.97, 3.94)),
        "informer": PaperCost((1.60, 1.19, 2.91, 2.39, 3.90), (5.12, 4.85, 5.77, 4.75, 9.51)),
        "performer": PaperCost((0.77, 0.73, 1.41, 1.40, 2.55), (1.09, 1.09, 2.16, 2.20, 4.39)),
        "reformer": PaperCost((0.94, 0.85, 1.73, 1.70, 3.08), (1.61, 1.61, 2.98, 3.21, 6.42)),
        "bigbird": PaperCost((2.00, 1.88, 3.81, 3.39, 6.53), (2.83, 2.71, 4.97, 4.97, 9.95)),
        "skyformer": PaperCost((1.02, 1.29, 1.86, 2.03, 3.40), (1.59, 1.75, 3.15, 4.13, 8.26)),
    }
)

# Table 3, "Ratios of instability score" to that of self-attention.
INSTABILITY = MappingProxyType(
    {
        "nystromformer": {"text": 1.03, "listops": 1.01, "retrieval": 0.97, "pathfinder": 0.99, "image": 1.02},
        "kernelized": {"text": 0.83, "listops": 0.77, "retrieval": 0.64, "pathfinder": 0.74, "image": 0.62},
        "skyformer": {"text": 0.81, "listops": 0.79, "retrieval": 0.64, "pathfinder": 0.79, "image": 0.65},
    }
)


class OfTask(Protocol):
    @property
    def task(self) -> str: ...


def tasks_among(cells: Iterable[OfTask]) -> list[str]:
    """The tasks of the cells, in the order of the paper's tables."""
    present = {cell.task for cell in cells}
    return [task for task in TASK_TITLES if task in present]
