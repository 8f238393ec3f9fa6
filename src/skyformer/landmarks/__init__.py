"""Landmarks: the rows of [Q; K], or points near them, on which the Nystrom approximation is built.

- `base`: what a sampler is given and what it returns, and the registry of samplers.
- `samplers`: the built-in samplers.
- `leverage`: ridge leverage scores.
- `rows`: row numbers among valid rows, drawing rows, and gathering them with their gradients.
- `suggestion`: how many landmarks a given error needs.
"""

from skyformer.landmarks.base import (
    SAMPLERS,
    Candidates,
    CustomSampler,
    Landmarks,
    Sampler,
    check_points_and_slots,
    check_rows,
    get_sampler,
    list_samplers,
    register_sampler,
    without_masked_rows,
)
from skyformer.landmarks.rows import landmark_rows, take_rows
from skyformer.landmarks.samplers import (
    LeverageSampler,
    PaperSampler,
    ProbeSampler,
    QuerySampler,
    SegmentMeansSampler,
    StratifiedSampler,
    UniformSampler,
    is_builtin,
    segment_means,
)
from skyformer.landmarks.suggestion import statistical_dimension, suggest_landmarks

__all__ = [
    "SAMPLERS",
    "Candidates",
    "CustomSampler",
    "Landmarks",
    "LeverageSampler",
    "PaperSampler",
    "ProbeSampler",
    "QuerySampler",
    "Sampler",
    "SegmentMeansSampler",
    "StratifiedSampler",
    "UniformSampler",
    "check_points_and_slots",
    "check_rows",
    "get_sampler",
    "is_builtin",
    "landmark_rows",
    "list_samplers",
    "register_sampler",
    "segment_means",
    "statistical_dimension",
    "suggest_landmarks",
    "take_rows",
    "without_masked_rows",
]
