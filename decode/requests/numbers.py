"""Numbers in settings. Those of Python, numpy and torch are alike; a bool is no number."""

from __future__ import annotations

from collections.abc import Sequence, Set
from numbers import Integral, Real
from typing import Any


def as_whole(value: Any) -> int | None:
    """A whole number as an int, whether it is Python's, numpy's or a tensor's. None for anything else and for bools."""
    if type(value) is int:
        return value
    value = _as_python(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def check_switches(**switches: Any) -> None:
    """Raise TypeError for a setting that is neither True nor False: "no" would count as true."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it is True or False")


def read_whole(value: Any, name: str, least: int | None = None) -> int:
    """A whole number. Raises TypeError or ValueError, with the setting's name, for anything else, and below `least`."""
    number = as_whole(value)
    if number is None:
        from_where = "" if least is None else f" from {least} on"
        raise TypeError(f"{name} is {_show(value)}; it must be a whole number{from_where}")
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def read_count(value: Any, name: str) -> int:
    """A whole number from 1 on. Errors: those of `read_whole`."""
    return read_whole(value, name, 1)


def read_number(value: Any, name: str) -> float:
    """A number as a float. Raises TypeError, with the setting's name, for anything else."""
    number = _as_python(value)
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"{name} is {_show(value)}; it must be a number")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} is {_show(value)}; it is too large") from None


def as_whole_numbers(values: Any, name: str) -> list[int]:
    """Whole numbers as a list, from one of them or a list, set, tensor or array. Raises TypeError for anything else."""
    values = [values] if as_whole(values) is not None else values
    values = [*values] if isinstance(values, Set) else as_items(values, f"{name} are a list of whole numbers")
    numbers = [as_whole(value) for value in values]
    if None in numbers:
        raise TypeError(f"{name} are whole numbers, not {describe(values[numbers.index(None)])}")
    return numbers  # type: ignore[return-value]


def as_items(values: Any, expected: str) -> list[Any]:
    """A sequence, tensor or array as a list. Raises TypeError for anything else, text and bytes included."""
    if not isinstance(values, str | bytes | bytearray | memoryview):
        if isinstance(values, Sequence):
            return [*values]
        if getattr(values, "ndim", 0) and hasattr(values, "tolist"):
            return values.tolist()
    raise TypeError(f"{expected}, not {describe(values)}")


def describe(value: Any) -> str:
    """A value and its type, in one short line."""
    return f"{_show(value)} ({type(value).__name__})"


def _show(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_python(value: Any) -> Any:
    """What a tensor or an array without dimensions, or a number of numpy's, holds; other values as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
