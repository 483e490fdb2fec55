"""The scalings of RoPE and their configurations, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn.nn import positions
from fastattn.nn.positions import Rope, rope_from_config

LONG = tuple(np.linspace(1, 30, 16).tolist())
SHORT = tuple(np.linspace(1, 1.5, 16).tolist())
# ours, theirs, lengths of text
SCALINGS = {
    "none": (positions.NoScaling(), {"rope_type": "default"}, [10]),
    "linear": (
        positions.LinearScaling(4.0),
        {"rope_type": "linear", "factor": 4.0},
        [10],
    ),
    "proportional": (
        positions.ProportionalScaling(0.3, 2.0),
        {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
        [10],
    ),
    "dynamic": (
        positions.DynamicScaling(2.5, 4096),
        {"rope_type": "dynamic", "factor": 2.5},
        [10, 4096, 4097, 10000],
    ),
    "yarn": (
        positions.YarnScaling(8.0, 2048),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048},
        [10],
    ),
    "yarn-ratio": (
        positions.YarnScaling(40.0, 512, mscale=1.0, mscale_all_dim=0.7, beta_fast=24.0),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 24.0,
        },
        [10],
    ),
    "yarn-given": (
        positions.YarnScaling(4.0, 1024, truncate=False, factor_of_attention=1.7, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "truncate": False,
            "attention_factor": 1.7,
            "beta_slow": 2.0,
        },
        [10],
    ),
    "llama3": (
        positions.Llama3Scaling(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        [10],
    ),
    "longrope": (
        positions.LongRopeScaling(SHORT, LONG, 2048, 2.0),
        {
            "rope_type": "longrope",
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
        },
        [10, 2048, 2049],
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_scaling_matches_transformers(name, base):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = pytest.importorskip("transformers.modeling_rope_utils")
    scaling, parameters, lengths = SCALINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={**parameters, "rope_theta": base},
    )
    rope = Rope(32, base=base, scaling=scaling)
    for seqlen in lengths:
        if name == "none":
            frequencies, factor = 1 / base ** (np.arange(0, 32, 2) / 32), 1.0
        else:
            init = theirs.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            frequencies, factor = init(config, "cpu", seq_len=seqlen)
            frequencies = frequencies.numpy()
        np.testing.assert_allclose(rope.frequencies(seqlen), frequencies, rtol=2e-6)
        assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)
        assert positions.rope_from_config(config.to_dict()) == rope
        rotation = rope.rotation([seqlen - 1], dtype=float)
        np.testing.assert_allclose(rotation.cos**2 + rotation.sin**2, factor**2, rtol=1e-12)


OLD_CONFIG = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}


def test_configurations_of_older_models():
    """Parameters beside the others, under another name, or not there."""
    assert rope_from_config(OLD_CONFIG) == Rope(32)
    config = {**OLD_CONFIG, "head_dim": 16, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert rope_from_config(config, interleaved=True) == Rope(8, 5e5, interleaved=True)
    config = {**OLD_CONFIG, "rope_scaling": {"type": "linear", "factor": 3.0}}
    assert rope_from_config(config) == Rope(32, scaling=positions.LinearScaling(3.0))
    scaling = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    config = {**OLD_CONFIG, "rope_scaling": scaling, "original_max_position_embeddings": 1024}
    ours = rope_from_config(config).scaling
    assert ours == positions.LongRopeScaling(SHORT, LONG, 1024, 4.0)


def test_a_share_of_pairs_is_not_a_smaller_width():
    """Partial rotation turns features 0 to r, proportional the first pairs of all."""
    x = np.ones((1, 16), np.float32)
    partial = Rope(8).rotation([3]).apply(x)
    share = Rope(16, scaling=positions.ProportionalScaling(0.5)).rotation([3]).apply(x)
    np.testing.assert_array_equal(np.flatnonzero(partial[0] != 1), np.arange(8))
    np.testing.assert_array_equal(np.flatnonzero(share[0] != 1), [0, 1, 2, 3, 8, 9, 10, 11])


ERRORS = {
    "factor": (
        lambda: positions.LinearScaling(0.0),
        ValueError,
        "factor must be positive and finite, got 0.0",
    ),
    "dynamic-pairs": (
        lambda: Rope(2, scaling=positions.DynamicScaling(2.0, 10)).rotation([1]),
        ValueError,
        "rotary_dim must be at least 4 to be scaled, got 2",
    ),
    "long-factor": (
        lambda: Rope(8, scaling=positions.LongRopeScaling([1] * 4, [1] * 3, 9, 2)).rotation([9]),
        ValueError,
        "long_factor must have rotary_dim / 2 = 4 elements, got 3",
    ),
    "llama3": (
        lambda: positions.Llama3Scaling(8.0, 4.0, 4.0, 100),
        ValueError,
        "high_freq_factor must be more than low_freq_factor, 4.0, got 4.0",
    ),
    "share": (
        lambda: positions.ProportionalScaling(1.5),
        ValueError,
        "share must lie from 0 to 1, got 1.5",
    ),
    "config-type": (
        lambda: rope_from_config({"rope_scaling": {"type": "su"}}),
        ValueError,
        "rope_type must be one of ('default', 'linear', 'dynamic', 'yarn', 'llama3', 'longrope', "
        "'proportional'), got 'su'",
    ),
    "config-size": (
        lambda: rope_from_config({"hidden_size": 8}),
        ValueError,
        "config must hold 'num_attention_heads', which its RoPE needs, got none",
    ),
    "config-factor": (
        lambda: rope_from_config({"head_dim": 8, "rope_scaling": {"type": "linear"}}),
        ValueError,
        "config must hold 'factor', which its RoPE needs, got none",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
