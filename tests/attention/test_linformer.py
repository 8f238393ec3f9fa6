"""Linformer: agreement with the reference outputs, with its definition and with softmax attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from skyformer import MultiheadAttention, build_attention, softmax_attention
from skyformer.attention import Attention
from skyformer.attention.linformer import linformer_attention
from skyformer.errors import InputError, ShapeError
from skyformer.testing.suite import AttentionSuite, OptionSuite
from tests.helpers import authors_outputs, reference_error


class FixedProjections(OptionSuite):
    name = "linformer"

    def build(self, head_dim: int = 8, **overrides: Any) -> Attention:
        """With the same projections every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return super().build(head_dim, **overrides)


class TestLinformer(FixedProjections, AttentionSuite):
    options = {"num_features": 12}


class TestLinformerShared(FixedProjections):
    options = {"num_features": 12, "share_heads": True, "share_key_value": True}


def dense_linformer(query: Tensor, key: Tensor, value: Tensor, E: Tensor, F: Tensor, mask: Tensor) -> Tensor:
    """The definition, one example and one head at a time."""
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b in range(query.shape[0]):
        valid = mask[b].nonzero().squeeze(-1)
        for h in range(query.shape[1]):
            keys = E[h, :, : len(valid)] @ key[b, h, valid]
            values = F[h, :, : len(valid)] @ value[b, h, valid]
            out[b, h] = torch.softmax(query[b, h] @ keys.T / query.shape[-1] ** 0.5, -1) @ values
    return out


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCATTERED = torch.tensor([[True] * 7, [False, True, True, False, False, True, False]])


@pytest.mark.parametrize("case", ["full", "padded"])
def test_agrees_with_the_authors_implementation(case: str) -> None:
    for tensors in authors_outputs(case):
        projection, mask = tensors["linformer.projection"], tensors["key_mask"]
        attention = partial(linformer_attention, key_projection=projection, key_mask=mask)
        assert reference_error(tensors, "linformer", attention) < 1e-5


def test_an_identity_projection_gives_softmax() -> None:
    q, k, v = random(2, 2, 9, 4, seed=1), random(2, 2, 7, 4, seed=2), random(2, 2, 7, 3, seed=3)
    out = linformer_attention(q, k, v, key_projection=torch.eye(7, dtype=q.dtype)[None])
    torch.testing.assert_close(out, softmax_attention(q, k, v))


@pytest.mark.parametrize("mask", [None, SCATTERED], ids=["unmasked", "scattered"])
def test_agrees_with_the_definition(mask: Tensor | None) -> None:
    q, k, v = random(2, 2, 5, 4, seed=1), random(2, 2, 7, 4, seed=2), random(2, 2, 7, 3, seed=3)
    E, F = random(2, 6, 8, seed=4), random(2, 6, 8, seed=5)
    out = linformer_attention(q, k, v, key_projection=E, value_projection=F, key_mask=mask)
    torch.testing.assert_close(
        out, dense_linformer(q, k, v, E, F, torch.ones_like(SCATTERED) if mask is None else mask)
    )


def test_masked_keys_may_hold_anything_and_may_exceed_max_length() -> None:
    q, k, v, E = (
        random(2, 2, 7, 4, seed=1),
        random(2, 2, 7, 4, seed=2),
        random(2, 2, 7, 3, seed=3),
        random(1, 5, 7),
    )
    expected = linformer_attention(q, k, v, key_projection=E)
    mask = torch.tensor([False] + [True, True, False] * 3 + [True]).expand(2, -1)
    wide = [torch.full((2, 2, 11, x.shape[-1]), torch.nan, dtype=x.dtype) for x in (k, v)]
    for padded, x in zip(wide, (k, v), strict=True):
        padded[:, :, mask[0]] = x
    torch.testing.assert_close(linformer_attention(q, *wide, key_projection=E, key_mask=mask), expected)


@pytest.mark.parametrize("share_heads", [False, True])
@pytest.mark.parametrize("share_key_value", [False, True])
def test_sharing_leaves_fewer_parameters(share_heads: bool, share_key_value: bool) -> None:
    module = build_attention(
        "linformer",
        3,
        4,
        max_length=10,
        num_features=5,
        share_heads=share_heads,
        share_key_value=share_key_value,
    )
    heads, sides = (1 if share_heads else 3), (1 if share_key_value else 2)
    assert sum(p.numel() for p in module.parameters()) == sides * heads * 5 * 10
    q = torch.randn(2, 3, 6, 4)
    module(q, q, q).sum().backward()
    for projection in module.parameters():
        assert projection.grad is not None
        assert projection.grad[:, :, :6].abs().sum() > 0
        assert projection.grad[:, :, 6:].abs().sum() == 0


def test_needs_max_length_and_says_how_to_give_it() -> None:
    with pytest.raises(InputError, match="max_length=4096"):
        MultiheadAttention(8, 2, attention="linformer")


@pytest.mark.parametrize("mask", [None, torch.ones(1, 11, dtype=torch.bool)], ids=["unmasked", "masked"])
def test_a_longer_sequence_is_an_error_that_says_so(mask: Tensor | None) -> None:
    module = build_attention("linformer", 2, 4, max_length=10)
    q = torch.randn(1, 2, 11, 4)
    with pytest.raises(ShapeError, match=r"11 tokens.*columns for 10.*max_length=11"):
        module(q, q, q, key_mask=mask)


def test_projections_of_the_wrong_shape_are_refused() -> None:
    q = torch.randn(1, 2, 10, 4)
    with pytest.raises(ShapeError, match=r"key_projection must have shape \(2, d, N\)"):
        linformer_attention(q, q, q, key_projection=torch.randn(3, 5, 10))
