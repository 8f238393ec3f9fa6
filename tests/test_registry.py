"""The registry: names that are taken, unknown names, and modules that are imported at the first look-up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyformer.errors import InputError, UnknownNameError
from skyformer.registry import Registry


def test_finds_what_was_added_in_alphabetical_order() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("two", 2)
    registry.add("one", 1)
    assert registry.names() == ["one", "two"]
    assert registry.get("two") == 2


def test_unknown_names_list_the_known_ones() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("two", 2)
    for name in ("tow", 2, None, ["two"]):
        with pytest.raises(UnknownNameError, match=r"unknown number .*; known: two"):
            registry.get(name)


def test_refuses_a_name_that_is_taken() -> None:
    registry: Registry[type] = Registry("part")

    @registry.register
    class First:
        name = "first"

    with pytest.raises(InputError, match=r"the part name 'first' is taken by .*First"):
        registry.add("first", int)
    assert registry.get("first") is First


def test_imports_the_modules_of_its_package_at_the_first_look_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from skyformer.registry import Registry\nparts = Registry('part', __name__, {'broken'})\n"
    )
    (folder / "useful.py").write_text("from some_parts import parts\nparts.add('useful', 1)\n")
    (folder / "broken.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    import some_parts

    assert "some_parts.useful" not in sys.modules
    assert some_parts.parts.names() == ["useful"]
