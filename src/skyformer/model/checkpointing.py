"""Activation checkpointing that also takes back what a layer remembers from call to call.

The recomputation must see the layer as the forward pass saw it. torch restores the random numbers; a mechanism that
counts its calls (to redraw random features every so often) needs its counters and buffers put back as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_checkpointed(layer: nn.Module, *inputs: Any) -> Tensor:
    """layer(*inputs), of which only the inputs are kept for the backward pass."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        memory = _Memory(layer)
        return _nothing(), memory.as_it_was()

    out: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)
    return out


class _Memory:
    """The buffers and numbers of a module and its parts, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.buffers = [{name: _copy(buffer) for name, buffer in m._buffers.items()} for m in self.modules]
        self.numbers = [_numbers(m) for m in self.modules]

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside, the modules are as they were; outside, as they have become."""
        later_buffers = [dict(m._buffers) for m in self.modules]
        later_numbers = [_numbers(m) for m in self.modules]
        # Buffers are exchanged, not overwritten: autograd holds on to those it has seen.
        self._put([{name: _copy(buffer) for name, buffer in held.items()} for held in self.buffers], self.numbers)
        try:
            yield
        finally:
            self._put(later_buffers, later_numbers)

    def _put(self, buffers: list[dict[str, Tensor | None]], numbers: list[dict[str, float]]) -> None:
        for module, held, counted in zip(self.modules, buffers, numbers, strict=True):
            module._buffers.update(held)
            vars(module).update(counted)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _numbers(module: nn.Module) -> dict[str, float]:
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
