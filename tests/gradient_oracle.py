"""The oracle of gradients, which comes with the package, under a short name."""

from fastattn.verifying.gradient_oracle import *  # noqa: F403
