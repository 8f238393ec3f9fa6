"""What can be set for a registered attention, checked when it is registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from skyformer.checks import check_at_least, check_positive
from skyformer.errors import InputError, UnknownNameError
from skyformer.functional import GAMMA
from skyformer.landmarks import CustomSampler, QuerySampler, Sampler, StratifiedSampler, UniformSampler, get_sampler
from skyformer.ops.kernels import Kernel, SoftmaxKernel, get_kernel
from skyformer.ops.products import MEMORY_BUDGET
from skyformer.ops.solve import Solver, get_solver

LOCAL_LAYERS = ("refuse", "sdpa")


@dataclass(frozen=True, kw_only=True)
class KernelizedOptions:
    """Exact Kernelized Attention.

    kernel, memory_budget: see `kernelized_attention`. local_layers: what a layer with a sliding window gets, "refuse"
    (an error) or "sdpa" (its own windowed softmax attention).
    """

    kernel: str | Kernel = "gaussian"
    memory_budget: int = MEMORY_BUDGET
    local_layers: str = "refuse"

    def __post_init__(self) -> None:
        get_kernel(self.kernel)
        check_at_least("memory_budget", self.memory_budget, 0, most=2**62)
        if self.local_layers not in LOCAL_LAYERS:
            raise UnknownNameError("way with local_layers", self.local_layers, LOCAL_LAYERS)


@dataclass(frozen=True, kw_only=True)
class SkyformerOptions(KernelizedOptions):
    """Skyformer. num_landmarks, gamma, solver: see `skyformer_attention`; landmarks: likewise, by default "stratified",
    for the softmax kernel "queries"; seed: where landmarks come from in `eval()`, together with the layer's number."""

    num_landmarks: int = 128
    landmarks: str | Sampler | CustomSampler | None = None
    gamma: float = GAMMA
    solver: str | Solver = "cholesky"
    seed: int = 0
    sampler: Sampler | CustomSampler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_landmarks", self.num_landmarks, 1)
        check_positive("gamma", self.gamma)
        check_at_least("seed", self.seed, 0, most=2**62)
        get_solver(self.solver)
        object.__setattr__(self, "sampler", self._sampler())

    def _sampler(self) -> Sampler | CustomSampler:
        landmarks = self.landmarks
        if landmarks is None:
            landmarks = "queries" if isinstance(get_kernel(self.kernel), SoftmaxKernel) else "stratified"
        if isinstance(landmarks, str) and landmarks in _BY_HEAD:
            return _BY_HEAD[landmarks]
        return get_sampler(landmarks)


_BY_HEAD: Mapping[str, Sampler] = {
    sampler.name: sampler
    for sampler in (UniformSampler(per_head=True), StratifiedSampler(per_head=True), QuerySampler(per_head=True))
}
"""Samplers by name that draw for each head; the others look at each head's points anyway, or draw nothing."""

Options: TypeAlias = KernelizedOptions | SkyformerOptions

_KINDS: Mapping[str, type[KernelizedOptions] | type[SkyformerOptions]] = {
    "skyformer": SkyformerOptions,
    "kernelized": KernelizedOptions,
}


def read_options(attention: str, given: Mapping[str, Any]) -> Options:
    """The options of an attention, or an error that lists those it has."""
    if not isinstance(attention, str) or attention not in _KINDS:
        raise UnknownNameError("attention", attention, _KINDS)
    known = [option.name for option in fields(_KINDS[attention]) if option.init]
    for name in given:
        if name in _BY_THE_MODEL:
            raise InputError(f"{name} comes from the model: {_BY_THE_MODEL[name]}; leave it out of register")
        if name not in known:
            raise UnknownNameError(f"option for attention {attention!r}:", name, ["attention", *known])
    return _KINDS[attention](**given)


_BY_THE_MODEL: Mapping[str, str] = {
    "scale": "it passes the scaling of its scores with every call",
    "dropout": "it passes the attention dropout of its config with every call",
    "num_heads": "the heads are those of the tensors it passes",
    "head_dim": "the head dim is that of the tensors it passes",
}
