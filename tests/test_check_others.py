"""The rules of the other public functions."""

from __future__ import annotations

import inspect
import re
from functools import partial

import numpy as np
import pytest
from rules import FLOAT, WINDOW, masked, ones, packed, rule_id

import fastattn

TORCH_RULES = [
    ({"query": ones(4, 7, 8, dtype=int)}, TypeError, f"query must be {FLOAT}, got int64"),
    ({"value": ones(8)}, ValueError, "value must have rank 2 or more, got shape (8,)"),
    ({"key": masked(4, 5, 8)}, TypeError, "key must be a plain array, got a masked array"),
    (
        {"key": ones(2, 5, 8), "value": ones(2, 5, 8)},
        ValueError,
        "query, key and value must have the same heads, or 1, unless enable_gqa is True, got 4, 2",
    ),
    (
        {"key": ones(3, 5, 8), "value": ones(3, 5, 8), "enable_gqa": True},
        ValueError,
        "query heads must be a multiple of key heads, got 4 and 3",
    ),
    (
        {"key": ones(2, 5, 8), "value": ones(1, 5, 8), "enable_gqa": True},
        ValueError,
        "key and value must have the same heads, got (2, 5, 8) and (1, 5, 8)",
    ),
    ({"value": ones(4, 6, 8)}, ValueError, "key and value must have the same seqlen_k, got (4, 5"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    (
        {"is_causal": True, "attn_mask": ones(7, 5)},
        ValueError,
        "attn_mask must be None if is_causal is True, got both",
    ),
    (
        {"attn_mask": ones(7, 5, dtype=float)},
        TypeError,
        "attn_mask must be bool, float32 or of the dtype of query (float32), got float64",
    ),
    ({"attn_mask": ones(7, 5, dtype="f2")}, TypeError, "attn_mask must be bool, float32 or of th"),
    ({"attn_mask": ones(7, 5, dtype=int)}, TypeError, "attn_mask must be bool, float32 or of the"),
    ({"attn_mask": ones(6, 5)}, ValueError, "attn_mask must broadcast to the scores (4, 7, 5), g"),
    ({"attn_mask": ones(2, 4, 7, 5) > 0}, ValueError, "attn_mask must broadcast to the scores (4"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p must be between 0 and 1, got nan"),
    ({"scale": float("inf")}, ValueError, "scale must be finite in float32, got inf"),
]


@pytest.mark.parametrize(("change", "error", "message"), TORCH_RULES, ids=rule_id)
def test_torch_rule(change, error, message):
    arguments = {"query": ones(4, 7, 8), "key": ones(4, 5, 8), "value": ones(4, 5, 8)}
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.scaled_dot_product_attention(**arguments | change)


def test_torch_takes_six_positional_arguments():
    with pytest.raises(TypeError, match="positional"):
        fastattn.scaled_dot_product_attention(*[ones(3, 2)] * 3, None, 0.0, False, 1.0)


PACKED_RULES = [
    ({"q": ones(7, 8)}, ValueError, "q must have shape (tokens, heads, dim), got (7, 8)"),
    ({"v": ones(1, 5, 2, 6)}, ValueError, "v must have shape (tokens, heads, dim), got (1, 5, 2, "),
    ({"k": ones(5, 3, 8), "v": ones(5, 3, 6)}, ValueError, "q heads must be a multiple of k heads"),
    ({"cu_seqlens_q": [0.0, 7.0]}, TypeError, "cu_seqlens_q must be an array of ints, got float64"),
    (
        {"cu_seqlens_q": [1, 3, 7]},
        ValueError,
        "cu_seqlens_q must have one axis and start at 0, got",
    ),
    ({"cu_seqlens_q": [[0, 7]]}, ValueError, "cu_seqlens_q must have one axis and start at 0, got"),
    (
        {"cu_seqlens_q": np.zeros(0, int)},
        ValueError,
        "cu_seqlens_q must have one axis and start at",
    ),
    ({"cu_seqlens_q": 0}, ValueError, "cu_seqlens_q must have one axis and start at 0, got 0"),
    ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q must have one axis and start at 0, got []"),
    (
        {"cu_seqlens_k": [0, 5, 10**30]},
        ValueError,
        f"cu_seqlens_k must end at the number of tokens, 5, got {10**30}",
    ),
    ({"cu_seqlens_k": [0, 6, 5]}, ValueError, "cu_seqlens_k must not decrease, got 6 before 5"),
    (
        {"cu_seqlens_k": np.array([0, 6, 5], np.uint32)},
        ValueError,
        "cu_seqlens_k must not decrease, got 6 before 5",
    ),
    (
        {"cu_seqlens_q": [0, 3, 6]},
        ValueError,
        "cu_seqlens_q must end at the number of tokens, 7, got 6",
    ),
    (
        {"cu_seqlens_k": [0, 5, 8]},
        ValueError,
        "cu_seqlens_k must end at the number of tokens, 5, got 8",
    ),
    (
        {"cu_seqlens_q": [0, 7]},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must have the same length, got 2 and 3",
    ),
    ({"kv_len": [5, 1]}, ValueError, "kv_len must lie between 0 and 0, got 1"),
    (
        {"align": [0, 1, 2]},
        ValueError,
        "align must be an int or broadcast to the leading dimension",
    ),
    ({"alibi": ones(3, 4)}, ValueError, "alibi must have shape (4,) or (2, 4), got (3, 4)"),
    ({"window": (-1, 0)}, ValueError, WINDOW + " (no limit), got (-1, 0)"),
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"out": ones(4, 7, 6)}, ValueError, "out must have shape (7, 4, 6), got (4, 7, 6)"),
    (
        {"backend": "gpu"},
        ValueError,
        "backend must be one of ('auto', 'numpy', 'cpu', 'cuda'), got 'gpu'",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), PACKED_RULES, ids=rule_id)
def test_packed_rule(change, error, message):
    arguments = packed() | change
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.attention_varlen(**arguments)
    if "out" not in change:
        assert (arguments["out"] == 9).all(), "written before everything was checked"


def test_packed_out_may_not_overlap():
    arguments = packed()
    arguments["out"] = arguments["q"][..., :6]
    with pytest.raises(ValueError, match=r"^out must not overlap q, got"):
        fastattn.attention_varlen(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"out_b": ones(3, 2, dtype=float)},
            TypeError,
            "out_a and out_b must have the same dtype, ",
        ),
        ({"out_b": ones(2, 2)}, ValueError, "out_a and out_b must have the same shape, got (3, 2)"),
        (
            {"lse_b": ones(1)},
            ValueError,
            "lse_a and lse_b must have the same shape, got (3,) and (1",
        ),
        ({"lse_a": ones(3, dtype=int)}, TypeError, f"lse_a must be {FLOAT}, got int64"),
        (
            {name: ones() for name in ("out_a", "lse_a", "out_b", "lse_b")},
            ValueError,
            "out_a must have rank 1 or more, got shape ()",
        ),
        ({"out_a": masked(3, 2)}, TypeError, "out_a must be a plain array, got a masked array."),
        (
            {"lse_a": ones(2), "lse_b": ones(2)},
            ValueError,
            "lse_a must have the shape of out_a without its last axis, got (2,) and (3, 2)",
        ),
    ],
    ids=rule_id,
)
def test_merge_rule(change, error, message):
    parts = {"out_a": ones(3, 2), "lse_a": ones(3), "out_b": ones(3, 2), "lse_b": ones(3)}
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.merge(**parts | change)


@pytest.mark.parametrize("function", [fastattn.attention_weights, fastattn.attention_key_sums])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": 1}, ValueError, "rows must be a slice or ints with one axis, got shape ()"),
        ({"rows": [0.5]}, TypeError, "rows must be a slice or ints with one axis, got float64"),
        ({"rows": [0, 7]}, ValueError, "rows must lie within the 7 of q, got 0 to 7"),
        ({"rows": [-8]}, ValueError, "rows must lie within the 7 of q, got -8 to -8"),
        (
            {"k": ones(2, 5, 9)},
            ValueError,
            "q and k must have the same head_dim, got (2, 7, 8) and",
        ),
        ({"kv_len": 6}, ValueError, "kv_len must lie between 0 and 5, got 6"),
    ],
    ids=rule_id,
)
def test_weights_rule(function, change, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(**{"q": ones(2, 7, 8), "k": ones(2, 5, 8)} | change)


def test_dropout_mask_rule():
    for shape in ((3,), 3, (-1, 3), (3, 4, -5), ((3, 4),)):
        rule = re.escape(f"shape must have two axes or more, of sizes >= 0, got {shape}")
        with pytest.raises(ValueError, match=f"^{rule}"):
            fastattn.dropout_mask(shape, dropout_p=0.5)
    with pytest.raises(TypeError, match=r"^shape must be a tuple of ints, got float64"):
        fastattn.dropout_mask((2.0, 3), dropout_p=0.5)
    with pytest.raises(ValueError, match=r"^dropout_p must be between 0 and 1, got 2"):
        fastattn.dropout_mask((3, 3), dropout_p=2)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (fastattn.explain, ["slopes", "fold", "names"]),
        (fastattn.explain_varlen, ["slopes", "mask", "q_len"]),
        (fastattn.attention_weights, ["slopes", "fold", "backend", "out", "dropout_p", "v"]),
        (fastattn.attention_key_sums, ["slopes", "return_lse"]),
        (fastattn.nn.multihead_attention, ["casual", "block_table"]),
        (fastattn.nn.transformer_layer, ["casual", "out"]),
        (fastattn.nn.KVCache(2, 8).attend, ["casual", "block_table"]),
        (fastattn.nn.multihead_attention_backward, ["casual", "cache", "return_lse"]),
        (fastattn.nn.transformer_layer_backward, ["casual", "rotary", "block_table"]),
    ],
)
def test_unknown_keywords_are_refused_by_name(function, names):
    given = inspect.signature(function).parameters.values()
    arrays = [ones(2, 3, 8) for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    for name in names:
        message = re.escape(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        with pytest.raises(TypeError, match=f"^{message}$"):
            function(*arrays, **{name: 1})


@pytest.mark.parametrize(
    "explain",
    [
        partial(fastattn.explain, *[ones(2, 3, 8)] * 3),
        partial(fastattn.explain_varlen, *[ones(2, 3, 8)] * 3, [0, 2], [0, 2]),
    ],
    ids=["explain", "explain_varlen"],
)
def test_what_is_to_be_explained(explain):
    with pytest.raises(TypeError, match=r"^gradients must be a bool, got int"):
        explain(gradients=1)
    with pytest.raises(ValueError, match=r"^backend must be one of .*, got 'gpu'"):
        explain(backend="gpu")


def test_signatures_show_the_keywords_that_are_passed_on():
    attention = inspect.signature(fastattn.attention).parameters
    explain = inspect.signature(fastattn.explain)
    assert set(explain.parameters) == set(attention) | {"gradients"}
    assert explain.parameters["window"] == attention["window"]
    assert explain.return_annotation == "Plan"
    packed = inspect.signature(fastattn.attention_varlen).parameters
    of_packed = inspect.signature(fastattn.explain_varlen).parameters
    assert set(of_packed) == set(packed) | {"gradients"}
    weights = inspect.signature(fastattn.attention_weights).parameters
    missing = {"v", "block_table", "out", "return_lse", "dropout_p", "dropout_seed", "backend"}
    assert set(weights) == (set(attention) | {"rows"}) - missing - {"precision"}
    assert fastattn.explain.__doc__.startswith("Return how attention()")
