"""What the paper reports, as constants to set our own results beside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

# The order of Table 1's columns; the tasks under the names they have here.
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
        """The accuracy on one task."""
        accuracy: float = getattr(self, task)
        return accuracy

    def average(self, tasks: Iterable[str] = TASK_TITLES) -> float:
        """The plain average over tasks; over all five it is the column AVG."""
        accuracies = [self.on(task) for task in tasks]
        return sum(accuracies) / len(accuracies)


# "Classification accuracy (%) on LRA benchmark", in blocks as the paper rules them.
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
