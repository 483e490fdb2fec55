"""RoPE as the config.json of a model of the Hugging Face hub describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .rope import Rope
from .scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)


def rope_from_config(config: Mapping[str, Any], *, interleaved: bool = False) -> Rope:
    """Return the Rope of a model's configuration.

    Parameters
    ----------
    config : mapping
        What config.json holds: head_dim, or hidden_size and num_attention_heads; rope_theta,
        partial_rotary_factor and the parameters of scaling, in rope_parameters, in rope_scaling or
        beside them. For models whose layers differ, the part of one kind of layer.
    interleaved : bool. As in Rope: no configuration says it. False for Llama and most others.

    Returns
    -------
    Rope

    Raises
    ------
    ValueError  an unknown rope_type, or one whose parameters are missing
    """
    reader = _Parameters(config)
    kind = reader.find("rope_type", reader.find("type", "default"))
    if kind not in SCALINGS:
        raise ValueError(f"rope_type must be one of {tuple(SCALINGS)}, got {kind!r}")
    head_dim = reader.find("head_dim", None)
    if head_dim is None:
        head_dim = reader.need("hidden_size") // reader.need("num_attention_heads")
    share = 1.0 if kind == "proportional" else reader.find("partial_rotary_factor", 1.0)
    return Rope(
        rotary_dim=int(head_dim * share),
        base=reader.find("rope_theta", 10000.0),
        interleaved=interleaved,
        scaling=SCALINGS[kind](reader),
    )


class _Parameters:
    """A configuration whose parameters of RoPE may be nested, or not."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
        # None stands for a parameter that is not given.
        self.values = {k: v for k, v in {**config, **nested}.items() if v is not None}

    def find(self, name: str, default: Any) -> Any:
        return self.values.get(name, default)

    def need(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f"config must hold {name!r}, which its RoPE needs, got none")
        return self.values[name]

    @property
    def trained(self) -> int:
        """Tokens of the texts that the model was first trained on."""
        return self.find("original_max_position_embeddings", None) or self.need(
            "max_position_embeddings"
        )

    @property
    def stretch(self) -> float:
        """How much longer texts may be."""
        return self.find("factor", None) or self.need("max_position_embeddings") / self.trained


def _yarn(of: _Parameters) -> Scaling:
    return YarnScaling(
        factor=of.stretch,
        original_positions=of.trained,
        beta_fast=of.find("beta_fast", 32.0),
        beta_slow=of.find("beta_slow", 1.0),
        truncate=of.find("truncate", True),
        mscale=of.find("mscale", None),
        mscale_all_dim=of.find("mscale_all_dim", None),
        factor_of_attention=of.find("attention_factor", None),
    )


def _longrope(of: _Parameters) -> Scaling:
    return LongRopeScaling(
        short_factor=of.need("short_factor"),
        long_factor=of.need("long_factor"),
        original_positions=of.trained,
        factor=of.stretch,
        factor_of_attention=of.find("attention_factor", None),
    )


def _llama3(of: _Parameters) -> Scaling:
    return Llama3Scaling(
        factor=of.need("factor"),
        low_freq_factor=of.need("low_freq_factor"),
        high_freq_factor=of.need("high_freq_factor"),
        original_positions=of.trained,
    )


SCALINGS: dict[str, Callable[[_Parameters], Scaling]] = {
    "default": lambda of: NoScaling(),
    "linear": lambda of: LinearScaling(of.need("factor")),
    "dynamic": lambda of: DynamicScaling(of.need("factor"), of.need("max_position_embeddings")),
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": lambda of: ProportionalScaling(
        of.find("partial_rotary_factor", 1.0), of.find("factor", 1.0)
    ),
}
