"""Tilted attention: per block of queries a few exact keys, and one pseudo key for each cell of the other keys.

Neighbouring queries look at much the same keys. With mu the scaled mean of a block of queries and T_j = <mu, k_j>:

1. The `num_exact` keys with the largest T are attended to exactly by that block.
2. The other keys lie in `num_cells` cells of near keys. A cell becomes one pseudo key, tilted towards the block: with
   p = softmax of T inside the cell, its key is E_p k, its value E_p v, and the entropy H(p) is added to its logit.
   exp(<q, E_p k> + H(p)) is Jensen's lower bound of the cell's sum of exponentials, with equality at q = mu.
3. One softmax over num_exact + num_cells keys gives each output of the block, a convex combination of values.
4. The slope corrects for the distance of a query from mu, u_i = q_i - mu. To first order the values of cells change:
   sum_r w_ir u_i M_r is added, with w_ir the weight that query i gives to the r-th quarter of the cells, M_r the mean
   of (k_j - k_cell(j)) v_j^T over the keys of that quarter under a, the tilted weights averaged over the blocks. To
   second order their weights change: the logit of a cell gains h_i Var(cell), where Var is the variance of its scores
   with all u, and h_i is u_i^T C u_i / 2 relative to its mean, with C the covariance of keys inside cells.

(All scores are multiplied by `scale`.) Cost per query: num_blocks + num_exact + num_cells scores at any length.
docs/tilted.md derives this and says what it cannot do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyformer.attention.base import Attention, Inputs, Promise, computed_in_float32
from skyformer.attention.partition import Parts, contiguous_parts, split_examples, take_rows, tree_parts, valid_first
from skyformer.attention.registry import register_attention
from skyformer.checks import check_at_least, check_scale
from skyformer.errors import InputError, UnknownNameError, UnsupportedError
from skyformer.functional import attend_kernelized, attend_softmax, value_range
from skyformer.ops.distances import accurate_points, mean_of_valid
from skyformer.ops.flash import softmax_product
from skyformer.ops.kernels import GaussianKernel, scale_of
from skyformer.ops.products import Plan
from skyformer.ops.tracing import is_variable, transforming

BUDGET = 240
"""The default number of scores per query."""

KERNELS = ("softmax", "gaussian")

EMPTY = -1e9
"""The logit of a key that does not exist. It is finite, so that a cell without keys has a finite gradient."""

SMALLEST_BUDGET = 8
_NUMBERS_AT_ONCE = 2**20
"""Numbers in the largest tensors of the heads that are computed at a time."""

_RIDGE = 1e-4
_WIDTH_MULTIPLE = 8
_GROUPS = 4
"""Groups of cells with a slope of their own."""


@dataclass(frozen=True)
class TiltedPlan:
    """How many blocks of queries, exact keys per block and cells; num_cells is a power of two."""

    num_blocks: int
    num_exact: int
    num_cells: int

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_exact", "num_cells"):
            check_at_least(name, getattr(self, name), 1)
        if self.num_cells & (self.num_cells - 1):
            raise InputError(f"num_cells must be a power of two; got {self.num_cells}")

    @staticmethod
    def of_budget(budget: int) -> TiltedPlan:
        """A plan of `budget` scores per query: the power of two up to a sixth of it for blocks, that near a quarter for
        cells, the rest for exact keys. Chosen on heads of a pretrained MiniLM over another text; see
        docs/tilted.md."""
        check_at_least("budget", budget, SMALLEST_BUDGET)
        blocks = 1 << max(0, (budget // 6).bit_length() - 1)
        cells = 2 ** round(math.log2(budget / 4))
        return TiltedPlan(blocks, budget - blocks - cells, cells)

    @staticmethod
    def choose(budget: int | None, num_blocks: int | None, num_exact: int | None, num_cells: int | None) -> TiltedPlan:
        """The plan of a budget (`BUDGET` by default), or of all three numbers."""
        numbers = (num_blocks, num_exact, num_cells)
        if num_blocks is not None and num_exact is not None and num_cells is not None and budget is None:
            return TiltedPlan(num_blocks, num_exact, num_cells)
        if any(number is not None for number in numbers):
            raise InputError(
                "give either budget or all of num_blocks, num_exact and num_cells; "
                f"got budget={budget}, num_blocks={num_blocks}, num_exact={num_exact}, num_cells={num_cells}"
            )
        return TiltedPlan.of_budget(BUDGET if budget is None else budget)

    @property
    def num_keys(self) -> int:
        """Keys in each block's softmax. An example with no more valid keys than this is computed exactly."""
        return self.num_exact + self.num_cells

    @property
    def cost(self) -> int:
        """Scores computed per query."""
        return self.num_blocks + self.num_keys

    def heads_at_once(self, inputs: Inputs) -> int:
        """How many heads are computed at a time."""
        width = inputs.key.shape[-1] + inputs.value.shape[-1]
        numbers = self.num_blocks * (self.num_keys * width + inputs.key.shape[2])
        return max(1, _NUMBERS_AT_ONCE // numbers)


def tilted_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budget: int | None = None,
    num_blocks: int | None = None,
    num_exact: int | None = None,
    num_cells: int | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    slope: bool = True,
    ordered: bool = True,
    scale: float | None = None,
    kernel: str = "softmax",
) -> Tensor:
    """An approximation of softmax attention, or of Kernelized Attention, for trained weights. O(budget (L + S) P) time.

    Args:
        query: (B, H, L, P). key: (B, H, S, P). value: (B, H, S, Pv).
        budget: scores per query, 240 by default; it is divided among the next three.
        num_blocks: blocks that the queries are cut into.
        num_exact: keys that a block attends to exactly.
        num_cells: cells for all other keys, a power of two. An example with at most num_exact + num_cells valid keys is
            computed exactly.
        key_mask: bool (B, S), True = attend.
        query_mask: bool (B, L), True = a real query; `key_mask` by default when L == S.
        is_causal: not supported, because a block of queries shares its exact keys and cells.
        slope: correct the values and weights of cells for the distance of a query from its block's mean; half the error
            for little time.
        ordered: whether neighbouring queries resemble each other, as in text; otherwise blocks are made of near ones.
        scale: factor of the scores; P ** -0.5 by default.
        kernel: "softmax", or "gaussian" for Kernelized Attention.

    Returns:
        (B, H, L, Pv).

    Example:
        >>> import torch, skyformer
        >>> query, key, value = torch.randn(3, 1, 4, 1000, 32).cumsum(3).mul(0.05).unbind()
        >>> out = skyformer.tilted_attention(query, key, value, budget=240)
        >>> exact = skyformer.softmax_attention(query, key, value)
        >>> bool((out - exact).norm() < 0.05 * exact.norm())
        True
    """
    inputs = TiltedAttention.checked(Inputs(query, key, value, key_mask, query_mask, is_causal))
    check_scale(scale)
    check_kernel(kernel)
    return _attend(inputs, TiltedPlan.choose(budget, num_blocks, num_exact, num_cells), slope, ordered, scale, kernel)


def check_kernel(kernel: str) -> None:
    """`kernel` is the name of one of `KERNELS`."""
    if kernel not in KERNELS:
        raise UnknownNameError("kernel of tilted attention", kernel, KERNELS)


@computed_in_float32
def _attend(inputs: Inputs, plan: TiltedPlan, slope: bool, ordered: bool, scale: float | None, kernel: str) -> Tensor:
    query, key, value, key_mask = inputs.query, inputs.key, inputs.value, inputs.key_mask
    if torch.compiler.is_exporting() and (is_variable(query.shape[2]) or is_variable(key.shape[2])):
        raise UnsupportedError(
            "torch.export of tilted attention must have a fixed length, because the sizes of its blocks and cells "
            "follow from it; the batch size may vary: dynamic_shapes={0: Dim('batch')} for query, key and value"
        )
    scale = scale_of(query, scale)
    if key.shape[2] > plan.num_keys and query.numel() > 0:
        if kernel == "gaussian":
            query, key = accurate_points(query, key, key_mask, scale)
            value = value.to(query.dtype)
        # An example without keys is computed as if it had all of them, which is finite, and its output is then zero.
        some_keys = None if key_mask is None else key_mask | ~key_mask.any(-1, keepdim=True)
        scaled = _Scaled(query, key, value, some_keys, inputs.query_mask, False, scale, kernel == "gaussian")
        out = _approximate(scaled, plan, slope, ordered)
        return out if key_mask is None else out.masked_fill(~key_mask.any(-1)[:, None, None, None], 0)
    if kernel == "gaussian":
        return attend_kernelized(query, key, value, key_mask, Plan(GaussianKernel(), scale))
    return attend_softmax(query, key, value, key_mask, False, scale)


@dataclass(frozen=True)
class _Scaled(Inputs):
    """Checked inputs in float32 or float64 with their scale, and whether the kernel is the Gaussian one."""

    scale: float = 1.0
    gaussian: bool = False

    def centred(self) -> _Scaled:
        """The same with the mean of the keys moved to zero, where rounding errors are smallest. Softmax attention does
        not change if all keys move alike, the Gaussian kernel if queries and keys do."""
        mean = mean_of_valid(self.key.detach(), self.key_mask)
        return replace(self, key=self.key - mean, query=self.query - mean if self.gaussian else self.query)

    def each_head_alone(self) -> _Scaled:
        """The same with each head as an example of its own: (B * H, 1, n, P)."""
        heads = self.query.shape[1]
        query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (self.query, self.key, self.value))
        masks = (self.key_mask, self.query_mask)
        key_mask, query_mask = (None if mask is None else mask.repeat_interleave(heads, 0) for mask in masks)
        return replace(self, query=query, key=key, value=value, key_mask=key_mask, query_mask=query_mask)

    def split(self, count: int) -> Iterator[_Scaled]:
        """Parts of at most `count` examples."""
        tensors = (self.query, self.key, self.value, self.key_mask, self.query_mask)
        for query, key, value, key_mask, query_mask in split_examples(count, *tensors):
            assert query is not None
            assert key is not None
            assert value is not None
            yield replace(self, query=query, key=key, value=value, key_mask=key_mask, query_mask=query_mask)


def _approximate(inputs: _Scaled, plan: TiltedPlan, slope: bool, ordered: bool) -> Tensor:
    """Tilted attention where there are more than plan.num_keys keys: (B, H, L, Pv).

    All choices are made for all heads at once. Then a few heads at a time are computed, so that their tensors stay in
    the cache; and again in the backward pass, so that memory is needed for a few heads at a time only.
    """
    heads = inputs.each_head_alone().centred()
    blocks, (cells, short) = _query_blocks(heads, plan, ordered), _key_cells(heads, plan)
    if torch.compiler.is_compiling():
        # It would trace every part, which takes long, and the number of parts would fix the batch size of a program.
        out = _recomputed_in_backward(heads, blocks, cells, short, plan, slope)
    else:
        count = plan.heads_at_once(inputs)
        shorts = repeat(None) if short is None else short.split(count)
        parts = zip(heads.split(count), blocks.split(count), cells.split(count), shorts, strict=False)
        out = torch.cat([_recomputed_in_backward(*part, plan, slope) for part in parts])
    return out.view(*inputs.query.shape[:3], -1)


def _recomputed_in_backward(
    inputs: _Scaled, blocks: Parts, cells: Parts, short: _Short | None, plan: TiltedPlan, slope: bool
) -> Tensor:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend_part(replace(inputs, query=query, key=key, value=value), blocks, cells, short, plan, slope)

    tensors = (inputs.query, inputs.key, inputs.value)
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or transforming() or not needed:
        return run(*tensors)
    out: Tensor = checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
    return out


def _attend_part(
    inputs: _Scaled, blocks: Parts, cells: Parts, short: _Short | None, plan: TiltedPlan, slope: bool
) -> Tensor:
    """Tilted attention of some heads, given their blocks and cells."""
    columns = _Columns.of(inputs, plan)
    q = blocks.take(inputs.query)
    mu = inputs.scale * blocks.mean(q)
    u, spread = _around_mean(inputs.scale * q, mu, blocks)
    rows = columns.join(inputs, spread)
    kv = cells.take(rows)
    T, exact = _tilt(kv, mu, cells, short, plan)
    p = T.softmax(3)
    # The log of the sum of exponentials, without computing them again: T_j - log p_j is the same for every key j.
    log_weight = (T.amax(3) - p.amax(3).log()).mT
    cell = (p.mT @ kv).transpose(2, 3)
    attended = torch.cat([_take_blocks(rows, exact), columns.complete(cell, mu, log_weight, spread)], 3)
    if not slope:
        return blocks.put_back(_attend_blocks(q, None, attended, inputs, columns)[0], inputs.query.shape[2])
    among_keys, with_values = _covariances(p, kv, log_weight, blocks, columns)
    out, weights = _attend_blocks(q, _bend(u, among_keys, spread), attended, inputs, columns)
    by_group = (weights.unsqueeze(-1) * u.unsqueeze(4)).flatten(2, 3).flatten(3)
    change = _within_value_range((by_group @ with_values).view_as(out), weights, inputs)
    return blocks.put_back(out + change, inputs.query.shape[2])


def _around_mean(q: Tensor, mu: Tensor, blocks: Parts) -> tuple[Tensor, Tensor]:
    """u = q - mu (B, H, blocks, b, P), zero in empty slots, and the mean of u^T u over all queries: (B, H, P, P)."""
    u = q - mu.unsqueeze(3)
    count: int | Tensor = u.shape[2] * u.shape[3]
    if blocks.filled is not None:
        u = u.masked_fill(~blocks.filled.unsqueeze(-1), 0)
        count = blocks.filled.sum((2, 3)).clamp(min=1)[..., None, None]
    flat = u.flatten(2, 3)
    return u, flat.mT @ flat / count


@dataclass(frozen=True)
class _Columns:
    """Keys and values side by side, so that they are gathered together; both padded to the same, good width.

    A key's half is followed by a bias (EMPTY where masked), the factor of a query's height (one for all real keys), and
    the factor of a query's bend (zero except for cells); a value's by one column per group of cells that marks those in
    it, one that marks the null key, and the key's square in the metric of the spread.
    """

    head_dim: int
    value_dim: int
    groups: int

    @staticmethod
    def of(inputs: _Scaled, plan: TiltedPlan) -> _Columns:
        return _Columns(inputs.key.shape[-1], inputs.value.shape[-1], min(_GROUPS, plan.num_cells))

    @property
    def width(self) -> int:
        return _WIDTH_MULTIPLE * math.ceil(max(self.head_dim + 3, self.value_dim + self.groups + 2) / _WIDTH_MULTIPLE)

    def join(self, inputs: _Scaled, spread: Tensor) -> Tensor:
        """The rows of all keys and values: (B, H, S, 2 width)."""
        key, value, mask = inputs.key, inputs.value, inputs.key_mask
        zero = key.new_zeros(()).expand(*key.shape[:3], 1)
        bias = -0.5 * inputs.scale * key.square().sum(-1, keepdim=True) if inputs.gaussian else zero
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, :, None], EMPTY)
        square = ((key @ spread) * key).sum(-1, keepdim=True)
        return self._cat(key, bias, zero, value, zero.expand(*key.shape[:3], self.groups), square)

    def complete(self, cell: Tensor, mu: Tensor, log_weight: Tensor, spread: Tensor) -> Tensor:
        """The rows of pseudo keys from the means (B, H, blocks, cells, 2 width) of their keys' rows."""
        key, value = cell[..., : self.head_dim], cell[..., self.width : self.width + self.value_dim]
        entropy = log_weight.unsqueeze(-1) - key @ mu.unsqueeze(-1)
        square = ((key @ spread.unsqueeze(2)) * key).sum(-1, keepdim=True)
        mean_square = cell[..., self._square, None]
        variance = (mean_square - square).clamp(0, 1)
        # Rounding of two large, almost equal numbers is no variance.
        rounding = 16 * self.head_dim * torch.finfo(key.dtype).eps
        variance = variance.masked_fill(mean_square - square < rounding * mean_square, 0)
        group = torch.arange(cell.shape[3], device=cell.device) * self.groups // cell.shape[3]
        marks = (group[:, None] == torch.arange(self.groups, device=cell.device)).to(cell.dtype)
        return self._cat(key, entropy, variance, value, marks.expand(*cell.shape[:4], -1), torch.zeros_like(entropy))

    @property
    def _square(self) -> int:
        return self.width + self.value_dim + self.groups + 1

    def _cat(self, key: Tensor, bias: Tensor, bend: Tensor, value: Tensor, marks: Tensor, square: Tensor) -> Tensor:
        one = key.new_ones(()).expand_as(bias)
        zero = key.new_zeros(()).expand_as(bias)
        padding, rest = (
            zero.expand(*bias.shape[:-1], self.width - used)
            for used in (self.head_dim + 3, self.value_dim + self.groups + 2)
        )
        return torch.cat([key, bias, one, bend, padding, value, marks, zero, square, rest], -1)


def _query_blocks(inputs: _Scaled, plan: TiltedPlan, ordered: bool) -> Parts:
    """Blocks of neighbouring queries, or of near queries if their order says nothing."""
    query, mask = inputs.query, inputs.query_mask
    count = min(plan.num_blocks, query.shape[2])
    if ordered:
        return contiguous_parts(mask, query.shape[0], query.shape[2], count, query.device)
    near = _in_metric_of(query, inputs.key, inputs.key_mask)
    return tree_parts(near, mask, 1 << (count.bit_length() - 1))


def _key_cells(inputs: _Scaled, plan: TiltedPlan) -> tuple[Parts, _Short | None]:
    """Cells of keys that give near scores to the queries; and which examples have so few keys that they are exact."""
    key, mask = inputs.key, inputs.key_mask
    cells = tree_parts(_in_metric_of(key, inputs.query, inputs.query_mask), mask, plan.num_cells)
    if mask is None:
        return cells, None
    short = _Short.among(mask, plan)
    return short.one_key_per_cell(cells), short


@dataclass(frozen=True)
class _Short:
    """Examples (B, 1, 1, 1) with at most plan.num_keys valid keys. Their first num_exact keys are the exact ones, and
    each cell has one of the others, so that nothing is approximated.

    rows (B, num_keys): their valid keys first. filled: bool (B, num_keys).
    """

    examples: Tensor
    rows: Tensor
    filled: Tensor
    num_exact: int

    @staticmethod
    def among(mask: Tensor, plan: TiltedPlan) -> _Short:
        order, count = valid_first(mask, mask.shape[0], mask.shape[1], mask.device)
        rank = torch.arange(plan.num_keys, device=mask.device)
        return _Short(
            (count <= plan.num_keys)[..., None, None], order[:, : plan.num_keys], rank < count, plan.num_exact
        )

    def split(self, count: int) -> Iterator[_Short]:
        """Parts of at most `count` examples."""
        tensors = (x.split(count) for x in (self.examples, self.rows, self.filled))
        for examples, rows, filled in zip(*tensors, strict=True):
            yield _Short(examples, rows, filled, self.num_exact)

    def one_key_per_cell(self, cells: Parts) -> Parts:
        rows, filled = (x[:, None, self.num_exact :, None] for x in (self.rows, self.filled))
        first = torch.arange(cells.rows.shape[-1], device=rows.device) == 0
        own = filled & first
        others = torch.ones_like(own) if cells.filled is None else cells.filled
        return Parts(torch.where(self.examples, rows, cells.rows), torch.where(self.examples, own, others))


def _in_metric_of(x: Tensor, others: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, n, P) times the Cholesky factor of the covariance of `others`: two rows of x are then as far apart as
    their scores with the others are on average."""
    with torch.no_grad():
        centred = others - mean_of_valid(others, mask)
        if mask is not None:
            centred = centred.masked_fill(~mask[:, None, :, None], 0)
        covariance = centred.mT @ centred / others.shape[2]
        size = covariance.diagonal(dim1=-2, dim2=-1)
        ridge = _RIDGE * size.mean(-1, keepdim=True) + torch.finfo(x.dtype).tiny ** 0.5
        factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag_embed(ridge.expand_as(size)))
        return x.detach() @ factor


def _tilt(k: Tensor, mu: Tensor, cells: Parts, short: _Short | None, plan: TiltedPlan) -> tuple[Tensor, Tensor]:
    """Scores of the block means with the keys of each cell, EMPTY for those that the block attends to exactly:
    (B, H, cells, slots, blocks); and the rows of the latter, (B, H, blocks, exact)."""
    head_dim = mu.shape[-1]
    T = k[..., :head_dim].flatten(2, 3) @ mu.mT + k[..., head_dim, None].flatten(2, 3)
    if cells.filled is not None:
        T = T.masked_fill(~cells.filled.flatten(2, 3).unsqueeze(-1), EMPTY)
    top = T.detach().mT.topk(plan.num_exact, dim=-1, sorted=False).indices
    rest = T.scatter(2, top.mT, EMPTY)
    exact = cells.rows.flatten(2, 3).expand(*top.shape[:2], -1).unsqueeze(2).expand(*top.shape[:3], -1).gather(3, top)
    if short is not None:
        rest = torch.where(short.examples, T, rest)
        exact = torch.where(short.examples, short.rows[:, None, None, : plan.num_exact], exact)
    return rest.unflatten(2, cells.rows.shape[2:]), exact


def _take_blocks(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, H, blocks, k) of x (B, H, n, P): (B, H, blocks, k, P)."""
    return take_rows(x, rows.flatten(2)).unflatten(2, rows.shape[2:])


def _attend_blocks(
    q: Tensor, bend: Tensor | None, attended: Tensor, inputs: _Scaled, columns: _Columns
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each block q (B, H, blocks, b, P) over its rows; and each query's weights of the groups of
    cells: (B, H, blocks, b, groups).

    The bias of a key is a feature that every query multiplies by one, so its gradient comes with the key's. For the
    Gaussian kernel a null key with logit 0 and value 0 joins: its weight is 1 / (1 + sum_j kappa(q_i, k_j)), and
    dividing by it leaves the sum that is not normalised.
    """
    scale, value_dim, width = inputs.scale, columns.value_dim, columns.width
    bias = torch.full_like(q[..., :1], 1 / scale)
    height = -0.5 * q.square().sum(-1, keepdim=True) if inputs.gaussian else torch.zeros_like(bias)
    features = [q, bias, height, torch.zeros_like(bias) if bend is None else bend / scale]
    query = F.pad(torch.cat(features, -1), (0, width - columns.head_dim - 3))
    null = value_dim + columns.groups
    if inputs.gaussian:
        row = (torch.arange(2 * width, device=q.device) == width + null).to(q.dtype)
        attended = torch.cat([attended, row.expand(*attended.shape[:3], 1, -1)], 3)
    attended = attended.flatten(0, 1)
    out = softmax_product(query.flatten(0, 1), attended[..., :width], attended[..., width:], scale=scale)
    out = out.unflatten(0, q.shape[:2])
    if inputs.gaussian:
        # Without rounding, the sum of the kernel values is at most the number of keys, times e with bend.
        out = out / out[..., null, None].clamp(min=1 / (1 + math.e * inputs.key.shape[2]))
    return out[..., :value_dim], out[..., value_dim:null]


def _covariances(p: Tensor, kv: Tensor, log_weight: Tensor, blocks: Parts, columns: _Columns) -> tuple[Tensor, Tensor]:
    """sum_j a_j (k_j - k_cell) k_j^T over all keys (B, H, P, P); and sum_j a_j (k_j - k_cell) v_j^T / sum_j a_j over
    each group of cells, one below the other (B, H, groups * P, Pv). k_cell is the mean of a cell's keys under a.

    p: (B, H, cells, slots, blocks). kv: rows by cell. log_weight: (B, H, blocks, cells).
    """
    share = log_weight.softmax(-1)
    if blocks.filled is not None:
        share = share.masked_fill(~blocks.filled.any(-1, keepdim=True), 0)
    a = p @ share.mT.unsqueeze(-1)
    # Above zero by so much that the gradient of a division by it does not overflow.
    least = torch.finfo(a.dtype).tiny ** 0.5
    total = a.sum(3, keepdim=True)
    weighted = a * kv[..., : columns.head_dim]
    weighted = weighted - a * (weighted.sum(3, keepdim=True) / total.clamp(min=least))
    weighted, rows, total = (x.unflatten(2, (columns.groups, -1)).flatten(3, 4) for x in (weighted, kv, total))
    sums = weighted.mT @ rows
    with_values = sums[..., columns.width : columns.width + columns.value_dim]
    with_values = with_values / total.sum(3, keepdim=True).clamp(min=least)
    return sums[..., : columns.head_dim].sum(2), with_values.flatten(2, 3)


def _bend(u: Tensor, covariance: Tensor, spread: Tensor) -> Tensor:
    """h_i = u_i C u_i^T divided by twice its mean over all queries, at most 1: (B, H, blocks, b, 1)."""
    flat = u.flatten(2, 3)
    mean = (covariance * spread).sum((-2, -1)).clamp(min=torch.finfo(u.dtype).tiny ** 0.5)[..., None, None]
    h = ((flat @ covariance) * flat).sum(-1, keepdim=True) / (2 * mean)
    return h.clamp(max=1).unflatten(2, u.shape[2:4])


def _within_value_range(change: Tensor, weights: Tensor, inputs: _Scaled) -> Tensor:
    """`change` (B, H, blocks, b, Pv), cut where it is larger than the distance between any two values, times the weight
    of the cells: a query far from its block's mean would leave the range of first order."""
    low, high = value_range(inputs.value.detach(), inputs.key_mask)
    most = (high - low).unsqueeze(2) * weights.sum(-1, keepdim=True)
    return torch.minimum(torch.maximum(change, -most), most)


@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class TiltedAttention(Attention):
    """Softmax attention with exact keys and tilted cells per block of queries; see `tilted_attention`."""

    name = "tilted"
    approximates_softmax = True
    cannot: ClassVar[Mapping[Promise, str]] = {
        Promise.CAUSAL: "a block of queries shares its exact keys and cells, whose keys may come later than a query; "
        "attention='kernelized' and 'softmax' are causal",
        Promise.DROPOUT: "most weights are never formed; put nn.Dropout after the attention instead",
    }

    budget: int | None = None
    num_blocks: int | None = None
    num_exact: int | None = None
    num_cells: int | None = None
    slope: bool = True
    ordered: bool = True
    scale: float | None = None
    kernel: str = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)
        self.plan = TiltedPlan.choose(self.budget, self.num_blocks, self.num_exact, self.num_cells)

    def attend(self, inputs: Inputs) -> Tensor:
        return _attend(inputs, self.plan, self.slope, self.ordered, self.scale, self.kernel)
