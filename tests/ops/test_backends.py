"""use_backend: what runs where, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import skyformer
from skyformer.errors import UnknownNameError, UnsupportedError
from skyformer.ops import backends, triton_launches
from skyformer.ops.backends import backend_of, chosen_backend
from tests.helpers import assert_same_with_gradients, refused, scattered_mask

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _leaves_no_choice_behind() -> Iterator[None]:
    yield
    skyformer.use_backend("auto")


def in_another_thread() -> str:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(chosen_backend).result().backend


def test_the_default_is_fused_on_cpus_and_triton_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {name: torch.device(name) for name in ("cpu", "cuda", "xpu", "mps", "meta")}
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", True)
    assert {name: backend_of(each) for name, each in devices.items()} == {
        "cpu": "fused",
        "cuda": "triton",
        "xpu": "triton",
        "mps": "torch",
        "meta": "torch",
    }
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", False)
    assert backend_of(devices["cuda"]) == "torch"


def test_a_statement_chooses_for_good_and_a_block_for_itself() -> None:
    skyformer.use_backend("torch")
    assert backend_of(CPU) == "torch"
    with skyformer.use_backend("fused"):
        assert backend_of(CPU) == "fused"
        with skyformer.use_backend("torch"):
            assert backend_of(CPU) == "torch"
        assert backend_of(CPU) == "fused"
    assert backend_of(CPU) == "torch"
    skyformer.use_backend("auto")
    assert backend_of(CPU) == "fused"


def test_an_object_can_have_several_blocks_but_not_one_in_another() -> None:
    choice = skyformer.use_backend("torch")
    for _ in range(2):
        with choice:
            assert backend_of(CPU) == "torch"
            with refused(UnsupportedError, "already"), choice:
                pass
            assert backend_of(CPU) == "torch"
        assert chosen_backend().backend == in_another_thread() == "auto"


def test_an_error_in_the_block_ends_the_choice() -> None:
    with pytest.raises(ZeroDivisionError), skyformer.use_backend("torch"):
        1 / 0  # noqa: B018
    assert chosen_backend().backend == "auto"


def test_threads_do_not_change_each_others_choice() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> str:
        with skyformer.use_backend("torch"):
            inside.set()
            done.wait(10)
            return backend_of(CPU)

    with ThreadPoolExecutor(1) as thread, skyformer.use_backend("fused"):
        result = thread.submit(other)
        inside.wait(10)
        assert backend_of(CPU) == "fused"
        done.set()
        assert result.result() == "torch"
    assert chosen_backend().backend == in_another_thread() == "auto"


def test_threads_without_a_choice_follow_the_latest() -> None:
    # torch runs backward passes on a GPU, and the forward passes that checkpointing repeats, in threads of its own.
    with skyformer.use_backend("torch"):
        assert in_another_thread() == "torch"
    skyformer.use_backend("fused")
    assert in_another_thread() == "fused"


def test_unknown_and_unavailable_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UnknownNameError, "backend 'cuda'", "auto, fused, torch, triton"):
        skyformer.use_backend("cuda")
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", False)
    with refused(UnsupportedError, "'triton'", "not installed"):
        skyformer.use_backend("triton")
    monkeypatch.setattr(backends, "FUSED_WORKS", False)
    with refused(UnsupportedError, "'fused'", torch.__version__):
        skyformer.use_backend("fused")
    assert chosen_backend().backend == "auto"


def test_tensors_on_the_wrong_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", True)
    with skyformer.use_backend("fused"), refused(UnsupportedError, "'fused'", "CPU tensors only", "cuda"):
        backend_of(torch.device("cuda"))
    with skyformer.use_backend("triton"), refused(UnsupportedError, "'triton'", "GPUs only", "mps"):
        backend_of(torch.device("mps"))
    monkeypatch.setattr(triton_launches, "interpreting", lambda: False)
    x = torch.randn(1, 1, 4, 16)
    with skyformer.use_backend("triton"), refused(UnsupportedError, "'triton'", "TRITON_INTERPRET", "CPU"):
        skyformer.kernel_product(x, x, x)


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if name == "kernelized":
        return skyformer.kernelized_attention(q, k, v, key_mask=mask)
    if name == "kernel_product":
        return skyformer.kernel_product(q, k, v, scale=0.3, key_mask=mask)
    kernel = "softmax" if name == "softmax by skyformer" else "gaussian"
    generator = torch.Generator().manual_seed(0)
    return skyformer.skyformer_attention(
        q, k, v, num_landmarks=12, key_mask=mask, kernel=kernel, gamma=0.1, generator=generator
    )


def test_the_interpreter_does_not_tune() -> None:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be tested")
    x = torch.randn(1, 1, 4, 16)
    with skyformer.use_backend("triton", autotune=True):
        assert chosen_backend().autotune
        tuned = skyformer.kernel_product(x, x, x)
    torch.testing.assert_close(tuned, skyformer.kernel_product(x, x, x))


@pytest.mark.parametrize("options", [{"dropout_p": 0.3}, {"kernel": "matern"}], ids=lambda options: next(iter(options)))
def test_triton_leaves_dropout_and_other_kernels_to_the_portable_product(options: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be tested")
    inputs = tuple(torch.randn(1, 2, 20, 16) for _ in range(3))

    def run(backend: str) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        with skyformer.use_backend(backend):
            return skyformer.kernelized_attention(*inputs, generator=generator, **options)

    assert torch.equal(run("triton"), run("torch"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["kernelized", "skyformer", "softmax by skyformer", "kernel_product"])
def test_every_function_gives_the_same_by_every_backend(name: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be tested")
    inputs = tuple((0.7 * torch.randn(2, 2, 30, 16)).requires_grad_() for _ in range(3))
    mask = scattered_mask(2, 30)

    def by_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with skyformer.use_backend(backend):
            return attend(name, q, k, v, mask)

    assert_same_with_gradients(by_backend, lambda q, k, v: attend(name, q, k, v, mask), inputs, rtol=1e-3, atol=1e-4)
