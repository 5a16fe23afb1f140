"""Frozen dataclasses to JSON and back, strictly.

A file that holds an unknown key, lacks a key or carries a value of the wrong type is refused with
the place named (`plan.json: token.scope: ...`), because a key that is silently dropped is a plan
that is silently not the one which was asked for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from allocmoe.errors import AllocMoEError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Plain JSON data of a dataclass, tuple, dict or scalar."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], data: Any, where: str) -> T:
    """The dataclass `kind` from JSON data; `where` names the place in error messages."""
    if not isinstance(data, dict):
        raise AllocMoEError(f"{where}: expected an object, found {_name(data)}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise AllocMoEError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(fields)}")
    missing = [name for name in fields if name not in data]
    if missing:
        raise AllocMoEError(f"{where}: the key {missing[0]!r} is missing")
    values = {name: _decode(hints[name], data[name], f"{where}: {name}") for name in fields}
    try:
        return kind(**values)
    except (AllocMoEError, OverflowError) as error:
        raise AllocMoEError(f"{where}: {error}") from None


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        rest = [arg for arg in args if arg is not type(None)]
        return _decode(rest[0], value, where)
    if origin is typing.Literal:
        if value not in args:
            raise AllocMoEError(f"{where}: {value!r} is not one of {', '.join(map(str, args))}")
        return value
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(Any, hint), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise AllocMoEError(f"{where}: expected a list, found {_name(value)}")
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise AllocMoEError(f"{where}: expected an object, found {_name(value)}")
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    # bool is an int to Python, not to a reader of the file
    right = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if hint is float:
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        if right and not -sys.float_info.max <= value <= sys.float_info.max:
            raise AllocMoEError(f"{where}: {str(value)[:40]} is not a finite number")
    if not right:
        raise AllocMoEError(f"{where}: expected {hint.__name__}, found {_name(value)}")
    return float(value) if hint is float else value


def _name(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def read_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AllocMoEError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise AllocMoEError(f"{path}: cannot be read: {error}") from None
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise AllocMoEError(
            f"{path}: not JSON, or cut off (line {error.lineno}, column {error.colno}: {error.msg})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise AllocMoEError(f"{path}: not an artefact: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def check_writable(path: Path) -> None:
    """Fail now rather than after hours of work; leaves nothing behind."""
    if path.is_dir():
        raise AllocMoEError(f"{path}: cannot be written: it is a folder")
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AllocMoEError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_json(path: Path, data: Any) -> None:
    """Write atomically: readers see the old file or the new one, never half of one."""
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    try:
        data = text.encode("utf-8")
    except UnicodeError as error:
        raise AllocMoEError(f"{path}: cannot be written: {error}") from None
    write_bytes(path, data)


def write_bytes(path: Path, data: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise AllocMoEError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
