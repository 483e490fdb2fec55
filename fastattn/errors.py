"""Errors of the faces of libraries that raise RuntimeError where fastattn raises ValueError."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class ArgumentError(ValueError, RuntimeError):
    """A shape or value that does not fit."""


class ArgumentTypeError(TypeError, ArgumentError):
    """A type or dtype that does not fit."""


def as_argument_error(error: TypeError | ValueError, **names: str) -> Exception:
    """Return the error as one that `except RuntimeError` catches too. `names` are what a face calls
    the arguments of the core, with which messages begin.
    """
    if isinstance(error, RuntimeError):
        return error
    kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return kind(*error.args)
    first, space, rest = error.args[0].partition(" ")
    return kind(names.get(first, first) + space + rest)


def raising_argument_errors(**names: str) -> Callable[[Function], Function]:
    """Decorator: the errors of the function, as as_argument_error() makes them."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            try:
                return function(*args, **keywords)
            except (TypeError, ValueError) as error:
                raise as_argument_error(error, **names) from None

        return call  # type: ignore[return-value]

    return decorate
