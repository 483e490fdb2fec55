"""The oracle, which comes with the package, under a short name."""

from fastattn.verifying.oracle import *  # noqa: F403
