"""YAML of settings: plain values, and no key that stands twice."""

import pathlib
from collections.abc import Mapping
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Makes only plain values, and refuses a key that stands twice, of which PyYAML would take the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key.value, str) and lines.setdefault((key.tag, key.value), line) != line:
                raise ValueError(f"expected keys once, got {key.value!r} in lines {lines[key.tag, key.value]} and {line}")
        return super().construct_mapping(node, deep)


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; other files, and keys that stand twice, are refused by a ``ValueError``."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader)  # a SafeLoader too
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings by name, got {type(values).__name__}")
    return values


def write_yaml(values: Mapping[str, Any]) -> str:
    """Write values by name as the text of a YAML file, in their order."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
