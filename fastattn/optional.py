"""Packages that only parts of this one need: how their absence is said."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


def missing(user: str, package: str, install: str) -> ImportError:
    """Return the error that says what needs `package`, and the words after `pip install`."""
    return ImportError(f"{user} needs {package}, which is not installed: pip install {install}")


def pyplot(user: str) -> Any:
    """Return matplotlib.pyplot, or raise what missing() says."""
    try:
        import matplotlib.pyplot
    except ImportError as error:
        raise missing(user, "matplotlib", "matplotlib") from error
    return matplotlib.pyplot


@cache
def bfloat16() -> np.dtype:
    """The dtype. Raises ImportError where ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise missing("bfloat16", "ml_dtypes", "ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)
