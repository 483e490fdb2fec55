"""A function becomes a modifier, or an error that names the line."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fastattn import mods
from fastattn.modifier import aux_arrays, evaluate
from fastattn.trace import VOCABULARY, trace

BIAS = np.zeros(77)


def test_a_closure_made_anew_is_the_same_modifier():
    one, two = (trace(mods.sliding_window(256, 0), "mask_mod") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)
    assert one != trace(mods.sliding_window(255, 0), "mask_mod")
    nan = [trace(lambda s, b, h, i, j, aux: s * np.nan, "score_mod") for _ in range(2)]
    assert nan[0] == nan[1]


def test_steps_that_nothing_needs_are_dropped():
    def wasteful(score, b, h, i, j, aux):
        _ = aux[0][b, j] * 3
        return score

    modifier = trace(wasteful, "score_mod", (("float32", 2),))
    assert len(modifier.steps) == 1
    assert not modifier.uses("b")


def test_helpers_loops_and_keywords_are_python():
    def helper(x, times=2):
        for _ in range(times):
            x = x + 1
        return x

    def modifier(score, b, h, i, j, aux, extra=5):
        return helper(score, times=3) + extra

    steps = trace(modifier, "score_mod")
    assert evaluate(steps, np.dtype("float64"), (), 0, 0, 0, 0, 1.0) == 9


def test_ufuncs_of_numpy_are_those_of_mods():
    def by_numpy(score, b, h, i, j, aux):
        return np.exp(np.minimum(score, np.float32(2) * h)) * np.int64(3) - np.abs(i - j)

    def by_mods(score, b, h, i, j, aux):
        return mods.exp(mods.minimum(score, np.float32(2) * h)) * np.int64(3) - mods.abs(i - j)

    assert trace(by_numpy, "score_mod") == trace(by_mods, "score_mod")


# What a modifier must not do, and what the message says beside the line.
BAD = {
    "math.tanh(score)": (TypeError, "the module math"),
    "np.sin(score)": (TypeError, "np.sin is not among the functions of fastattn.mods"),
    "np.add(score, 1, dtype='f4')": (TypeError, "np.add is not among"),
    "np.maximum.reduce(score)": (TypeError, "np.maximum is not among"),
    "np.where(j <= i, score, 0)": (TypeError, "use those of fastattn.mods"),
    "score if j <= i else 0": (TypeError, "use where"),
    "score * (i < j < i + 3)": (TypeError, "use where"),
    "score + max(i, j)": (TypeError, "maximum"),
    "score.astype(int)": (TypeError, "no attribute 'astype'"),
    "score << 1": (TypeError, "unsupported operand"),
    "score % 2": (TypeError, "write floor"),
    "~score": (TypeError, "got a float"),
    "score ** 0.5": (TypeError, "constant integer n"),
    "score ** j": (TypeError, "constant integer n"),
    "score * 2 ** -j": (TypeError, "write exp(x * log(a))"),
    "score + BIAS[j]": (TypeError, "pass aux=(array,)"),
    "score + BIAS": (TypeError, "not in aux"),
    "score + [1, 2][j]": (TypeError, "only the arrays of aux"),
    "score + 'a'": (TypeError, "str is neither"),
    "score + 2**70": (TypeError, "64 bits"),
    "score + aux[7][j]": (ValueError, "aux[7] is used, but the call was given an aux of length 2"),
    "score + [1, 2][7]": (ValueError, "list index out of range"),
    "score + aux[0][j, j]": (ValueError, "rank, 1, got 2 indices"),
    "score + aux[0][-1]": (ValueError, "at least 0"),
    "score + aux[0][score]": (TypeError, "an index must be an integer"),
    "score + aux[0][:2]": (TypeError, "no slice"),
    "score + aux[0]": (TypeError, "has rank 1, got 0 indices"),
    "score + sum(aux[0])": (TypeError, "looped over"),
}


@pytest.mark.parametrize("text", BAD)
def test_what_a_modifier_must_not_do(text, tmp_path):
    error, reason = BAD[text]
    path = tmp_path / "user.py"
    path.write_text(f"def modifier(score, b, h, i, j, aux):\n    k = j + 1\n    return {text}\n")
    space = {"np": np, "math": math, "BIAS": BIAS}
    exec(compile(path.read_text(), str(path), "exec"), space)
    with pytest.raises(error, match=re.escape(reason)) as caught:
        trace(space["modifier"], "score_mod", (("float32", 1), ("int64", 2)))
    message = str(caught.value)
    assert message.startswith("score_mod must use only what every backend can run, got")
    assert f"{path}:3: return {text}" in message
    assert VOCABULARY in message


def test_the_line_named_is_the_users_own():
    def helper(x):
        return math.exp(x)

    def mask(b, h, i, j, aux):
        return helper(j) > 3

    with pytest.raises(TypeError, match=re.escape("return math.exp(x)")):
        trace(mods.and_masks(mods.causal, mask), "mask_mod")
    with pytest.raises(TypeError, match=re.escape("return np.clip(score, 0, i)")):
        trace(clips, "score_mod")
    with pytest.raises(
        ValueError, match=r"aux of length 0: pass .*\n.*mods.py:\d+: slopes = aux\[slot\]"
    ):
        trace(mods.alibi(), "score_mod")


def clips(score, b, h, i, j, aux):
    return np.clip(score, 0, i)


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (3, "score_mod", "must be a function of (score, b, h, i, j, aux), got int"),
        (lambda s, b, h, i, j: s, "score_mod", "must be a function of (score, b, h, i, j, aux)"),
        (mods.alibi(), "mask_mod", "must be a function of (b, h, i, j, aux), got alibi(score"),
        (lambda b, h, i, j, aux: None, "mask_mod", "mask_mod must return its result, got None"),
        (lambda b, h, i, j, aux: j - i, "mask_mod", "mask_mod must return bool"),
        (lambda *args: "text", "score_mod", "score_mod must return its result, got 'text'"),
    ],
)
def test_signature_and_result(function, argument, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        trace(function, argument)


def test_other_errors_of_a_modifier_are_its_own():
    with pytest.raises(NameError, match="nowhere"):
        trace(lambda *args: nowhere, "score_mod")  # noqa: F821


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"),
        (3, "int64"),
        (2.5, "float64"),
        (np.zeros(3, np.uint8), "int32"),
        (np.zeros(3, np.uint32), "int64"),
        (np.zeros(3, np.float16), "float32"),
        (np.zeros(3, ">f4"), "float32"),
        (np.zeros(3, "i4,f8")["f1"], "float64"),  # strides that are no whole number of elements
        (np.zeros((0, 4), np.int32), "int32"),
    ],
)
def test_aux_arrays(value, dtype):
    (array,) = aux_arrays((value,))
    assert array.dtype == np.dtype(dtype)
    assert array.ndim == np.ndim(value)
    assert array.size > 0
    assert all(stride % array.itemsize == 0 for stride in array.strides)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (np.zeros(3), "aux must be a tuple of arrays and numbers, got ndarray"),
        (("a",), "aux[0] must be an array or a number, got str"),
        ((1, [1, 2]), "aux[1] must be an array or a number, got list"),
        ((np.zeros(3, complex),), "aux[0] must be bool, an integer"),
        ((np.zeros(3, np.uint64),), "aux[0] must be bool, an integer"),
        ((np.array(["a"]),), "aux[0] must be bool, an integer"),
    ],
)
def test_aux_that_is_refused(aux, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        aux_arrays(aux)


def test_modifiers_and_block_masks_need_no_compiler():
    code = (
        "import sys; from fastattn import block_mask, mods; "
        "print(block_mask.create_block_mask(mods.causal, None, None, 64, 64)); "
        "assert not {'numba', 'llvmlite', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONUTF8": "1"})
