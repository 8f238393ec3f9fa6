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


# The values below are read off the published plots (the images in the PDF files of the authors' repository, measured in
# pixels from the grid lines): to about 1 % of the axis where a marker or corner is visible, and to 3 % where another
# one covers it.

ERROR_FEATURES = (16, 32, 64, 128, 256)
# Figure 1, "Spectral Norm Loss" by weights and n, then by method, one value for each of ERROR_FEATURES.
ERRORS = MappingProxyType(
    {
        ("initialised", 512): {
            "skyformer": (1.46, 1.14, 0.89, 0.61, 0.36),
            "nystromformer": (1.34, 1.34, 1.30, 1.19, 0.93),
            "performer": (1.82, 1.62, 1.45, 1.21, 1.20),
            "informer": (1.32, 1.29, 1.23, 1.11, 0.86),
        },
        ("initialised", 1024): {
            "skyformer": (2.17, 1.73, 1.31, 0.91, 0.54),
            "nystromformer": (2.06, 2.05, 2.05, 2.01, 1.91),
            "performer": (2.56, 1.99, 1.88, 1.80, 1.86),
            "informer": (2.06, 2.03, 1.98, 1.87, 1.67),
        },
        ("initialised", 2048): {
            "skyformer": (3.11, 2.46, 1.92, 1.33, 0.81),
            "nystromformer": (2.88, 2.87, 2.87, 2.84, 2.76),
            "performer": (4.49, 2.68, 2.65, 2.93, 2.55),
            "informer": (2.88, 2.86, 2.82, 2.74, 2.58),
        },
        ("initialised", 4096): {
            "skyformer": (4.65, 3.70, 2.88, 2.01, 1.19),
            "nystromformer": (4.66, 4.65, 4.64, 4.64, 4.62),
            "performer": (4.52, 4.32, 4.03, 4.41, 4.13),
            "informer": (4.67, 4.65, 4.62, 4.55, 4.43),
        },
        ("pretrained", 512): {
            "skyformer": (2.14, 1.46, 1.06, 0.76, 0.51),
            "nystromformer": (1.15, 1.15, 1.08, 0.95, 0.66),
            "performer": (1.54, 1.25, 1.11, 1.06, 1.07),
            "informer": (1.15, 1.12, 1.06, 0.95, 0.73),
        },
        ("pretrained", 1024): {
            "skyformer": (2.53, 1.78, 1.31, 0.98, 0.69),
            "nystromformer": (1.48, 1.48, 1.46, 1.38, 1.18),
            "performer": (1.86, 1.56, 1.44, 1.37, 1.36),
            "informer": (1.48, 1.45, 1.41, 1.33, 1.18),
        },
        ("pretrained", 2048): {
            "skyformer": (3.02, 2.14, 1.64, 1.26, 0.92),
            "nystromformer": (1.87, 1.86, 1.86, 1.83, 1.73),
            "performer": (2.83, 1.81, 1.76, 1.75, 1.70),
            "informer": (1.87, 1.85, 1.82, 1.76, 1.66),
        },
        ("pretrained", 4096): {
            "skyformer": (3.79, 2.77, 2.16, 1.72, 1.27),
            "nystromformer": (2.52, 2.51, 2.50, 2.49, 2.45),
            "performer": (2.91, 2.66, 2.33, 2.39, 2.31),
            "informer": (2.52, 2.51, 2.47, 2.43, 2.34),
        },
    }
)

CURVE_STEPS = tuple(range(500, 5001, 500))
# Figure 2: accuracy in percent by task and attention, one value for each of CURVE_STEPS. The plot has seconds; a curve
# has 100 evaluations, one every 500 steps. Skyformer's curve of ListOps has 70, at intervals that are taken to be the
# same.
CURVES = MappingProxyType(
    {
        "text": {
            "softmax": (51.2, 57.8, 61.4, 64.9, 63.4, 64.3, 64.4, 64.2, 64.6, 65.0),
            "kernelized": (51.8, 60.2, 63.7, 62.7, 64.5, 64.5, 64.6, 62.5, 64.3, 64.2),
            "skyformer": (51.2, 60.0, 63.4, 64.1, 63.7, 64.4, 64.6, 63.0, 64.4, 64.0),
        },
        "listops": {
            "softmax": (17.1, 16.0, 17.9, 15.7, 30.7, 35.7, 36.0, 36.4, 35.7, 36.1),
            "kernelized": (17.1, 19.6, 18.6, 18.3, 20.9, 36.1, 35.8, 36.3, 36.2, 36.0),
            "skyformer": (17.1, 19.0, 17.7, 16.6, 19.3, 36.6, 36.1, 35.7, 36.0, 35.0),
        },
    }
)

SPECTRUM_INDEX = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
# Figure 3: singular values by task, one for each of SPECTRUM_INDEX.
SPECTRA = MappingProxyType(
    {
        "text": (
            *(280, 27, 15, 1.3, 1.0, 0.67, 0.33, 0.22, 0.15, 0.073, 0.046, 0.030, 0.020, 0.013),
            *(6.1e-3, 2.9e-3, 1.4e-3, 4.9e-4),
        ),
        "listops": (
            *(255, 42, 4.1, 1.9, 0.79, 0.40, 0.13, 0.070, 0.045, 0.023, 0.013, 7.8e-3, 5.1e-3, 3.4e-3),
            *(1.7e-3, 8.2e-4, 3.8e-4, 1.1e-4),
        ),
        "retrieval": (
            *(260, 60, 22, 13, 7.7, 3.9, 2.1, 1.2, 0.74, 0.38, 0.20, 0.13, 0.090, 0.063),
            *(0.031, 0.017, 8.6e-3, 3.5e-3),
        ),
        "pathfinder": (
            *(145, 27, 14, 8.1, 4.7, 2.8, 1.4, 0.84, 0.54, 0.26, 0.15, 0.092, 0.060, 0.042),
            *(0.021, 0.011, 6.1e-3, 2.5e-3),
        ),
    }
)


class OfTask(Protocol):
    @property
    def task(self) -> str: ...


def tasks_among(cells: Iterable[OfTask]) -> list[str]:
    """The tasks of the cells, in the order of the paper's tables."""
    present = {cell.task for cell in cells}
    return [task for task in TASK_TITLES if task in present]
