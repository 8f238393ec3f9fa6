"""YAML as configs use it: no aliases, no duplicate types of names, and 3e-4 is a number."""

from __future__ import annotations

import re
from typing import Any

from skyformer.errors import InputError, MissingExtraError

try:
    import yaml
except ImportError as missing:
    raise MissingExtraError("yaml", "train") from missing


class _Loader(yaml.SafeLoader):
    """Plain data under names, no aliases (a few of them can describe gigabytes), and 3e-4 is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        for name in mapping:
            if not isinstance(name, str):
                raise yaml.YAMLError(f"a name must be a word; got {name!r}")
        return mapping


# YAML 1.1 takes 3e-4 for a word, because there is no dot in it.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, everything else in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def parse_yaml(text: str, what: str) -> Any:
    """The data that `text` describes; `what` names it in errors."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as invalid:
        place = getattr(invalid, "problem_mark", None)
        where = f" in line {place.line + 1}" if place else ""
        raise InputError(f"{what} is not valid YAML{where}: {getattr(invalid, 'problem', invalid)}") from None


def dump_yaml(data: Any) -> str:
    """Data as YAML that a person can read and change."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=100)
