"""Training in bfloat16 as the Triton kernels compute it, with their rounding imitated on the CPU, against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from skyformer import SequenceClassifier, functional
from skyformer.lra import load_task, prepare, training_loader
from skyformer.ops.kernels import GaussianKernel
from skyformer.ops.precision import without_autocast
from skyformer.ops.products import Plan, dense_kernel_product

STEPS = 300


class RoundedProduct(torch.autograd.Function):
    """The product and its gradients with the roundings of `gaussian_rows`, on dense matrices in float32."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, scale: float, float32_out: bool
    ) -> Tensor:
        c = GaussianKernel().matrix(x.float(), y.float(), scale)
        if mask is not None:
            c = c.masked_fill(~mask[:, None, None, :], 0)
        ctx.scale = scale
        ctx.save_for_backward(x, y, v, c)
        out = (c if float32_out else rounded(c, x)) @ normalised(v, x)
        return out if float32_out else out.to(x.dtype)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, v, c = ctx.saved_tensors
        grad = normalised(grad, x)
        g = rounded(c * (grad @ normalised(v, x).mT), x)
        dx = ctx.scale * (g @ y.float() - g.sum(-1, keepdim=True) * x.float())
        dy = ctx.scale * (g.mT @ x.float() - g.sum(-2).unsqueeze(-1) * y.float())
        dv = (c if v.dtype == torch.float32 else rounded(c, x)).mT @ grad
        return dx.to(x.dtype), dy.to(y.dtype), dv.to(v.dtype), None, None, None


def rounded(matrix: Tensor, like: Tensor) -> Tensor:
    return matrix.to(like.dtype).float()


def normalised(v: Tensor, like: Tensor) -> Tensor:
    """v in float32 after rounding; a float32 matrix is divided by its largest entry before that."""
    peak = v.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) if v.dtype == torch.float32 else 1.0
    return rounded(v / peak, like) * peak


def rounded_product(
    x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None, plan: Plan, float32_out: bool = False
) -> Tensor:
    out: Tensor = RoundedProduct.apply(x, y, v, mask, plan.scale, float32_out)
    return out


def test_the_imitation_agrees_with_the_kernels() -> None:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be tested")
    from skyformer.ops.triton_products import triton_product

    x, y, v = ((0.7 * torch.randn(1, 2, 40, 16)).bfloat16() for _ in range(3))
    grad = torch.randn(1, 2, 40, 16)
    for value, wide in ((v, False), (v, True), (v.float(), False)):
        results = []
        for run in (
            lambda x, y, v: triton_product(x, y, v, None, False, 0.3, wide),  # noqa: B023
            lambda x, y, v: RoundedProduct.apply(x, y, v, None, 0.3, wide),  # noqa: B023
        ):
            inputs = [t.clone().requires_grad_() for t in (x, y, value)]
            out = run(*inputs)
            results.append([out.float(), *(g.float() for g in torch.autograd.grad(out, inputs, grad.to(out.dtype)))])
        exact = dense_kernel_product(*(t.double() for t in (x, y, value)), scale=0.3)
        assert (results[0][0] - results[1][0]).norm() < 0.2 * (results[1][0] - exact).norm() + 1e-5 * exact.norm()
        for found, expected in zip(*results, strict=True):
            assert (found - expected).norm() < 5e-3 * expected.norm()


def train(task: Any, half_precision: bool) -> list[float]:
    """The losses of a small Skyformer."""
    torch.manual_seed(0)
    model = SequenceClassifier(
        vocab_size=task.spec.vocab_size,
        num_classes=task.spec.num_classes,
        max_length=128,
        dim=64,
        num_heads=2,
        num_layers=2,
        attention="skyformer",
        attention_options={"num_landmarks": 32},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in training_loader(task.train, batch_size=32, num_steps=STEPS, seed=0):
        with torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
            loss = F.cross_entropy(model(batch.tokens, batch.mask).float(), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_losses_of_bfloat16_follow_those_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("listops", data_dir=tmp_path, limit=4000, max_length=128)
    task = load_task("listops", data_dir=tmp_path, limit=4000, max_length=128)
    single = torch.tensor(train(task, half_precision=False))
    monkeypatch.setattr(functional, "product_by_backend", rounded_product)
    monkeypatch.setattr(functional, "triton_computes", lambda *_: True)
    half = torch.tensor(train(task, half_precision=True))
    apart = (single - half).abs()
    print(f"losses: {single[-50:].mean():.4f} and {half[-50:].mean():.4f}, apart {apart.mean():.4f} on average")
    assert apart[:10].max() < 0.02
    assert apart.mean() < 0.03
    assert abs(single[-50:].mean() - half[-50:].mean()) < 0.02
