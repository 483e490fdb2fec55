"""Functions that pass keywords on: what completion shows of them, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def passing_keywords_to(
    function: Callable[..., Any], *without: str
) -> Callable[[Function], Function]:
    """Decorator: the **arguments are the keywords of `function`, but `without`.

    They become part of the signature, and a keyword outside it is a TypeError that names the
    decorated function, not the one that would have got it.
    """
    passed = [
        parameter
        for parameter in signature(function).parameters.values()
        if parameter.kind is Parameter.KEYWORD_ONLY and parameter.name not in without
    ]

    def decorate(own: Function) -> Function:
        given = signature(own)
        kept = [p for p in given.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in kept}
        shown = given.replace(parameters=[*kept, *(p for p in passed if p.name not in names)])

        @wraps(own)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in shown.parameters:
                    message = f"{own.__name__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(message)
            return own(*args, **keywords)

        call.__signature__ = shown  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate
