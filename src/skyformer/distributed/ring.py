"""Exact Kernelized Attention over the pieces of a sequence: keys and values travel once around a ring of ranks.

    O_r = sum_s kappa(Q_r, K_s) V_s

The kernel has no normaliser, so the parts are just added. In step t rank r computes with the piece of rank r - t, while
that piece is already on its way to rank r + 1. The backward pass goes around once more: the pieces travel again, every
kernel value is computed again, and behind each piece travel the sums of its gradients, which are back at their owner
after the last step:

    dQ_r = sum_s (gradient of part s, computed here)        dK_s, dV_s = sum_r (gradients of part s on rank r)

A rank holds three pieces of keys and values and two of gradients at most, and nothing of the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyformer.checks import (
    as_bool,
    check_finite_inputs,
    check_mask,
    check_memory_budget,
    check_probability,
    check_query_key_value,
    check_scale,
)
from skyformer.distributed.agreement import RANDOM_STATE, Statement, agree, random_state
from skyformer.distributed.collectives import Group, Ranks, Shift
from skyformer.distributed.skyformer import Pieces, common_facts
from skyformer.errors import UnsupportedError
from skyformer.ops.backends import product_by_backend, triton_computes
from skyformer.ops.distances import accurate_points
from skyformer.ops.kernels import Kernel, SoftmaxKernel, get_kernel, scale_of
from skyformer.ops.noise import draw_seed, mixed_seed
from skyformer.ops.precision import at_least_float32, without_autocast
from skyformer.ops.products import MEMORY_BUDGET, Plan

_PIECE, _GRADIENT = 1, 3
"""The first tags of the two kinds of messages, each of which are two tensors."""


def kernelized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: str | Kernel = "gaussian",
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    memory_budget: int = MEMORY_BUDGET,
    check_finite: bool = False,
) -> Tensor:
    """`skyformer.kernelized_attention` of a sequence of which each rank holds a contiguous piece, in rank order.

    The output and all gradients are those of one process with the whole sequence. Every rank must call it, and its
    backward pass, with the same options; pieces may differ in length, and be empty.

    Args:
        query: this rank's queries (B, H, L_r, P). key: (B, H, S_r, P). value: (B, H, S_r, Pv).
        group: the ranks that share the sequence: a ProcessGroup, one dimension of a DeviceMesh, or None for all.
        key_mask: bool (B, S_r), True = attend.
        is_causal: query i attends to keys j <= i only, both counted in the whole sequence.
        kernel: any but "softmax", whose rows are normalised.
        dropout_p: the probability of dropping an entry of C; the entries differ from those that one process drops.
        generator: source of the dropout; it must be in the same state on all ranks, as torch's global one must be.

    The other arguments are those of `skyformer.kernelized_attention`.

    Returns:
        This rank's piece of the output: (B, H, L_r, Pv).
    """

    def checked() -> Plan:
        check_query_key_value(query, key, value)
        check_mask("key_mask", key_mask, key.shape[0], key.shape[2])
        check_probability("dropout_p", dropout_p)
        check_memory_budget(memory_budget)
        check_scale(scale)
        if check_finite:
            check_finite_inputs(query=query, key=key, value=value)
        return Plan(get_kernel(kernel), scale_of(query, scale), is_causal, dropout_p, generator, memory_budget)

    return attend_ring(Ranks.of(group), query, key, value, as_bool(key_mask), checked)


def attend_ring(
    ranks: Ranks, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, checked: Callable[[], Plan]
) -> Tensor:
    """`kernelized_attention`; `checked` returns the plan, and may raise an error that all ranks then raise."""
    plan: Plan | None = None

    def state() -> Statement:
        nonlocal plan
        plan = checked()
        refuse_softmax(plan.kernel)
        facts = {name: getattr(plan, name) for name in plan.__dataclass_fields__ if name != "generator"}
        drawn = random_state(plan.generator) if plan.dropout_p > 0 else ""
        same = {**common_facts(query, key, value), **facts, "key_mask is given": key_mask is not None}
        return Statement({**same, RANDOM_STATE: drawn}, (query.shape[2], key.shape[2]))

    num_queries, num_keys = agree(ranks, "kernelized_attention", state, query.device)
    assert plan is not None
    pieces = Pieces(ranks, num_queries, num_keys, valid=None)
    points, keys, values = query, key, value
    if not triton_computes(query, value, plan.kernel):
        if plan.kernel.radial:
            points, keys = accurate_points(query, key, key_mask, plan.scale, pieces)
        points, keys = at_least_float32(points), at_least_float32(keys)
        values = value.to(points.dtype)
    if key_mask is not None:
        # Keys with a value of zero add nothing, so that no mask has to travel.
        hidden = ~key_mask[:, None, :, None]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    seed = draw_seed(plan.generator) if plan.dropout_p > 0 else 0
    out: Tensor = _RingProduct.apply(points, keys, values, _Ring(pieces, replace(plan, generator=None), seed))
    return out.to(value.dtype)


def refuse_softmax(kernel: Kernel) -> None:
    if isinstance(kernel, SoftmaxKernel):
        raise UnsupportedError(
            "kernel='softmax' is not supported for a sequence in pieces: rows are divided by sums over all keys, and "
            "this ring only adds. Use another kernel, or skyformer_attention(kernel='softmax'), which approximates it"
        )


@dataclass(frozen=True)
class _Ring:
    """What one pass around the ring computes, apart from its tensors."""

    pieces: Pieces
    plan: Plan
    seed: int

    def pass_by(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The rank, keys and values of every piece, this rank's own first. The next piece travels meanwhile."""
        ranks = self.pieces.ranks
        current: Sequence[Tensor] = (key.contiguous(), value.contiguous())
        for step in range(ranks.size):
            owner = (ranks.rank - step) % ranks.size
            last = step + 1 == ranks.size
            shift = None if last else ranks.start_shift(current, self.empty_piece(current, owner - 1), _PIECE)
            keys, values = current
            yield owner, keys, values
            if shift is not None:
                current = shift.wait()

    def empty_piece(self, like: Sequence[Tensor], owner: int) -> list[Tensor]:
        """Tensors for the keys and values of a rank, or for their gradients, to arrive in."""
        length = self.pieces.num_keys[owner % self.pieces.ranks.size]
        return [x.new_empty(*x.shape[:2], length, x.shape[-1]) for x in like]

    def product(self, query: Tensor, key: Tensor, value: Tensor, owner: int) -> Tensor:
        """kappa(Q_r, K_s) V_s for the piece of rank s = `owner`, in at least float32."""
        if not self.plan.is_causal:
            return self._product(query, key, value, owner, 0)
        # Row i sees the keys j <= i + ahead: all of the first `ahead` keys, and a triangle of the rest.
        ahead = self.pieces.first_query - sum(self.pieces.num_keys[:owner])
        blind, everywhere = min(max(-ahead, 0), query.shape[2]), min(max(ahead, 0), key.shape[2])
        seeing = query[:, :, blind:]
        seen = self._product(seeing, key[:, :, :everywhere], value[:, :, :everywhere], owner, 0)
        triangle = self._product(seeing, key[:, :, everywhere:], value[:, :, everywhere:], owner, 1, is_causal=True)
        return torch.nn.functional.pad(seen + triangle, (0, 0, blind, 0))

    def _product(
        self, query: Tensor, key: Tensor, value: Tensor, owner: int, part: int, is_causal: bool = False
    ) -> Tensor:
        plan = replace(self.plan, is_causal=is_causal)
        if plan.dropout_p > 0:
            # The same in both passes, and another one for each pair of pieces.
            seed = mixed_seed("ring", self.seed, self.pieces.ranks.rank, owner, part)
            plan = replace(plan, generator=torch.Generator().manual_seed(seed))
        return product_by_backend(query, key, value, None, plan, float32_out=True)


class _RingProduct(torch.autograd.Function):
    """Q_r, K_r, V_r to O_r."""

    @staticmethod
    @without_autocast
    def forward(query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        out = at_least_float32(query).new_zeros(*query.shape[:3], value.shape[-1])
        for owner, keys, values in ring.pass_by(key, value):
            out += ring.product(query, keys, values, owner)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, _Ring], output: Tensor) -> None:
        *tensors, ctx.ring = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        ring: _Ring = ctx.ring
        ranks = ring.pieces.ranks
        dquery = torch.zeros_like(query, dtype=grad_out.dtype)
        sums: Sequence[Tensor] = ()
        shift: Shift | None = None
        for owner, keys, values in ring.pass_by(key, value):
            q, k, v = leaves = [x.detach().requires_grad_() for x in (query, keys, values)]
            with torch.enable_grad():
                part = ring.product(q, k, v, owner)
            dq, *own = torch.autograd.grad(part, leaves, grad_out)
            dquery += dq
            sums = [x.to(grad_out.dtype).contiguous() for x in own]
            if shift is not None:
                sums = [arrived.add_(mine) for arrived, mine in zip(shift.wait(), sums, strict=True)]
            if ranks.size > 1:
                shift = ranks.start_shift(sums, ring.empty_piece(sums, owner - 1), _GRADIENT)
        dkey, dvalue = sums if shift is None else shift.wait()
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None
