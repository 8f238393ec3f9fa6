"""The `skyformer` command itself: help, wrong commands, missing packages, and bugs that stay tracebacks."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import skyformer as skyformer_package
from skyformer.attention.registry import _ATTENTIONS
from skyformer.cli import main as command
from skyformer.errors import EXTRA_OF_MODULE, install_command, missing_extra
from skyformer.registry import IMPORT_VARIABLE
from skyformer.training.ray_sweeps import _environment
from tests.cli.conftest import CommandLine

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
HELP = {
    "": "demo train evaluate predict sweep runs bench study data --debug --import",
    "train": "--attention --preset --set --limit --resume --show-config",
    "data": "prepare list show verify",
    "data prepare": "--from --limit --level --workers",
    "bench": "attention conversion data huggingface steps targets training",
    "bench attention": "--lengths --batch --heads --head-dim --landmarks --dtype --threads --no-peers",
    "study": "approximation dimension all",
    "study dimension": "--epsilons --draws --small --output --render",
}


@pytest.mark.parametrize("words", HELP)
def test_help_lists_commands_and_options(skyformer: CommandLine, words: str) -> None:
    outcome = skyformer(*words.split(), "--help")
    assert outcome.code == 0
    assert [name for name in HELP[words].split() if name not in outcome.output] == []


def test_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["skyformer", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("skyformer", run_name="__main__")
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "promised"),
    [
        ("train", "name a task to train on: listops, text"),
        ("train txet", "unknown task 'txet'; known: image, listops, pathfinder, retrieval, text. Did you mean 'text'?"),
        ("train text --set optim.lrr=1", "Did you mean 'optim.lr'?"),
        ("train --resume nothing", "there is no run 'nothing'"),
        ("train --resume nothing --config x.yaml", "use only one of them"),
        ("train --config nowhere.yaml", "nowhere.yaml cannot be read"),
        ("train text --seed 1 --config x.yaml", "--config has them already: leave out a task"),
        ("train listops --set task.limit=50", "run: skyformer data prepare listops --limit 50\n"),
        ("evaluate nothing", "there is no run 'nothing'"),
        ("predict nothing text", "there is no run 'nothing'"),
        ("sweep --task listops --attention skyfromer", "Did you mean 'skyformer'?"),
        ("sweep --task listops --seeds 0,x", "whole numbers separated by commas; got '0,x'"),
        ("sweep --task listops --address head:6379", "--address can be used only with --engine ray"),
        ("sweep --task listops --engine ray --memory much", "such as 500MB or 4GB; got 'much'"),
        ("sweep --task listops", "run: skyformer data prepare listops"),
        ("runs --task txt", "unknown task 'txt'"),
        ("runs --attention skyfromer", "Did you mean 'skyformer'?"),
        ("runs --preset papr", "Did you mean 'paper'?"),
        ("runs --format latex --list", "remove --list"),
        ("bench attention --lengths many", "--lengths must be a whole number, or several separated by commas; got 'ma"),
        ("bench attention --lengths 0", "--lengths must be at least 1; got 0"),
        ("bench attention --dtype int8", "known: bfloat16, float16, float32, float64"),
        ("study dimension --render --output no/such/folder", "run the command without --render first"),
        ("data prepare listop", "Did you mean 'listops'?"),
        ("data prepare image --max-length 100", "must be left out for image"),
        ("data prepare all --from .", "each task separately"),
        ("data show text --max-length 100", "must be left out for text"),
        ("data show text", "skyformer data prepare text"),
        ("data show listops -n 0", "at least 1"),
    ],
)
def test_a_wrong_command_is_one_line_and_makes_nothing(
    skyformer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, promised: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert promised in skyformer.refused(*words.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", ["--debug train txet", "train --debug txet", "train txet --debug", "evaluate nothing --debug"]
)
def test_debug_anywhere_on_the_line_prints_the_traceback(skyformer: CommandLine, words: str) -> None:
    outcome = skyformer(*words.split())
    assert outcome.code == 2
    assert "Traceback (most recent call last)" in outcome.errors
    assert outcome.errors.splitlines()[-1].startswith("error: ")


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command fails as if `module` were not installed."""

    def fail(arguments: list[str]) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(command, "build_app", lambda: fail)


@pytest.mark.parametrize(
    ("module", "extra"), [("typer", "train"), ("pydantic", "train"), ("lightning.pytorch", "train"), ("ray", "ray")]
)
def test_a_missing_package_is_reported_with_its_extra(
    module: str, extra: str, skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(module, monkeypatch)
    package = module.partition(".")[0]
    expected = f"error: {package!r} is not installed: {install_command(extra)}\n"
    assert skyformer.refused("train", "listops") == expected


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        ("data list", "pydantic", "lra"),
        ("study all", "pandas", "hf,train"),
        ("bench attention", "pandas", "cli"),
        ("bench steps", "pandas", "train"),
    ],
)
def test_a_command_names_the_extra_that_has_all_it_needs(
    words: str, module: str, extra: str, skyformer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(module, monkeypatch)
    assert install_command(extra) in skyformer.refused(*words.split())


def test_an_error_of_another_package_is_traced_to_the_missing_module() -> None:
    error = ModuleNotFoundError("Could not import module 'AutoModel'")
    error.__cause__ = ModuleNotFoundError("No module named 'rich'", name="rich")
    assert str(missing_extra(error)) == f"'rich' is not installed: {install_command('cli')}"


WITHOUT_TORCH = """
import importlib.abc, os, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "pandas"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from skyformer.cli.main import main
for words in sys.argv[1:]:
    complete = words.removeprefix("complete ")
    os.environ.pop("_SKYFORMER_COMPLETE", None)
    if complete != words:
        os.environ.update(_SKYFORMER_COMPLETE="complete_bash", COMP_WORDS=complete, COMP_CWORD=str(complete.count(" ")))
    sys.argv = ["skyformer", *words.split()]
    try:
        main()
    except SystemExit as exit_:
        print("exit", exit_.code or 0, flush=True)
"""


def test_help_version_and_completion_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "runs" / "text-skyformer-cpu-seed0-0123abcd").mkdir(parents=True)
    (tmp_path / "runs" / "text-skyformer-cpu-seed0-0123abcd" / "config.yaml").touch()
    commands = ["--help", "train --help", "study dimension --help", "data show -h", "--version"]
    completions = {
        "complete skyformer train te": "text",
        "complete skyformer train text --attention sky": "skyformer",
        "complete skyformer sweep --attention softmax,kern": "softmax,kernelized",
        "complete skyformer train text --preset pap": "paper",
        "complete skyformer sweep --task text,al": "text,all",
        "complete skyformer data prepare al": "all",
        "complete skyformer runs --task text,im": "text,image",
        "complete skyformer evaluate te": "text-skyformer-cpu-seed0-0123abcd",
        "complete skyformer bench attention --len": "--lengths",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands, *completions],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "SKYFORMER_RUNS": "runs"},
    )
    assert done.stderr == ""
    parts = done.stdout.split("exit 0\n")
    assert len(parts) == len(commands) + len(completions) + 1
    assert f"skyformer {skyformer_package.__version__}\n" in parts
    shown = [part.split()[0] for part in parts[len(commands) : -1]]
    assert shown == list(completions.values())


def test_a_missing_module_of_no_extra_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    without("skyformer.trainning", monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        command.main()


def test_every_module_belongs_to_an_extra_that_installs_it() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRA_OF_MODULE.items():
        if module == "pyarrow":
            continue  # installed by datasets
        names = [re.split("[<>=!]", requirement)[0] for requirement in extras[extra]]
        assert DISTRIBUTIONS.get(module, module.replace("_", "-")) in names


PARTS = """
from dataclasses import dataclass
from skyformer import Attention, register_attention

@register_attention
@dataclass(eq=False, repr=False, kw_only=True)
class Copied(Attention):
    name = "copied"

    def attend(self, inputs):
        return inputs.value
"""


@pytest.mark.parametrize("words", ["--import copied_parts {}", "{} --import=copied_parts"])
def test_a_module_of_your_own_is_imported_here_and_in_new_processes(
    skyformer: CommandLine, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copied_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(IMPORT_VARIABLE, "")
    before = dict(_ATTENTIONS._parts)
    try:
        outcome = skyformer(*words.format("train text --attention copied --show-config").split())
        assert "attention: copied" in outcome.output
        code = "import skyformer; print(skyformer.list_attentions('copied'))"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert child.stdout == "['copied']\n"
        assert _environment() == {"env_vars": {IMPORT_VARIABLE: "copied_parts"}}
    finally:
        _ATTENTIONS._parts = before
        sys.modules.pop("copied_parts", None)


def test_a_module_that_cannot_be_imported_is_one_line(skyformer: CommandLine) -> None:
    assert "--import nowhere: there is no such module" in skyformer.refused("--import", "nowhere", "runs")
    assert "--import must be followed by the name of a module" in skyformer.refused("runs", "--import")
