"""Errors that are torch's and fastattn's at once."""

from __future__ import annotations


class ArgumentError(ValueError, RuntimeError):
    """A shape or value that does not fit: torch raises RuntimeError, fastattn ValueError."""


class ArgumentTypeError(TypeError, ArgumentError):
    """A type or dtype that does not fit: torch raises RuntimeError for dtypes."""


def as_torch_error(error: TypeError | ValueError) -> Exception:
    """Return the error of fastattn as one that is torch's, too."""
    if isinstance(error, RuntimeError):
        return error
    kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
    return kind(*error.args)
