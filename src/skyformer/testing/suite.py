"""What every attention promises, as test classes to inherit: `AttentionSuite`, and `OptionSuite` for further options.

A mechanism that does not support something says so in its class; the suite then checks that it raises an error.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyformer.attention import Attention, Promise, build_attention
from skyformer.attention.multihead import MultiheadAttention
from skyformer.errors import UnsupportedError

HEADS = 2


def draw(
    batch: int,
    length: int,
    size: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float64,
    std: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value that require gradients."""
    shapes = ((length, head_dim), (size, head_dim), (size, value_dim))
    q, k, v = (torch.randn(batch, HEADS, n, p, dtype=dtype) * std for n, p in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def backward(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of sum(out * grad), zeros where an input is not used."""
    total = (out * (torch.ones_like(out) if grad is None else grad)).sum()
    grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))


def insert_masked(x: Tensor, positions: Tensor, filler: float = 7.0) -> Tensor:
    """A longer sequence with the rows of x (B, H, n, P) at `positions` and other numbers elsewhere."""
    longer = torch.full((*x.shape[:2], int(positions.max()) + 4, x.shape[-1]), filler, dtype=x.dtype)
    longer[:, :, positions] = x.detach()
    return longer.requires_grad_()


def relative_error(a: Tensor, b: Tensor) -> float:
    return float(((a - b).double().norm() / b.double().norm().clamp(min=1e-30)).detach())


class LargestStorage(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


class OptionSuite:
    """What a mechanism promises whatever its options. A subclass sets `name`, and in `options` those to test."""

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    unused_inputs: ClassVar[tuple[str, ...]] = ()
    """Inputs that the mechanism does not use, and that therefore get no gradient."""
    float32_tolerance: ClassVar[float] = 1e-4
    max_length: ClassVar[int] = 64

    def build(self, head_dim: int = 8, **overrides: Any) -> Attention:
        settings = {"max_length": self.max_length, **self.options, **overrides}
        return build_attention(self.name, HEADS, head_dim, **settings).double().eval()

    def cannot(self, promise: Promise) -> bool:
        return promise in type(self.build()).cannot

    def skip_without(self, promise: Promise) -> None:
        if self.cannot(promise):
            pytest.skip(type(self.build()).cannot[promise])

    def test_gradcheck(self) -> None:
        self.skip_without(Promise.GRADIENT)
        attention = self.build(head_dim=3)
        mask = torch.tensor([[True] * 6, [True, True, False, True, True, False]])
        inputs = draw(2, 6, 6, 3, 3)
        keep = mask[:, None, :, None]
        assert torch.autograd.gradcheck(
            lambda q, k, v: attention(q, k, v, key_mask=mask) * keep, inputs, fast_mode=True
        )

    def test_float32_agrees_with_float64(self) -> None:
        attention = self.build()
        double = draw(2, 33, 33, 8, 8)
        single = tuple(x.detach().float().requires_grad_() for x in double)
        grad = torch.randn(2, HEADS, 33, 8, dtype=torch.float64)
        expected = attention(*double)
        actual = copy.deepcopy(attention).float()(*single)
        assert actual.dtype == torch.float32
        assert relative_error(actual, expected) < self.float32_tolerance
        for a, e in zip(backward(actual, single, grad.float()), backward(expected, double, grad), strict=True):
            assert (a - e).norm() <= self.float32_tolerance * e.norm().clamp(min=1.0)

    @pytest.mark.parametrize("scattered", [False, True])
    @pytest.mark.parametrize("length", [5, 23])
    def test_padding_does_not_change_the_output(self, scattered: bool, length: int) -> None:
        self.skip_without(Promise.PADDING)
        attention = self.build()
        inputs = draw(2, length, length, 8, 8)
        positions = torch.randperm(length + 12)[:length].sort().values if scattered else torch.arange(length)
        longer = tuple(insert_masked(x, positions) for x in inputs)
        mask = torch.zeros(2, longer[0].shape[2], dtype=torch.bool)
        mask[:, positions] = True
        grad = torch.randn(2, HEADS, length, 8, dtype=torch.float64)
        alone, padded = attention(*inputs), attention(*longer, key_mask=mask)[:, :, positions]
        torch.testing.assert_close(padded, alone, rtol=1e-7, atol=1e-9)
        for p, a in zip(backward(padded, longer, grad), backward(alone, inputs, grad), strict=True):
            torch.testing.assert_close(p[:, :, positions], a, rtol=1e-6, atol=1e-8)

    def test_fully_masked_example_gives_zeros(self) -> None:
        attention = self.build()
        inputs = draw(3, 11, 11, 8, 8)
        mask = torch.ones(3, 11, dtype=torch.bool)
        mask[1] = False
        out = attention(*inputs, key_mask=mask)
        assert (out[1] == 0).all()
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in backward(out, inputs))

    def test_the_rest_of_the_batch_does_not_change_the_output(self) -> None:
        self.skip_without(Promise.BATCH)
        attention = self.build()
        q, k, v = draw(3, 29, 29, 8, 8)
        mask = torch.rand(3, 29) > 0.3
        together = attention(q, k, v, key_mask=mask)
        for b in range(3):
            one = slice(b, b + 1)
            alone = attention(q[one], k[one], v[one], key_mask=mask[one])
            visible = mask[b]
            torch.testing.assert_close(together[one][:, :, visible], alone[:, :, visible], rtol=1e-7, atol=1e-9)

    def test_evaluation_repeats_and_seeds_decide(self) -> None:
        attention = self.build()
        inputs = draw(2, 37, 37, 8, 8)
        assert torch.equal(attention(*inputs), attention(*inputs))
        attention.train()
        torch.manual_seed(5)
        first = attention(*inputs)
        torch.manual_seed(5)
        assert torch.equal(attention(*inputs), first)

    def test_inputs_and_parameters_get_gradients(self) -> None:
        attention = self.build().train()
        # The full length, because a parameter of that length is used only as far as the sequence reaches.
        inputs = draw(2, self.max_length, self.max_length, 8, 8)
        attention(*inputs).square().sum().backward()
        for name, x in zip(("query", "key", "value"), inputs, strict=True):
            if name not in self.unused_inputs:
                assert x.grad is not None, name
                assert (x.grad != 0).any(), name
        for name, parameter in attention.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad != 0).any(), name
            assert name in attention.state_dict()

    @pytest.mark.parametrize("masked", [False, True])
    def test_meta_device(self, masked: bool) -> None:
        attention = self.build().float().to("meta")
        inputs = tuple(torch.randn(2, HEADS, 19, 8, device="meta", requires_grad=True) for _ in range(3))
        mask = torch.ones(2, 19, dtype=torch.bool, device="meta") if masked else None
        out = attention(*inputs, key_mask=mask)
        assert out.shape == (2, HEADS, 19, 8)
        out.sum().backward()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        rounded = tuple(x.detach().to(dtype) for x in draw(2, 40, 40, 8, 8, torch.float32))
        self.assert_no_worse_than_dense(self.build().to(dtype), self.build().to(dtype).float(), rounded, dtype)

    def test_autocast(self) -> None:
        rounded = tuple(x.detach().bfloat16() for x in draw(2, 40, 40, 8, 8, torch.float32))
        attention = self.build().float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assert_no_worse_than_dense(attention, attention, rounded, torch.bfloat16)

    def assert_no_worse_than_dense(
        self, low: Attention, high: Attention, rounded: tuple[Tensor, ...], dtype: torch.dtype
    ) -> None:
        """The error of half precision is at most twice that of dense softmax attention."""

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

        inputs = tuple(x.clone().requires_grad_() for x in rounded)
        out = low(*inputs)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in backward(out, inputs))
        with torch.autocast("cpu", enabled=False):
            full = tuple(x.float() for x in rounded)
            error = relative_error(out.float(), high(*full))
            allowed = 2 * relative_error(dense(*(x.to(dtype) for x in rounded)).float(), dense(*full))
        assert error <= allowed

    @pytest.mark.parametrize("case", ["duplicates", "near duplicates", "large", "zeros"])
    def test_finite_on_awkward_inputs(self, case: str) -> None:
        q, k, v = (x.detach() for x in draw(2, 33, 33, 8, 8, torch.float32))
        if case == "duplicates":
            q, k = q[:, :, :1].expand_as(q), q[:, :, :1].expand_as(k)
        if case == "near duplicates":
            q, k = (1e3 * q[:, :, :1] / q[:, :, :1].norm() + 0.1 * x for x in (q, k))
        scale = {"large": 1e3, "zeros": 0.0}.get(case, 1.0)
        inputs = tuple((x * scale).requires_grad_() for x in (q, k, v))
        out = self.build().float()(*inputs)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in backward(out, inputs))

    def test_causal_or_refused(self) -> None:
        attention = self.build()
        q, k, v = draw(2, 21, 21, 8, 8)
        if self.cannot(Promise.CAUSAL):
            with pytest.raises(UnsupportedError, match="is_causal"):
                attention(q, k, v, is_causal=True)
            return
        before = attention(q, k, v, is_causal=True)
        changed = tuple(torch.cat([x[:, :, :13], x[:, :, 13:] + 1], 2) for x in (q, k, v))
        after = attention(*changed, is_causal=True)
        torch.testing.assert_close(after[:, :, :13], before[:, :, :13], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(after[:, :, 13:], before[:, :, 13:])

    def test_memory_is_linear_in_length(self) -> None:
        self.skip_without(Promise.LINEAR_MEMORY)
        sizes = [self.largest_storage(length) for length in (2048, 4096)]
        assert sizes[1] <= 2.2 * sizes[0]

    def largest_storage(self, length: int) -> int:
        attention = self.build(max_length=length).float()
        inputs = tuple(torch.randn(1, HEADS, length, 8, requires_grad=True) for _ in range(3))
        mask = torch.ones(1, length, dtype=torch.bool)
        with LargestStorage() as largest:
            attention(*inputs, key_mask=mask).sum().backward()
        return largest.bytes

    def test_weights_are_what_multiplies_the_values(self) -> None:
        if self.options.get("kernel") == "softmax":
            pytest.skip("its output is clamped to the range of the values, which is not linear in them")
        attention = self.build()
        q, k, v = draw(2, 20, 20, 8, 8)
        identity = torch.eye(20, dtype=torch.float64).expand(2, HEADS, -1, -1)
        both = attention(q, k, torch.cat([v, identity], -1))
        torch.testing.assert_close(both[..., 8:] @ v, attention(q, k, v))

    @settings(deadline=None)
    @given(data=st.data())
    def test_any_shape_mask_and_magnitude(self, data: st.DataObject) -> None:
        batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 50))
        std = data.draw(st.sampled_from([1e-3, 1.0, 10.0, 100.0]))
        bits = data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
        mask = torch.tensor(bits).view(batch, length)
        inputs = draw(batch, length, length, 8, 8, torch.float32, std)
        out = self.build().float()(*inputs, key_mask=mask)
        assert out.shape == inputs[0].shape
        assert out.isfinite().all()
        assert (out[~mask.any(-1)] == 0).all()
        assert all(g.isfinite().all() for g in backward(out, inputs))


class AttentionSuite(OptionSuite):
    """All promises of a mechanism, at small options."""

    @pytest.mark.parametrize(("length", "head_dim"), [(1, 1), (13, 1), (40, 1), (7, 8)])
    def test_self_attention_shapes(self, length: int, head_dim: int) -> None:
        q, k, v = draw(2, length, length, head_dim, head_dim)
        out = self.build(head_dim)(q, k, v)
        assert out.shape == (2, HEADS, length, head_dim)
        assert out.isfinite().all()

    @pytest.mark.parametrize(("length", "size"), [(5, 13), (13, 5), (1, 9), (40, 1)])
    def test_cross_attention_shapes(self, length: int, size: int) -> None:
        q, k, v = draw(2, length, size, 8, 8)
        attention = self.build()
        if self.cannot(Promise.CROSS_ATTENTION):
            with pytest.raises(UnsupportedError, match=self.name):
                attention(q, k, v)
            return
        assert attention(q, k, v).shape == (2, HEADS, length, 8)

    def test_values_with_another_dimension(self) -> None:
        q, k, v = draw(2, 9, 9, 8, 3)
        attention = self.build()
        if self.cannot(Promise.VALUE_DIM):
            with pytest.raises(UnsupportedError, match=self.name):
                attention(q, k, v)
            return
        assert attention(q, k, v).shape == (2, HEADS, 9, 3)

    def test_moving_the_module_moves_all_tensors(self) -> None:
        attention = self.build().to("meta")
        held = [*attention.parameters(), *attention.buffers()]
        held += [x for module in attention.modules() for x in vars(module).values() if isinstance(x, Tensor)]
        assert all(x.is_meta for x in held)

    # torch's tracer warns about its own code (instantiating autograd.Function, reading .grad).
    @pytest.mark.filterwarnings("ignore")
    def test_compiled_agrees(self) -> None:
        torch._dynamo.reset()
        attention = self.build()
        inputs = draw(2, 24, 24, 8, 8)
        mask = torch.rand(2, 24) > 0.2
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=not self.cannot(Promise.FULLGRAPH))
        expected, actual = attention(*inputs, key_mask=mask), compiled(*inputs, key_mask=mask)
        torch.testing.assert_close(actual, expected)
        for a, e in zip(backward(actual, inputs), backward(expected, inputs), strict=True):
            torch.testing.assert_close(a, e)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("masked", [False, True])
    def test_compiled_training_agrees(self, masked: bool) -> None:
        if self.cannot(Promise.FULLGRAPH):
            pytest.skip(type(self.build()).cannot[Promise.FULLGRAPH])
        torch._dynamo.reset()
        attention = self.build().train()
        inputs = draw(2, 24, 24, 8, 8)
        mask = torch.rand(2, 24) > 0.2 if masked else None
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
        torch.manual_seed(1)
        expected = attention(*inputs, key_mask=mask)
        torch.manual_seed(1)
        actual = compiled(*inputs, key_mask=mask)
        torch.testing.assert_close(actual, expected)
        for a, e in zip(backward(actual, inputs), backward(expected, inputs), strict=True):
            torch.testing.assert_close(a, e)

    def test_dropout_or_refused(self) -> None:
        if self.cannot(Promise.DROPOUT):
            with pytest.raises(UnsupportedError, match="dropout"):
                MultiheadAttention(16, HEADS, dropout=0.5, attention=self.name, **self.layer_options())
            return
        layer = MultiheadAttention(
            16, HEADS, dropout=0.5, attention=self.name, batch_first=True, **self.layer_options()
        )
        x = torch.randn(2, 20, 16)
        torch.manual_seed(1)
        first, _ = layer(x, x, x, need_weights=False)
        torch.manual_seed(2)
        assert not torch.allclose(layer(x, x, x, need_weights=False)[0], first)
        layer.eval()
        assert torch.equal(layer(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])

    def test_any_length_or_refused(self) -> None:
        inputs = draw(1, self.max_length + 1, self.max_length + 1, 8, 8)
        if self.cannot(Promise.ANY_LENGTH):
            with pytest.raises(ValueError, match="max_length"):
                self.build()(*inputs)
            return
        assert self.build()(*inputs).shape == inputs[0].shape

    def layer_options(self) -> dict[str, Any]:
        return {"max_length": self.max_length, **self.options}

    def test_empty_batch_gives_an_empty_batch(self) -> None:
        assert self.build()(*draw(0, 6, 6, 8, 8)).shape == (0, HEADS, 6, 8)

    def test_wrong_heads_are_refused(self) -> None:
        with pytest.raises(ValueError, match=f"{HEADS} heads of 8"):
            self.build()(*draw(1, 4, 4, 5, 5))
