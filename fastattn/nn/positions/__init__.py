"""Positional encodings: what is added to tokens, turned in queries and keys, or added to scores.

added to tokens        sinusoidal, learned
queries and keys       Rope with its scalings, rope_from_config, xpos_rotations: `rotary` of
                       nn.multihead_attention
added to scores        alibi_slopes, t5_arguments: arguments of attention and multihead_attention
in place of attention  shaw_attention, transformer_xl_attention
"""

from .absolute import learned, sinusoidal
from .biases import alibi_slopes, t5_arguments
from .config import rope_from_config
from .rope import Rope
from .rotary import Rotation, apply_rotary
from .scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    ProportionalScaling,
    YarnScaling,
)
from .shaw import shaw_attention
from .transformer_xl import transformer_xl_attention
from .xpos import xpos_rotations

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NoScaling",
    "ProportionalScaling",
    "Rope",
    "Rotation",
    "YarnScaling",
    "alibi_slopes",
    "apply_rotary",
    "learned",
    "rope_from_config",
    "shaw_attention",
    "sinusoidal",
    "t5_arguments",
    "transformer_xl_attention",
    "xpos_rotations",
]
