"""Parts known by name: the one registry behind attentions, kernels, samplers, solvers and studies.

Attentions, kernels and samplers may also come from outside the package: from a module that is imported, from one that
the environment variable SKYFORMER_IMPORT names (which `skyformer --import MODULE` sets, and processes inherit), and
from the entry points of installed packages. These are loaded at the first look-up.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from skyformer.errors import InputError, MissingExtraError, PluginWarning, ReplacedWarning, UnknownNameError

T = TypeVar("T")
Class = TypeVar("Class", bound=type)

IMPORT_VARIABLE = "SKYFORMER_IMPORT"
"""Names of modules, separated by commas, that register parts when they are imported."""


class Registry(Generic[T]):
    """Parts of one kind by name.

    Args:
        what: what a part is called in error messages, such as "attention".
        package: a package whose modules register their parts when they are imported; they are imported at the first
            look-up, so that importing the package itself stays quick.
        skip: names of modules in `package` that register nothing.
        base: the class that registered classes must inherit.
        make: what is stored of a registered class; by default the class itself.
        entry_points: the group of entry points of other packages that have such parts; None if they cannot have any.
    """

    def __init__(
        self,
        what: str,
        package: str | None = None,
        skip: Iterable[str] = (),
        *,
        base: type | None = None,
        make: Callable[[Any], T] | None = None,
        entry_points: str | None = None,
    ) -> None:
        self.what, self.base, self.make, self.entry_points = what, base, make, entry_points
        self._package, self._skip = package, frozenset(skip)
        self._parts: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, part: T) -> None:
        """Make `part` known as `name`.

        A name that is taken is an error, except that a class which is defined again, as in a notebook, replaces itself
        with a `ReplacedWarning`.
        """
        if not _is_ours(part):
            self._load()
        known = self._parts.get(name)
        made_again = self.make is not None and not isinstance(part, type) and type(known) is type(part)
        if known is not None and known != part and not made_again:
            if _is_ours(known) or _definition(known) != _definition(part):
                raise InputError(f"the {self.what} name {name!r} is taken by {known!r}; choose another name")
            warnings.warn(
                f"the {self.what} {name!r} is defined again; what is built from now on uses the new definition",
                ReplacedWarning,
                stacklevel=3,
            )
        self._parts[name] = part

    def register(self, cls: Class) -> Class:
        """Class decorator: makes a class known by its `name`."""
        self.check_class(cls)
        try:
            part: Any = cls if self.make is None else self.make(cls)
        except TypeError as failed:
            raise InputError(f"{cls.__name__} cannot be made with its default settings: {failed}") from failed
        self.add(cls.name, part)  # type: ignore[attr-defined]
        return cls

    def check_class(self, cls: type) -> None:
        """`cls` can be registered: it inherits the base class, has all its methods, and has a name."""
        base = self.base
        if not isinstance(cls, type) or (base is not None and not issubclass(cls, base)):
            expected = base.__name__ if base is not None else "a class"
            raise InputError(f"a registered {self.what} must be a class that inherits {expected}; got {cls!r}")
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise InputError(
                f"{cls.__name__} must have a class attribute `name`, by which the {self.what} is known; got {name!r}. "
                f'Write name = "..." in the class'
            )
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise InputError(f"{cls.__name__} must define {' and '.join(missing)} before it is registered")

    def names(self) -> list[str]:
        """The known names, in alphabetical order."""
        self._load()
        return sorted(self._parts)

    def get(self, name: object) -> T:
        """The part known as `name`; an unknown name is an error that lists the known ones."""
        # Nothing from outside may take a name that is known, and torch.compile cannot trace the search for it.
        if not isinstance(name, str) or name not in self._parts:
            self._load()
        if not isinstance(name, str) or name not in self._parts:
            advice = f"Your own are known once their module is imported: skyformer --import MODULE, {IMPORT_VARIABLE}"
            raise UnknownNameError(self.what, name, self._parts, advice=advice if self.entry_points else "")
        return self._parts[name]

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        try:
            if self._package is not None:
                for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
                    if module.name not in self._skip:
                        importlib.import_module(f"{self._package}.{module.name}")
            if self.entry_points is not None:
                import_chosen_modules()
                self._load_entry_points(self.entry_points)
        except BaseException:
            # The next look-up raises the same error again instead of knowing only some of the parts.
            self._loaded = False
            raise

    def _load_entry_points(self, group: str) -> None:
        """A package that is broken must not stop the use of all others, so it is a warning."""
        for point in metadata.entry_points(group=group):
            try:
                loaded = point.load()
                if inspect.isclass(loaded) and not self._knows(loaded):
                    self.register(loaded)
            except Exception as broken:
                owner = point.dist.name if point.dist is not None else "an installed package"
                warnings.warn(
                    f"the {self.what} {point.name!r} of {owner} cannot be used: {point.value} raises "
                    f"{type(broken).__name__}: {broken}",
                    PluginWarning,
                    stacklevel=4,
                )

    def _knows(self, cls: type) -> bool:
        """Whether importing its module has registered the class."""
        return any(_owner(part) is cls for part in self._parts.values())


def import_chosen_modules() -> None:
    """Import the modules that SKYFORMER_IMPORT names."""
    for name in os.environ.get(IMPORT_VARIABLE, "").split(","):
        if name.strip():
            import_parts(name.strip())


def import_parts(module: str) -> None:
    """Import a module that registers parts; the current folder counts as a place of modules."""
    if module.endswith(".py") or os.sep in module:
        raise InputError(
            f"--import takes the name of a module, such as {Path(module).stem}, not of a file; got {module!r}"
        )
    if module.partition(".")[0] not in sys.modules and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        importlib.import_module(module)
    except MissingExtraError:
        raise
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
            raise InputError(f"--import {module}: it imports {missing.name!r}, which is not installed") from missing
        raise InputError(
            f"--import {module}: there is no such module; install it, or run the command in the folder that has it"
        ) from missing
    except (InputError, SyntaxError, ImportError, AttributeError, NameError, TypeError, ValueError) as failed:
        raise InputError(f"--import {module}: importing it raises {type(failed).__name__}: {failed}") from failed


def choose_modules(modules: Iterable[str]) -> None:
    """Import modules that register parts, here and in all processes that this one starts."""
    chosen = [name for name in os.environ.get(IMPORT_VARIABLE, "").split(",") if name]
    for module in modules:
        import_parts(module)
        chosen.append(module)
    os.environ[IMPORT_VARIABLE] = ",".join(dict.fromkeys(chosen))


def _owner(part: object) -> type:
    return part if isinstance(part, type) else type(part)


def _is_ours(part: object) -> bool:
    """Whether a part is defined in this package."""
    return _owner(part).__module__.partition(".")[0] == __package__


def _definition(part: object) -> tuple[str, str]:
    return _owner(part).__module__, _owner(part).__qualname__
