"""Parts known by name: the one registry behind attentions, kernels, samplers, solvers and studies."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Generic, TypeVar

from skyformer.errors import InputError, UnknownNameError

T = TypeVar("T")
Class = TypeVar("Class", bound=type)


class Registry(Generic[T]):
    """Parts of one kind by name.

    Args:
        what: what a part is called in error messages, such as "attention".
        package: a package whose modules register their parts when they are imported; they are imported at the first
            look-up, so that importing the package itself stays quick.
        skip: names of modules in `package` that register nothing.
    """

    def __init__(self, what: str, package: str | None = None, skip: Iterable[str] = ()) -> None:
        self.what = what
        self._package, self._skip = package, frozenset(skip)
        self._parts: dict[str, T] = {}

    def add(self, name: str, part: T) -> None:
        """Make `part` known as `name`; a name that is taken is an error."""
        if name in self._parts:
            raise InputError(f"the {self.what} name {name!r} is taken by {self._parts[name]!r}; choose another name")
        self._parts[name] = part

    def register(self, cls: Class) -> Class:
        """Class decorator: makes a class known by its `name`."""
        self.add(cls.name, cls)  # type: ignore[attr-defined, arg-type]
        return cls

    def names(self) -> list[str]:
        """The known names, in alphabetical order."""
        self._import_modules()
        return sorted(self._parts)

    def get(self, name: object) -> T:
        """The part known as `name`; an unknown name is an error that lists the known ones."""
        self._import_modules()
        if not isinstance(name, str) or name not in self._parts:
            raise UnknownNameError(self.what, name, self._parts)
        return self._parts[name]

    def _import_modules(self) -> None:
        if self._package is not None:
            package, self._package = self._package, None
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                if module.name not in self._skip:
                    importlib.import_module(f"{package}.{module.name}")
