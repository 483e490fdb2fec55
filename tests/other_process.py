"""Tests that run in a process of their own kind: JAX has threads, and other tests fork."""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, signature


def with_jax(test):
    """Decorator: the test runs in the process of the fixture jax_process, its parameters there."""

    def call(jax_process, **values):
        jax_process.submit(_run, test.__module__, test.__name__, values).result()

    own = signature(test)
    process = Parameter("jax_process", Parameter.KEYWORD_ONLY)
    call.__signature__ = own.replace(parameters=[*own.parameters.values(), process])
    call.__name__, call.__doc__, call.__module__ = test.__name__, test.__doc__, test.__module__
    call.there = test
    return call


def _run(module, name, values):
    getattr(import_module(module), name).there(**values)


def set_up_jax():
    """What that process does first."""
    import warnings

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("error")
