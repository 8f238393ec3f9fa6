"""How many scores per query tilted attention needs for a given error, measured on a sample of the queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyformer.attention.base import Inputs
from skyformer.attention.partition import take_rows, valid_first
from skyformer.attention.tilted import SMALLEST_BUDGET, TiltedAttention, TiltedPlan, check_kernel, tilted_attention
from skyformer.checks import check_at_least, check_positive, check_scale, check_share
from skyformer.functional import kernelized_attention, softmax_attention

NUM_ROWS = 256
"""Number of queries on which the error is measured."""

_FIRST = 32
_STEP = 8
_PRECISION = 16


@torch.no_grad()
def suggest_budget(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    epsilon: float,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    share: float = 1.0,
    num_rows: int = NUM_ROWS,
    slope: bool = True,
    ordered: bool = True,
    scale: float | None = None,
    kernel: str = "softmax",
) -> int:
    """A budget with which `tilted_attention` is within epsilon of exact attention on these inputs,

        |out - exact| <= epsilon |exact|        (spectral norms, per head).

    The error is measured on evenly spaced queries. The budget is doubled until it is small enough, then bisected to a
    sixteenth.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv). For example from a typical batch; all heads of all
            examples are used.
        epsilon: the relative error to reach.
        key_mask, query_mask, slope, ordered, scale, kernel: as for `tilted_attention`.
        share: the share of the heads that must reach epsilon; 1 means all. A few difficult heads may need a larger
            budget than all others.
        num_rows: number of queries of each example on which the error is measured, O(num_rows S P).

    Returns:
        The budget. With about 4/3 S scores per query tilted attention is exact, so it is never much larger.

    Example:
        >>> import torch, skyformer
        >>> steps = torch.randn(3, 1, 4, 1000, 32, generator=torch.Generator().manual_seed(0))
        >>> query, key, value = steps.cumsum(3).mul(0.05).unbind()
        >>> skyformer.suggest_budget(query, key, value, epsilon=0.05) < 240
        True
    """
    inputs = TiltedAttention.checked(Inputs(query, key, value, key_mask, query_mask))
    check_positive("epsilon", epsilon)
    check_share(share)
    check_at_least("num_rows", num_rows, 1)
    check_scale(scale)
    check_kernel(kernel)
    if 0 in query.shape[:3]:
        return SMALLEST_BUDGET
    sample = _Sample.of(inputs, num_rows, scale, kernel)

    def is_enough(budget: int) -> bool:
        if TiltedPlan.of_budget(budget).num_keys >= key.shape[2]:
            return True
        out = tilted_attention(
            query,
            key,
            value,
            budget=budget,
            key_mask=key_mask,
            query_mask=query_mask,
            slope=slope,
            ordered=ordered,
            scale=scale,
            kernel=kernel,
        )
        reached = sample.errors(out) <= epsilon
        return int(reached.sum()) >= math.ceil(share * reached.numel() - 1e-9)

    failed, enough = 0, _FIRST
    while not is_enough(enough):
        failed, enough = enough, 2 * enough
    while enough - failed > max(_STEP, enough // _PRECISION):
        middle = _STEP * math.ceil((failed + enough) / (2 * _STEP))
        failed, enough = (failed, middle) if is_enough(middle) else (middle, enough)
    return enough


@dataclass(frozen=True)
class _Sample:
    """Evenly spaced valid queries, rows (B, 1, m), and their exact outputs (B, H, m, Pv)."""

    rows: Tensor
    exact: Tensor

    @staticmethod
    def of(inputs: Inputs, num_rows: int, scale: float | None, kernel: str) -> _Sample:
        query = inputs.query
        order, count = valid_first(inputs.query_mask, query.shape[0], query.shape[2], query.device)
        spaced = (2 * torch.arange(num_rows, device=query.device) + 1) * count // (2 * num_rows)
        rows = order.gather(1, spaced)[:, None]
        attend = softmax_attention if kernel == "softmax" else kernelized_attention
        sampled = take_rows(query, rows)
        return _Sample(rows, attend(sampled, inputs.key, inputs.value, key_mask=inputs.key_mask, scale=scale).double())

    def errors(self, out: Tensor) -> Tensor:
        """The relative spectral errors of an output (B, H, L, Pv), (B, H); zero for examples without keys."""
        difference = take_rows(out, self.rows).double() - self.exact
        norms = [torch.linalg.matrix_norm(x, 2) for x in (difference, self.exact)]
        return norms[0] / norms[1].clamp(min=torch.finfo(torch.float64).tiny)
