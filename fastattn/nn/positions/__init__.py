"""Positional encodings: what is added to tokens, turned in queries and keys, or added to scores."""

from .rope import Rope
from .rotary import Rotation, apply_rotary
from .scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    YarnScaling,
)

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NoScaling",
    "Rope",
    "Rotation",
    "YarnScaling",
    "apply_rotary",
]
