"""Numbers drawn while torch exports a program are constants of the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from skyformer import kernelized_attention, skyformer_attention
from skyformer.landmarks import SAMPLERS
from skyformer.ops.kernels import KERNELS
from skyformer.ops.noise import draw_seed, uniform_noise
from skyformer.ops.solve import SOLVERS
from skyformer.ops.tracing import draw_now, without_compiler


class AddsNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        seed = draw_seed(generator)
        drawn = draw_now(lambda: torch.randn(x.shape[-1], generator=generator))
        return x + uniform_noise(seed, 0, x.shape[-1], x.device) + drawn


def test_an_exported_program_draws_what_the_module_draws() -> None:
    module, x = AddsNoise(), torch.zeros(2, 5)
    program = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(program(x), module(x))
    torch.testing.assert_close(program(x + 1), module(x + 1))


def test_without_compiler_returns_what_the_function_returns() -> None:
    @without_compiler
    def difference(a: int, *, b: int) -> int:
        """The documentation stays."""
        return a - b

    assert [difference(5, b=2), difference(1, b=4)] == [3, -3]
    assert difference.__doc__ == "The documentation stays."


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("attention", [kernelized_attention, skyformer_attention])
def test_the_first_call_of_a_process_can_be_compiled_to_one_graph(
    attention: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a new process, in which no name has been looked up.
    for registry in (KERNELS, SAMPLERS, SOLVERS):
        monkeypatch.setattr(registry, "_loaded", False)
    torch._dynamo.reset()
    query, key, value = torch.randn(3, 1, 2, 80, 8).unbind()
    out = torch.compile(attention, fullgraph=True, backend="eager")(query, key, value)
    assert out.shape == value.shape
