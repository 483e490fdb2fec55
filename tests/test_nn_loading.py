"""nn.load_multihead: the layouts of torch.nn.MultiheadAttention, and one map each."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import tokens_of, zeros

from fastattn import nn

MODULES = {
    "in-proj": {},
    "no-bias": {"bias": False},
    "other-features": {"kdim": 20, "vdim": 14},
    "other-features-no-bias": {"kdim": 20, "bias": False},
    "additions": {"add_bias_kv": True, "add_zero_attn": True},
    "additions-apart": {"add_bias_kv": True, "vdim": 14},
}


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_matches_torch(causal, options, torch, backend, rng):
    module = torch.nn.MultiheadAttention(48, 6, batch_first=True, **options)
    for parameter in module.parameters():  # biases start at 0
        torch.nn.init.normal_(parameter, std=0.2)
    prefix = "layers.0.attention."
    state = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    zero = options.get("add_zero_attn", False)
    weights = nn.load_multihead(state, 6, prefix=prefix, add_zero_attn=zero)
    x = tokens_of(rng, 3, 11, 48)
    keys = tokens_of(rng, 3, 13, options.get("kdim", 48))
    values = tokens_of(rng, 3, 13, options.get("vdim", 48))
    key_mask = np.arange(13) < np.array([[13], [4], [9]])
    visible = np.tri(11, 13, 2, dtype=bool)
    with torch.no_grad():
        theirs, _ = module(
            *(torch.from_numpy(a) for a in (x, keys, values)),
            key_padding_mask=torch.from_numpy(~key_mask),
            attn_mask=torch.from_numpy(~visible) if causal else None,
            need_weights=False,
        )
    given = {"keys": keys, "values": values, "key_mask": key_mask, "causal": causal}
    ours = nn.multihead_attention(x, weights, backend=backend, **given)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=4e-6)


def separate_maps(rng, heads_kv=3, names=("q_proj", "k_proj", "v_proj", "out_proj")):
    rows = (48, 8 * heads_kv, 8 * heads_kv, 48)
    tensors = {f"{n}.weight": tokens_of(rng, r, 48) for n, r in zip(names, rows, strict=True)}
    return tensors | {f"{n}.bias": tokens_of(rng, r) for n, r in zip(names[:3], rows, strict=False)}


def test_maps_of_one_input_are_stacked(rng):
    tensors = separate_maps(rng)
    weights = nn.load_multihead(tensors, 6, num_heads_kv=3)
    assert weights.qkv.weight.shape == (96, 48)
    assert (weights.head_dim, weights.heads_kv, weights.out.bias) == (8, 3, None)
    for name in "qkv":
        part = getattr(weights, name)
        np.testing.assert_array_equal(part.weight, tensors[f"{name}_proj.weight"])
        np.testing.assert_array_equal(part.bias, tensors[f"{name}_proj.bias"])
        assert np.shares_memory(part.weight, weights.qkv.weight)
    np.testing.assert_array_equal(weights.out.weight, tensors["out_proj.weight"])


def test_names_are_free_and_a_missing_bias_is_zero(rng):
    """As in Whisper, whose keys have none."""
    names = ("query", "key", "value", "dense")
    tensors = separate_maps(rng, heads_kv=6, names=names)
    del tensors["key.bias"]
    weights = nn.load_multihead(tensors, 6, names=names)
    np.testing.assert_array_equal(weights.k.bias, 0)
    np.testing.assert_array_equal(weights.v.bias, tensors["value.bias"])


def test_packed_layout_is_not_copied(rng):
    tensors = {"in_proj_weight": tokens_of(rng, 24, 8), "out_proj.weight": tokens_of(rng, 8, 8)}
    weights = nn.load_multihead(tensors, 2)
    assert np.shares_memory(weights.qkv.weight, tensors["in_proj_weight"])


# --- errors -------------------------------------------------------------------------------------


def load(num_heads=6, heads_kv=None, prefix="", remove="", **shapes):
    """q, k and v one by one, or what is given: "in_proj_weight" or "q_proj__weight" = shape."""
    rows = {"q_proj": 48, "k_proj": 24, "v_proj": 24, "out_proj": 48}
    tensors = {f"{name}.weight": zeros(n, 48) for name, n in rows.items()}
    tensors |= {name.replace("__", "."): zeros(*shape) for name, shape in shapes.items()}
    tensors = {f"a.{name}": array for name, array in tensors.items() if name != remove}
    return nn.load_multihead(tensors, num_heads, prefix=prefix or "a.", num_heads_kv=heads_kv)


ERRORS = {
    "missing": (
        lambda: load(remove="v_proj.weight", heads_kv=3),
        ValueError,
        "tensors must hold 'a.v_proj.weight', got a.k_proj.weight, a.out_proj.weight, a.q_proj",
    ),
    "prefix": (
        lambda: load(prefix="b."),
        ValueError,
        "tensors must hold 'b.q_proj.weight', got none of that prefix",
    ),
    "heads": (
        lambda: load(num_heads=5),
        ValueError,
        "a.q_proj.weight must have a multiple of 5 rows, for as many heads, got shape (48, 48)",
    ),
    "heads-kv": (
        lambda: load(heads_kv=2),
        ValueError,
        "a.k_proj.weight must have shape (16, any) to fit a.q_proj.weight (48, 48) and 6 heads "
        "over 2, got (24, 48)",
    ),
    "v-rows": (
        lambda: load(heads_kv=3, v_proj__weight=(25, 48)),
        ValueError,
        "a.v_proj.weight must have a multiple of 3 rows, for as many heads, got shape (25, 48)",
    ),
    "out": (
        lambda: load(heads_kv=3, out_proj__weight=(48, 47)),
        ValueError,
        "a.out_proj.weight must have shape (48, 48) to fit a.q_proj.weight (48, 48) and 6 heads, "
        "got (48, 47)",
    ),
    "bias": (
        lambda: load(heads_kv=3, v_proj__bias=(23,)),
        ValueError,
        "a.v_proj.bias must have shape (24), got (23,)",
    ),
    "in-proj": (
        lambda: load(in_proj_weight=(143, 48)),
        ValueError,
        "a.in_proj_weight must have shape (144, 48) to fit a.out_proj.weight (48, 48), got",
    ),
    "in-proj-heads": (
        lambda: load(num_heads=7, in_proj_weight=(144, 48)),
        ValueError,
        "a.out_proj.weight must have a multiple of 7 columns, for as many heads, got shape",
    ),
    "in-proj-groups": (
        lambda: load(heads_kv=3, in_proj_weight=(144, 48)),
        ValueError,
        "num_heads_kv must be num_heads = 6 for a.in_proj_weight or q_proj_weight, got 3",
    ),
    "q-proj": (
        lambda: load(q_proj_weight=(48, 47)),
        ValueError,
        "a.q_proj_weight must have shape (48, 48) to fit a.out_proj.weight (48, 48), got (48, 47)",
    ),
    "bias-k": (
        lambda: load(in_proj_weight=(144, 48), bias_k=(48,)),
        ValueError,
        "a.bias_k must have shape (1, 1, 48), got (48,)",
    ),
    "stack": (
        lambda: nn.stack_linear(nn.LinearWeights(zeros(3, 4)), nn.LinearWeights(zeros(3, 5))),
        ValueError,
        "parts[1] must have 4 in_features, as parts[0], got shape (3, 5)",
    ),
    "stack-dtype": (
        lambda: nn.stack_linear(
            nn.LinearWeights(zeros(3, 4)), nn.LinearWeights(zeros(3, 4, dtype=np.float64))
        ),
        TypeError,
        "parts[1] must have the dtype of parts[0], float32, got float64",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
