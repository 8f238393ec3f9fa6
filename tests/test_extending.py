"""Parts from outside the package: the code of docs/extending.md runs, names are checked, and modules are imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import skyformer
from skyformer import Attention, Kernel, Sampler, kernelized_attention, register_attention
from skyformer.attention import registry as attention_registry
from skyformer.errors import InputError, PluginWarning, ReplacedWarning, UnknownNameError
from skyformer.landmarks import SAMPLERS, Candidates, check_rows, register_sampler, without_masked_rows
from skyformer.ops import kernels
from skyformer.ops.kernels import KERNELS, GaussianKernel, get_kernel
from skyformer.registry import IMPORT_VARIABLE, Registry, import_parts
from tests.helpers import assert_same_with_gradients, refused

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
REGISTRIES: tuple[Registry[Any], ...] = (attention_registry._ATTENTIONS, KERNELS, SAMPLERS)


@pytest.fixture(autouse=True)
def _forget_new_parts() -> Iterator[None]:
    before = [dict(registry._parts) for registry in REGISTRIES if registry.names()]
    yield
    for registry, parts in zip(REGISTRIES, before, strict=True):
        registry._parts = parts


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the code of the page defines."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for code in CODE:
        exec(compile(code, "extending.md", "exec", dont_inherit=True), names)
    return names


def test_the_kernel_of_the_page_has_the_gradients_of_the_dense_formula(page: dict[str, Any]) -> None:
    inputs = tuple(torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (40, 70, 70))

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        squared = (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) * 3**-0.5
        return (1 / (1 + squared)) @ value

    def by_name(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernelized_attention(query, key, value, kernel="cauchy")

    assert_same_with_gradients(by_name, dense, inputs)
    few = tuple(x[:, :, :6].detach().requires_grad_() for x in inputs)
    rows = torch.tensor([[0, 3, 7, 9], [1, 2, 6, 11]])
    assert torch.autograd.gradcheck(
        lambda *x: skyformer.skyformer_attention(*x, kernel="cauchy", landmarks=rows), few, fast_mode=True
    )


def test_a_kernel_that_is_not_one_at_distance_zero(page: dict[str, Any]) -> None:
    @dataclass(frozen=True)
    class Doubled(page["CauchyKernel"]):  # type: ignore[misc]
        def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
            return 2 * super().value(inner, half_x, half_y)

    query, key, value = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    rows = torch.arange(18)[None]
    torch.testing.assert_close(
        skyformer.skyformer_attention(query, key, value, kernel=Doubled(), landmarks=rows, gamma=1e-10),
        kernelized_attention(query, key, value, kernel=Doubled()),
    )


def test_the_attention_of_the_page_is_known_everywhere(page: dict[str, Any]) -> None:
    assert "linear" in skyformer.list_attentions()
    assert skyformer.list_attentions("lin*") == ["linear", "linformer"]
    assert page["model"].config.attention == "linear"
    assert json.loads(Path("my-model/config.json").read_text())["config"]["attention"] == "linear"
    assert page["layer"](*torch.randn(3, 2, 10, 64))[0].shape == (2, 10, 64)


def test_the_sampler_of_the_page_is_known_in_models(page: dict[str, Any]) -> None:
    options = {"landmarks": "longest", "kernel": "cauchy", "num_landmarks": 8}
    model = skyformer.SequenceClassifier(vocab_size=9, max_length=64, attention_options=options)
    mask = torch.arange(40) < torch.tensor([[40], [3]])
    logits = model.eval()(torch.randint(9, (2, 40)), mask)
    model.save_pretrained("with-parts")
    assert logits.isfinite().all()
    assert skyformer.SequenceClassifier.from_pretrained("with-parts").config.attention_options == options


def test_wrong_kernels_are_refused_with_the_reason() -> None:
    @dataclass(frozen=True)
    class Polynomial(Kernel):
        name = "polynomial"

        def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
            return (1 + inner).square()

    class NotOfInner(Polynomial):
        radial = False

        def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
            return inner - half_x

    class SameSlope(Polynomial):
        radial, slope_is_value = False, True

    class WrongSlope(Polynomial):
        radial = False

        def value_and_slope(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> tuple[Tensor, Tensor]:
            return (1 + inner).square(), 1 + inner

    class OneNumber(Polynomial):
        def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
            return inner.sum()

    class Wider(GaussianKernel):
        def value(self, inner: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
            return super().value(inner / 2, half_x / 2, half_y / 2)

    for kernel, words in {
        Polynomial: ("radial = True", "set radial = False"),
        NotOfInner: ("radial = False", "inner alone"),
        SameSlope: ("slope_is_value = True", "autograd"),
        WrongSlope: ("its value_and_slope", "autograd"),
        OneNumber: ("(1, 4, 5)", "()"),
        Wider: ("must inherit Kernel itself",),
    }.items():
        with pytest.raises(InputError) as caught:
            get_kernel(kernel())
        assert all(word in str(caught.value) for word in (kernel.__name__, *words))
    right = type("Right", (Polynomial,), {"radial": False})()
    query, key, value = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(lambda *x: kernelized_attention(*x, kernel=right), (query, key, value))
    assert type(right) in kernels._checked


def test_registering_names() -> None:
    class Nameless(Sampler):
        def __call__(self, candidates: Any, num_landmarks: int, generator: Any) -> Tensor:
            return torch.zeros(1, 1, dtype=torch.long)

    def define(class_name: str, **members: Any) -> type:
        return type(class_name, (Nameless,), members)

    with refused(InputError, "Nameless", "`name`", 'name = "..."'):
        register_sampler(Nameless)
    with refused(InputError, "'uniform' is taken", "UniformSampler"):
        register_sampler(define("Mine", name="uniform"))
    first = register_sampler(define("Mine", name="mine"))
    with refused(InputError, "'mine' is taken", "Mine"):
        register_sampler(define("Other", name="mine"))
    register_sampler(first)
    with pytest.warns(ReplacedWarning, match="'mine' is defined again"):
        second = register_sampler(define("Mine", name="mine"))
    assert type(SAMPLERS.get("mine")) is second
    with refused(InputError, "must define __call__"):
        register_sampler(type("Abstract", (Sampler,), {"name": "abstract"}))
    with refused(InputError, "inherits Sampler", "Kernel"):
        register_sampler(Kernel)
    with refused(InputError, "NeedsMore", "default settings", "width"):
        register_sampler(define("NeedsMore", name="more", __init__=lambda self, width: None))
    with refused(UnknownNameError, "'zzz'", "skyformer --import MODULE", IMPORT_VARIABLE):
        SAMPLERS.get("zzz")


def test_built_in_names_of_attentions_are_refused_at_once_in_a_new_process() -> None:
    code = """
from dataclasses import dataclass
from skyformer import Attention, register_attention
from skyformer.errors import InputError
@dataclass(eq=False, repr=False, kw_only=True)
class Mine(Attention):
    name = "performer"
    def attend(self, inputs): return inputs.value
try:
    register_attention(Mine)
except InputError as refused:
    print(refused)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'performer' is taken by <class 'skyformer.attention.performer.PerformerAttention'>" in done.stdout


def test_attentions_whose_options_have_no_names_are_refused() -> None:
    class Base(Attention):
        def attend(self, inputs: Any) -> Tensor:
            return inputs.value

    @dataclass(eq=False, repr=False)
    class Positional(Base):
        name = "positional"
        width: int = 3

    @dataclass
    class Unhashable(Base):
        name = "unhashable"

    with refused(InputError, "Positional", "width", "kw_only=True"):
        register_attention(Positional)
    with refused(InputError, "Unhashable", "hashable", "eq=False"):
        register_attention(Unhashable)


def test_masked_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 4)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])

    def last_key(candidates: Candidates, num_landmarks: int, generator: object) -> Tensor:
        return torch.tensor([[0, 9], [0, 9]])

    with refused(InputError, "row 9 of example 1", "masked key 4", "valid_rows"):
        skyformer.skyformer_attention(query, key, value, landmarks=last_key, key_mask=mask)
    with refused(InputError, "row 3 of example 1", "masked query 3"):
        skyformer.skyformer_attention(query, key, value, landmarks=lambda *_: torch.tensor([[3], [3]]), key_mask=mask)
    candidates = Candidates(query, key, mask, mask, GaussianKernel(), 1.0)
    rows = check_rows(torch.tensor([[3, -1], [3, 1]]), 2, 2, 10)
    monkeypatch.setattr("skyformer.landmarks.base.may_look_at_values", lambda rows: False)
    assert without_masked_rows(rows, candidates).tolist() == [[[3, -1]], [[-1, 1]]]


@pytest.fixture
def parts_folder(tmp_path: Path) -> Path:
    (tmp_path / "my_parts.py").write_text("".join(CODE[:2]) + CODE[2].partition("layer = ")[0])
    (tmp_path / "broken_parts.py").write_text("import not_there\n")
    (tmp_path / "wrong_parts.py").write_text("def f(:\n")
    return tmp_path


def test_modules_are_imported_by_name(parts_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(parts_folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_parts("my_parts")
    assert get_kernel("cauchy").name == "cauchy"
    with refused(InputError, "--import nowhere", "no such module"):
        import_parts("nowhere")
    with refused(InputError, "--import broken_parts", "'not_there'", "not installed"):
        import_parts("broken_parts")
    with refused(InputError, "--import wrong_parts", "SyntaxError"):
        import_parts("wrong_parts")
    with refused(InputError, "my_parts", "not of a file"):
        import_parts("my_parts.py")


def test_the_environment_variable_reaches_new_processes(parts_folder: Path) -> None:
    code = "import skyformer; print(*skyformer.list_attentions('linear'), *skyformer.list_kernels())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=parts_folder,
        env={**os.environ, IMPORT_VARIABLE: "my_parts"},
    )
    assert done.stdout.split() == [
        "linear",
        "cauchy",
        "gaussian",
        "laplacian",
        "matern",
        "rational_quadratic",
        "softmax",
    ]


def test_the_suite_of_the_page_passes_outside_the_repository(parts_folder: Path) -> None:
    (parts_folder / "test_mine.py").write_text("import my_parts\n" + CODE[3])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "padding or refused"],
        capture_output=True,
        text=True,
        check=False,
        cwd=parts_folder,
    )
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


def test_entry_points_of_installed_packages(parts_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = parts_folder / "my_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[skyformer.kernels]\ncauchy = my_parts:CauchyKernel\n\n[skyformer.samplers]\nbroken = broken_parts:Nothing\n"
    )
    monkeypatch.syspath_prepend(parts_folder)
    sys.modules.pop("my_parts", None)
    loaded: Registry[Kernel] = Registry("kernel", base=Kernel, entry_points="skyformer.kernels")
    assert "cauchy" in {*loaded.names(), *KERNELS.names()}
    other: Registry[Sampler] = Registry("landmark sampler", base=Sampler, entry_points="skyformer.samplers")
    with pytest.warns(PluginWarning, match="'broken' of my-parts cannot be used: .*not_there"):
        assert other.names() == []
