"""Nystromformer: agreement with its definition, reference outputs, transformers, and softmax attention when d = n."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer import build_attention, softmax_attention
from skyformer.attention import Attention, nystromformer
from skyformer.attention.nystromformer import convolve_tokens, iterative_pinv, nystromformer_attention
from skyformer.errors import InputError, ShapeError, UnsupportedError
from skyformer.testing.suite import AttentionSuite, OptionSuite, relative_error
from tests.helpers import authors_outputs, reference_error


class TestNystromformer(AttentionSuite):
    name = "nystromformer"
    options = {"num_landmarks": 12}


class TestNystromformerWithConvolution(OptionSuite):
    name = "nystromformer"
    options = {"num_landmarks": 12, "conv_kernel_size": 5}

    def build(self, head_dim: int = 8, **overrides: Any) -> Attention:
        """With the same convolution every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return super().build(head_dim, **overrides)

    @pytest.mark.parametrize(("length", "size"), [(5, 13), (13, 5)])
    def test_cross_attention_shapes(self, length: int, size: int) -> None:
        q, k = torch.randn(2, 2, length, 8), torch.randn(2, 2, size, 8)
        with pytest.raises(UnsupportedError, match=f"{length} queries and {size} values"):
            self.build().float()(q, k, k)


def dense_nystromformer(q: Tensor, k: Tensor, v: Tensor, num_landmarks: int, num_iterations: int) -> Tensor:
    """One head (n, P), no mask, with every matrix written out."""
    root = q.shape[-1] ** 0.25

    def means(x: Tensor) -> Tensor:
        return torch.stack([part.mean(0) for part in torch.tensor_split(x, min(num_landmarks, len(x)))])

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax((x / root) @ (y / root).T, -1)

    # Only equal runs: tensor_split puts the longer ones first, the attention spreads them over the sequence.
    assert len(q) % min(num_landmarks, len(q)) == 0
    assert len(k) % min(num_landmarks, len(k)) == 0
    A = kernel(means(q), means(k))
    identity = torch.eye(A.shape[0], dtype=A.dtype)
    Z = A.T / (A.sum(0).max() * A.sum(1).max())
    for _ in range(num_iterations):
        Z = Z @ (13 * identity - A @ Z @ (15 * identity - A @ Z @ (7 * identity - A @ Z))) / 4
    return kernel(q, means(k)) @ Z @ kernel(means(q), k) @ v


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("length", "size"), [(12, 12), (12, 6), (18, 24), (3, 12), (4, 2)])
def test_agrees_with_the_definition(length: int, size: int) -> None:
    q, k, v = random(2, 2, length, 4, seed=1), random(2, 2, size, 4, seed=2), random(2, 2, size, 3, seed=3)
    out = nystromformer_attention(q, k, v, num_landmarks=6)
    for b in range(2):
        for h in range(2):
            expected = dense_nystromformer(q[b, h], k[b, h], v[b, h], 6, 6)
            torch.testing.assert_close(out[b, h], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("num_landmarks", [10, 16])
def test_exact_when_every_token_is_a_landmark(num_landmarks: int) -> None:
    q, k, v = random(2, 2, 10, 8, seed=1) * 2, random(2, 2, 10, 8, seed=2) * 2, random(2, 2, 10, 3, seed=3)
    out = nystromformer_attention(q, k, v, num_landmarks=num_landmarks, num_iterations=18)
    torch.testing.assert_close(out, softmax_attention(q, k, v), atol=1e-7, rtol=1e-6)


def test_error_falls_as_landmarks_grow() -> None:
    q, k, v = (random(4, 2, 256, 8, seed=s) for s in (1, 2, 3))
    q, k = q.cumsum(2) / 16, k.cumsum(2) / 16
    exact = softmax_attention(q, k, v)
    errors = [
        relative_error(nystromformer_attention(q, k, v, num_landmarks=d, num_iterations=12), exact)
        for d in (4, 16, 64, 256)
    ]
    assert errors == sorted(errors, reverse=True)


def test_close_to_the_authors_implementation() -> None:
    """The authors scale the inverse by a maximum over the whole batch, so theirs has converged a little less."""
    attention = partial(nystromformer_attention, num_landmarks=24)
    for tensors in authors_outputs("full"):
        assert reference_error(tensors, "nystromformer", attention) < 0.03


def test_with_their_scaling_of_the_inverse_agrees_with_the_authors_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = partial(nystromformer_attention, num_landmarks=24)
    for tensors in authors_outputs("full"):
        norm = tensors.get("nystromformer.batch_norm")
        monkeypatch.setattr(nystromformer, "iterative_pinv", partial(pinv_scaled_by_the_batch, norm=norm))
        assert reference_error(tensors, "nystromformer", attention) < 1e-5


def pinv_scaled_by_the_batch(A: Tensor, num_iterations: int, norm: Tensor | None) -> Tensor:
    """`norm` is given for a part of a batch, from the whole batch."""
    identity = torch.eye(A.shape[-1])
    Z = A.mT / (A.sum(-2).max() * A.sum(-1).max() if norm is None else norm)
    for _ in range(num_iterations):
        Z = Z @ (13 * identity - A @ Z @ (15 * identity - A @ Z @ (7 * identity - A @ Z))) / 4
    return Z


def test_pinv_is_the_pseudo_inverse_of_singular_and_of_padded_matrices() -> None:
    A = random(3, 6, 5).softmax(-1)
    A[1, :, 3:] = 0
    A[2] = 0
    torch.testing.assert_close(iterative_pinv(A, 16), torch.linalg.pinv(A, rtol=1e-10), atol=1e-8, rtol=1e-8)


def test_pinv_scales_each_matrix_by_itself() -> None:
    A = random(2, 5, 5).softmax(-1)
    alone = iterative_pinv(A[:1], 3)
    A[1] = 0
    A[1, :, 0] = 1
    torch.testing.assert_close(iterative_pinv(A, 3)[:1], alone, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize("taps", [1, 5, 101])
def test_convolution_agrees_with_conv2d(length: int, taps: int) -> None:
    x, weights = random(2, 3, length, 4, seed=1), random(3, taps, seed=2)
    expected = F.conv2d(x, weights[:, None, :, None], padding=(taps // 2, 0), groups=3)
    torch.testing.assert_close(convolve_tokens(x, weights, None), expected)


def test_convolution_runs_over_valid_tokens_only() -> None:
    x, weights = random(1, 2, 9, 3, seed=1), random(2, 5, seed=2)
    mask = torch.tensor([[False, True, True, False, True, True, True, False, False]])
    out = convolve_tokens(x, weights, mask)
    torch.testing.assert_close(out[:, :, mask[0]], convolve_tokens(x[:, :, mask[0]], weights, None))
    assert not out[:, :, ~mask[0]].any()


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    config = modeling.NystromformerConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_landmarks=8,
        segment_means_seq_len=32,
        conv_kernel_size=5,
        attention_probs_dropout_prob=0.0,
    )
    theirs = modeling.NystromformerSelfAttention(config).double().eval()
    # The coefficient of each matrix by itself; the default takes the maximum over the batch.
    theirs.init_option = "exact"
    ours = build_attention("nystromformer", 2, 8, num_landmarks=8, conv_kernel_size=5).double()
    ours.load_state_dict({"convolution": theirs.conv.weight.detach().view(2, 5)})
    x = random(3, 32, 16)
    q, k, v = (linear(x).unflatten(-1, (2, 8)).transpose(1, 2) for linear in (theirs.query, theirs.key, theirs.value))
    torch.testing.assert_close(ours(q, k, v).transpose(1, 2).flatten(2), theirs(x)[0])


def test_bad_options_are_named() -> None:
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(InputError, match="conv_kernel_size must be odd"):
        build_attention("nystromformer", 2, 4, conv_kernel_size=4)
    with pytest.raises(ShapeError, match=r"convolution must have shape \(2, k\)"):
        nystromformer_attention(q, q, q, convolution=torch.randn(3, 5))
    with pytest.raises(InputError, match="num_iterations"):
        build_attention("nystromformer", 2, 4, num_iterations=0)
