"""What the modules of the patch share: their error, and tables of TOML that are read into dataclasses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pyharness.base import errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MARK = "ggml-flash-attn-back"
"""Of what the patch puts into a tree."""

T = TypeVar("T")


class TreeError(errors.Environment):
    """A tree could not be fetched, patched or restored; says why and what to do. Nothing was changed."""


@contextlib.contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Makes an OSError a TreeError that starts with `what`."""
    try:
        yield
    except OSError as error:
        raise TreeError(f"{what}: {error}") from error


def toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file. TreeError."""
    with os_errors(f"cannot read {file}"):
        data = file.read_bytes()
    try:
        found: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise TreeError(f"{file} is not TOML: {error}; restore it, as with git checkout") from error
    return found


def table(value: Any) -> dict[str, Any]:
    """The value, or where it is no table one with a key that `entry` refuses."""
    return value if isinstance(value, dict) else {"": value}


_TYPES = {"str": str, "bool": bool, "list[str]": list}


def entry(kind: Callable[..., T], values: dict[str, Any], where: str) -> T:
    """A dataclass of a TOML table, whose values have the types of its fields. TreeError."""
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    known = {name: type_ for name, type_ in known.items() if type_ in _TYPES}
    for name, value in values.items():
        if name not in known:
            raise TreeError(f"{where}: unknown key {name!r}; keys: {', '.join(known)}")
        if type(value) is not _TYPES[known[name]] or (
            isinstance(value, list) and not all(type(v) is str for v in value)
        ):
            raise TreeError(f"{where}: {name} is {value!r}, expected {known[name]}")
    try:
        return kind(**values)
    except TypeError as error:
        raise TreeError(f"{where}: {str(error).partition(' ')[2]}") from error
