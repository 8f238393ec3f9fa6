"""Performer: the suite, unbiased features, convergence to softmax attention, and redrawing."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyformer.attention import performer
from skyformer.attention.performer import PerformerAttention, draw_projection, performer_attention
from skyformer.errors import InputError, ShapeError, UnknownNameError
from skyformer.functional import softmax_attention
from skyformer.ops.noise import draw_seed
from skyformer.testing.suite import AttentionSuite, OptionSuite, relative_error
from tests.helpers import assert_same_with_gradients


class TestPerformer(AttentionSuite):
    name = "performer"
    options: ClassVar = {"num_features": 24}


class TestPerformerRelu(OptionSuite):
    name = "performer"
    options: ClassVar = {"num_features": 24, "feature_map": "relu"}


def draw(length: int = 40, size: int = 40, head_dim: int = 8, value_dim: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((length, head_dim), (size, head_dim), (size, value_dim))
    return tuple(torch.randn(2, 3, *shape, dtype=torch.float64) for shape in shapes)


def positive_features(x: Tensor, projection: Tensor, scale: float) -> Tensor:
    """phi(x) by its definition: (..., m)."""
    x = x * scale**0.5
    return (x @ projection.T.double() - x.square().sum(-1, keepdim=True) / 2).exp() / projection.shape[0] ** 0.5


def dense_performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    relu: bool = False,
) -> Tensor:
    """D^-1 A V with the whole matrix A = phi(Q) phi(K)^T in memory."""
    scale = q.shape[-1] ** -0.5
    if relu:
        phi_q, phi_k = ((x * scale**0.5 @ projection.T.double()).relu() + 1e-3 for x in (q, k))
    else:
        phi_q, phi_k = (positive_features(x, projection, scale) for x in (q, k))
    weights = phi_q @ phi_k.mT
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :]
    if is_causal:
        weights = weights.tril()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights @ v / total, 0.0)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "size"), [(300, 300), (200, 31), (31, 200), (1, 1)])
def test_agrees_with_dense(length: int, size: int, is_causal: bool, relu: bool) -> None:
    inputs = tuple(x.requires_grad_() for x in draw(length, size))
    mask = torch.rand(2, size) > 0.3
    projection = draw_projection(16, 8, 1)
    feature_map = "relu" if relu else "softmax"
    options = {"key_mask": mask, "is_causal": is_causal, "projection": projection, "feature_map": feature_map}
    assert_same_with_gradients(
        lambda *x: performer_attention(*x, **options),
        lambda *x: dense_performer(*x, projection, mask, is_causal, relu),
        inputs,
        rtol=1e-7,
        atol=1e-7,
    )


def test_features_are_unbiased_for_the_softmax_kernel() -> None:
    q, k, _ = draw(6, 6)
    q, k = q / 2, k / 2
    scale = 8**-0.5
    estimates = torch.stack(
        [
            positive_features(q, projection, scale) @ positive_features(k, projection, scale).mT
            # Runs of P rows are independent, so one long draw is many short ones.
            for projection in draw_projection(400 * 32, 8, 0).view(400, 32, 8)
        ]
    )
    expected = (q @ k.mT * scale).exp()
    standard_error = estimates.std(0) / len(estimates) ** 0.5
    assert ((estimates.mean(0) - expected) / standard_error).square().mean().sqrt() < 1.5


def test_converges_to_softmax_attention() -> None:
    q, k, v = draw()
    q, k = q / 2, k / 2
    exact = softmax_attention(q, k, v)

    def error(num_features: int) -> float:
        generators = (torch.Generator().manual_seed(seed) for seed in range(10))
        outputs = [performer_attention(q, k, v, num_features=num_features, generator=g) for g in generators]
        return sum(relative_error(out, exact) for out in outputs) / len(outputs)

    errors = [error(m) for m in (16, 256, 4096)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.05


def test_causal_converges_to_causal_softmax_attention() -> None:
    q, k, v = draw()
    q, k = q / 2, k / 2
    out = performer_attention(q, k, v, is_causal=True, num_features=8192, generator=torch.Generator().manual_seed(0))
    assert relative_error(out, softmax_attention(q, k, v, is_causal=True)) < 0.05


@pytest.mark.parametrize(("num_features", "head_dim"), [(16, 8), (5, 8), (20, 8), (3, 1)])
def test_projection_is_orthogonal_in_runs(num_features: int, head_dim: int) -> None:
    projection = draw_projection(num_features, head_dim, 3)
    assert projection.shape == (num_features, head_dim)
    for run in projection.split(head_dim):
        gram = run @ run.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5 * gram.diagonal().max()


def test_projection_rows_have_gaussian_moments() -> None:
    rows = draw_projection(16000, 4, 0)
    assert rows.mean(0).abs().max() < 0.04
    assert (rows.T @ rows / len(rows) - torch.eye(4)).abs().max() < 0.05
    assert abs(float(rows.norm(dim=-1).square().var()) - 8) < 0.5


def test_orthogonal_rows_beat_independent_ones() -> None:
    q, k, _ = draw(20, 20, 16)
    q, k = q / 4, k / 4
    exact = (q @ k.mT / 4).exp()

    def error(projection: Tensor) -> float:
        estimate = positive_features(q, projection, 0.25) @ positive_features(k, projection, 0.25).mT
        return float(((estimate - exact) / exact).square().mean())

    orthogonal = sum(error(projection) for projection in draw_projection(100 * 16, 16, 0).view(100, 16, 16))
    independent = sum(error(projection) for projection in torch.randn(100, 16, 16))
    assert orthogonal < independent


def test_rows_of_the_normaliser_do_not_underflow() -> None:
    """A key of large norm leaves features that are all tiny; the output is still a mean of the values."""
    q, k, v = (x.float() for x in draw())
    ones = performer_attention(100 * q, 100 * k, torch.ones_like(v), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ones, torch.ones_like(ones))


@pytest.mark.parametrize(("interval", "redraws"), [(2, [False, False, True, False, True]), (0, [False] * 5)])
def test_redraws_on_schedule_in_training_only(interval: int, redraws: list[bool]) -> None:
    attention = PerformerAttention(3, 8, num_features=16, redraw_interval=interval)
    inputs = tuple(x.float() for x in draw())
    before, changed = attention.projection.clone(), []
    for _ in redraws:
        attention(*inputs)
        changed.append(not torch.equal(attention.projection, before))
        before = attention.projection.clone()
    assert changed == redraws
    attention.eval()
    for _ in redraws:
        attention(*inputs)
    assert torch.equal(attention.projection, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_each_call_with_its_own_features(use_reentrant: bool) -> None:
    attention = PerformerAttention(3, 8, num_features=16, redraw_interval=1)
    inputs = tuple(x.float().requires_grad_() for x in draw())
    outs, expected = [], []
    for _ in range(3):
        outs.append(checkpoint(attention, *inputs, use_reentrant=use_reentrant))
        expected.append(performer_attention(*inputs, projection=attention.projection.clone()))
    for a, e in zip(grads(torch.stack(outs), inputs), grads(torch.stack(expected), inputs), strict=True):
        torch.testing.assert_close(a, e)


def test_the_number_of_stored_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "REMEMBERED", 4)
    attention = PerformerAttention(3, 8, num_features=16, redraw_interval=3)
    for _ in range(20):
        attention(*(x.float() for x in draw()))
    assert len(attention._earlier) == 4


def grads(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    for x in inputs:
        x.grad = None
    out.square().sum().backward()
    return [x.grad for x in inputs]


def test_the_projection_is_in_the_state_dict() -> None:
    source, target = (PerformerAttention(3, 8, num_features=16, seed=seed).eval() for seed in (1, 2))
    inputs = tuple(x.float() for x in draw())
    assert not torch.equal(source(*inputs), target(*inputs))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(*inputs), target(*inputs))


def test_long_causal_sequences_agree_with_dense() -> None:
    q, k, v = (torch.randn(1, 1, 2048, 16) for _ in range(3))
    out = performer_attention(q, k, v, is_causal=True, generator=torch.Generator().manual_seed(0))
    projection = draw_projection(128, 16, draw_seed(torch.Generator().manual_seed(0)))
    expected = dense_performer(*(x.double() for x in (q, k, v)), projection, None, True)
    assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("std", [1, 10])
def test_causal_rows_do_not_depend_on_later_keys_of_large_norm(std: float) -> None:
    q, k, v = (torch.randn(2, 2, 64, 16) for _ in range(3))
    q, k = std * q, std * k
    projection = draw_projection(128, 16, 0)
    later = k.clone()
    later[:, :, 32:] = std * torch.randn(2, 2, 32, 16)
    out, changed = (performer_attention(q, x, v, is_causal=True, projection=projection) for x in (k, later))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[:, :, :32], changed[:, :, :32])
    assert not torch.allclose(out[:, :, 32:], changed[:, :, 32:])
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_counting_calls_does_not_compile_again() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def remember(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(PerformerAttention(3, 8, num_features=16, redraw_interval=3).double(), backend=remember)
    for call in range(6):
        compiled(*draw(value_dim=8))
        if call == 0:
            compiled_at_first = len(graphs)
    assert len(graphs) == compiled_at_first > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_graph_breaks_in_evaluation() -> None:
    torch._dynamo.reset()
    attention = PerformerAttention(3, 8, num_features=16).double().eval()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    inputs = draw(value_dim=8)
    torch.testing.assert_close(compiled(*inputs), attention(*inputs))


def test_bad_arguments_are_named() -> None:
    q, k, v = draw()
    with pytest.raises(UnknownNameError, match="softmax"):
        performer_attention(q, k, v, feature_map="softmx")
    with pytest.raises(UnknownNameError, match="feature map"):
        PerformerAttention(3, 8, feature_map="cosine")
    with pytest.raises(InputError, match="num_features"):
        performer_attention(q, k, v, num_features=0)
    with pytest.raises(InputError, match="scale"):
        performer_attention(q, k, v, scale=-math.inf)
    with pytest.raises(ShapeError, match=r"projection must have shape \(m, 8\)"):
        performer_attention(q, k, v, projection=torch.ones(4, 7))


def test_agrees_with_performer_pytorch() -> None:
    """Definitions agree when its epsilon is too small to matter."""
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    q, k, v = draw(value_dim=8)
    projection = draw_projection(64, 8, 0)
    features = [
        peer.softmax_kernel(x, projection_matrix=projection.double(), is_query=is_query, eps=0.0)
        for x, is_query in ((q, True), (k, False))
    ]
    expected = peer.linear_attention(*features, v)
    torch.testing.assert_close(performer_attention(q, k, v, projection=projection), expected, rtol=1e-4, atol=1e-5)
