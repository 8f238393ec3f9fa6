"""Operations on (x, y, v) with fast gradients of their own, and what torch needs to transform them.

An `Operation` computes its output and its three gradients fast. The rest is composed here, of plain torch operations on
one block of rows after another, so that it takes O(L + S) memory too:

- Higher derivatives: the gradients are an autograd function themselves. Its backward pass is the vector-Jacobian
  product of the operation's `row_gradients`, which torch can differentiate again, to any order.
- Forward mode (`torch.func.jvp`, `jacfwd`, `hessian`): the tangents of the output are `row_tangents`, those of the
  gradients come from two vector-Jacobian products, because a linear map is the transpose of its transpose.
- `torch.vmap`: the new dimension joins the batch, so one call computes all samples.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from skyformer.errors import UnsupportedError
from skyformer.ops.noise import Seed
from skyformer.ops.precision import without_autocast
from skyformer.ops.tracing import transforming

Three = tuple[Tensor, Tensor, Tensor]


class Operation(abc.ABC):
    """out (B, ..., L, Pv) from x (B, ..., L, P), y (B, ..., S, P) and v (B, ..., S, Pv), where each row of out depends
    on one row of x. `mask` is None or a tensor (B, ...); `seed` is None if nothing is random.

    Subclasses are frozen dataclasses. `forward` and `gradients` are fast and need not be differentiable; the methods on
    blocks of rows consist of torch operations that are.
    """

    @abc.abstractmethod
    def forward(self, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None) -> tuple[Tensor, ...]:
        """out, and the tensors (B, ...) that `gradients` needs besides."""

    @abc.abstractmethod
    def gradients(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None, *saved: Tensor
    ) -> Three:
        """The gradients of x, y and v for the gradient of out; `saved` is what `forward` returned."""

    @abc.abstractmethod
    def row_blocks(self, x: Tensor, y: Tensor) -> Iterable[tuple[slice, Any]]:
        """Blocks of rows of x, and with each what the methods below need to know about it."""

    @abc.abstractmethod
    def row_gradients(
        self, block: Any, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None
    ) -> Three:
        """`gradients` for the rows of one block only: x and grad consist of these rows, y and v are whole."""

    def row_tangents(self, block: Any, primals: Three, tangents: Three, mask: Tensor | None) -> Tensor:
        """The tangents of these rows of out, for x, y, v and their tangents. Needed where nothing is random."""
        raise NotImplementedError

    def __call__(self, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return _Apply.apply(x, y, v, mask, seed, self)[0]
        with_gradient = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or v.requires_grad)
        if not (with_gradient or transforming()):
            return _Apply.forward(x, y, v, mask, seed, self)[0]
        out: Tensor = call(_ApplyWithTangents, x, y, v, mask, seed, self)[0]
        return out


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which outside of transforms takes 40 microseconds to look for default arguments."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    alive = (torch._C._functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args)
    return super(torch.autograd.Function, function).apply(*alive)  # type: ignore[misc]


def differentiated_again() -> bool:
    """Whether this backward pass may itself be differentiated or transformed; a compiled one cannot."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transforming())


class _InBatch(torch.autograd.Function):
    """A function of tensors (B, ...), in which no example depends on another, of a seed and of other objects."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, samples = info.batch_size, list(zip(args, in_dims, strict=True))
        if info.randomness == "same" and any(_is_seed(x, dim) for x, dim in samples):
            each = [call(cls, *(_sample(x, dim, i) for x, dim in samples)) for i in range(size)]
            outputs = tuple(torch.stack(of_samples) for of_samples in zip(*each, strict=True))
        else:
            folded = call(cls, *(_fold(x, dim, size) for x, dim in samples))
            outputs = tuple(x.unflatten(0, (size, -1)) for x in folded)
        return outputs, (0,) * len(outputs)


def _is_seed(x: Any, dim: int | None) -> bool:
    """Whether x is a number, or a tensor of one number for each sample."""
    return x.dim() == (0 if dim is None else 1) if isinstance(x, Tensor) else isinstance(x, int)


def _sample(x: Any, dim: int | None, number: int) -> Any:
    return x if dim is None else x.select(dim, number)


def _fold(x: Any, dim: int | None, size: int) -> Any:
    """x with its mapped dimension in the batch. One seed is enough, because the examples of a batch differ in noise."""
    if not isinstance(x, Tensor):
        return x
    if _is_seed(x, dim):
        return _sample(x, dim, 0)
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


class _Apply(_InBatch):
    """(x, y, v, mask, seed, operation) to out and what the operation saved. The form that torch.compile can trace."""

    @staticmethod
    @without_autocast
    def forward(
        x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, seed: Seed | None, operation: Operation
    ) -> tuple[Tensor, ...]:
        return operation.forward(x, y, v, mask, seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, y, v, mask, seed, ctx.operation = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, (x, y, v, mask), seed, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        (x, y, v, mask), seed, saved = _restore(ctx, 4)
        gradients = functools.partial(call, _Gradients) if differentiated_again() else _Gradients.forward
        return *gradients(grad, x, y, v, mask, seed, ctx.operation, *saved), None, None, None


class _ApplyWithTangents(_Apply):
    @staticmethod
    @without_autocast
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        (x, y, v, mask), seed, saved = _restore(ctx, 4)
        _refuse_randomness(seed)
        tx, ty, tv = _given(tangents[:3], (x, y, v))
        rows = [
            ctx.operation.row_tangents(block, (_rows(x, i), y, v), (_rows(tx, i), ty, tv), mask)
            for i, block in ctx.operation.row_blocks(x, y)
        ]
        return torch.cat(rows, -2) if rows else torch.zeros_like(saved[0]), *(None,) * (len(saved) - 1)


class _Gradients(_InBatch):
    """(grad, x, y, v, mask, seed, operation, saved) to the gradients of x, y and v."""

    @staticmethod
    @without_autocast
    def forward(
        grad: Tensor,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        mask: Tensor | None,
        seed: Seed | None,
        operation: Operation,
        *saved: Tensor,
    ) -> Three:
        return operation.gradients(grad, x, y, v, mask, seed, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
        grad, x, y, v, mask, seed, ctx.operation, *saved = inputs
        ctx.num_saved = len(saved)
        _save(ctx, (grad, x, y, v, mask), seed, ())

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (*primals, mask), seed, _ = _restore(ctx, 5)
        if transforming():
            _refuse_randomness(seed)
        return *second_gradients(ctx.operation, primals, cotangents, mask, seed), *(None,) * (3 + ctx.num_saved)

    @staticmethod
    @without_autocast
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        (*primals, mask), seed, _ = _restore(ctx, 5)
        _refuse_randomness(seed)

        def push(gradients: Callable[..., Three], inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
            found, pull_back = torch.func.vjp(gradients, *inputs)[:2]
            (pushed,) = torch.func.vjp(pull_back, tuple(torch.zeros_like(x) for x in found))[1](tuple(tangents))
            return pushed

        given = _given(tangents[:4], primals)
        return _by_rows(ctx.operation, push, primals, given, mask, seed, row_inputs=2, row_outputs=1)


def second_gradients(
    operation: Operation,
    primals: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    mask: Tensor | None,
    seed: Seed | None,
) -> tuple[Tensor, ...]:
    """For primals grad, x, y, v and cotangents of the gradients of x, y, v: the gradients of the primals."""

    def pull(gradients: Callable[..., Three], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
        return torch.func.vjp(gradients, *inputs)[1](tuple(cotangents))

    return _by_rows(operation, pull, primals, cotangents, mask, seed, row_inputs=1, row_outputs=2)


def _by_rows(
    operation: Operation,
    transform: Callable[..., Sequence[Tensor]],
    primals: Sequence[Tensor],
    directions: Sequence[Tensor],
    mask: Tensor | None,
    seed: Seed | None,
    row_inputs: int,
    row_outputs: int,
) -> tuple[Tensor, ...]:
    """`transform` of the gradients of each block of rows, joined. The first `row_inputs` directions and `row_outputs`
    results are divided into rows, the results after them are sums over all rows."""
    grad, x, y, v = primals
    of_blocks = []
    for rows, block in operation.row_blocks(x, y):

        def gradients(grad: Tensor, x: Tensor, y: Tensor, v: Tensor, block: Any = block) -> Three:
            return operation.row_gradients(block, grad, x, y, v, mask, seed)

        cut = (_rows(t, rows) if number < row_inputs else t for number, t in enumerate(directions))
        of_blocks.append(transform(gradients, (_rows(grad, rows), _rows(x, rows), y, v), tuple(cut)))
    if not of_blocks:
        return tuple(torch.zeros_like(t) for t in primals[2 - row_outputs :])
    joined = zip(*of_blocks, strict=True)
    return tuple(torch.cat(t, -2) if number < row_outputs else sum_of(t) for number, t in enumerate(joined))


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x[..., rows, :]


def _given(tangents: Sequence[Tensor | None], primals: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Zeros for missing tangents."""
    return tuple(torch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True))


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], seed: Seed | None, output: tuple[Tensor, ...]) -> None:
    is_tensor = isinstance(seed, Tensor)
    ctx.seed = None if is_tensor else seed
    tensors = (*inputs, seed if is_tensor else None, *output)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _restore(ctx: Any, num_inputs: int) -> tuple[tuple[Any, ...], Seed | None, tuple[Tensor, ...]]:
    tensors = ctx.saved_tensors
    seed = ctx.seed if tensors[num_inputs] is None else tensors[num_inputs]
    return tensors[:num_inputs], seed, tensors[num_inputs + 1 :]


def _refuse_randomness(seed: Seed | None) -> None:
    # Under vmap the samples are one batch in the first pass and apart here, where the noise would be another.
    if seed is not None:
        raise UnsupportedError(
            "forward mode and second derivatives of attention with dropout are not supported inside torch.func; "
            "set the dropout to 0 or use torch.autograd.grad(create_graph=True)"
        )
