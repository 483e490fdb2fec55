"""Calls that a fuzzer makes up, guided by what they reach: a case of the table, then changed.

    python tests/fuzz/call.py -max_total_time=60 [folder of inputs found before]

Two bytes choose a case, and every two more an argument and what becomes of it. A call may refuse
what it is given with TypeError or ValueError; if it does not, both backends must agree, and no
memory be touched but their own. Options are libFuzzer's.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT.parent))

SIZE = 100_000  # scores of a case: fuzzing wants many calls
REFUSALS = (TypeError, ValueError)
ARGUMENTS = (
    *("q", "k", "v", "scale", "causal", "align", "window", "chunk", "softcap", "bias", "mask"),
    *("alibi", "sinks", "q_len", "kv_len", "kv_start", "dropout_p", "dropout_seed", "out", "aux"),
    *("return_lse", "score_mod", "mask_mod", "block_mask", "block_table"),
)


class Subclass(np.ndarray):
    """One of the caller's own."""


def _array(change):
    """A change of arrays; what is none stays."""
    return lambda value: change(value) if isinstance(value, np.ndarray) else value


def _poisoned(a):
    if a.dtype.kind == "f" and a.size:
        a = a.copy()
        a.reshape(-1)[a.size // 2] = np.nan
    return a


CHANGES = [
    *(lambda value, new=new: new for new in (None, 0, 1, -1, 2.5, 7, 10**30, True, "top_left")),
    *(
        lambda value, new=new: new
        for new in (float("nan"), float("inf"), (), [], (3, 0), (0, None))
    ),
    *(lambda value, new=new: new for new in ([1], np.ones(3), object(), 1j, b"x", np.ma.ones(3))),
    _array(lambda a: a[..., ::-1]),
    _array(lambda a: a[::-1]),
    _array(lambda a: a[..., :1]),
    _array(lambda a: a[..., :0]),
    _array(lambda a: a[:0]),
    _array(lambda a: a[0]),
    _array(lambda a: a[None]),
    _array(lambda a: a.swapaxes(-1, -2)),
    _array(lambda a: np.ascontiguousarray(a.T).T),
    _array(lambda a: np.repeat(a, 2, axis=-1)[..., ::2]),
    _array(lambda a: np.broadcast_to(a.reshape(-1)[0], a.shape)),
    _array(lambda a: a.astype(np.float64)),
    _array(lambda a: a.astype(np.float16)),
    _array(lambda a: a.astype(a.dtype.newbyteorder()) if a.dtype.kind == "f" else a),
    _array(lambda a: a.astype(bool)),
    _array(lambda a: a.astype(np.int8)),
    _array(lambda a: a.astype(object)),
    _array(lambda a: a.view(Subclass)),
    _array(lambda a: np.ma.masked_array(a)),
    _array(lambda a: a.tolist()),
    _array(_poisoned),
    _array(lambda a: a * a.dtype.type(1e4) if a.dtype.kind == "f" else a),
]


def seeds(cases):
    """An input for each case, unchanged."""
    return [struct.pack("<H", n) for n in range(len(cases))]


def arguments(data, cases):
    """What an input says."""
    case = cases[int.from_bytes(data[:2], "little") % len(cases)]
    found = dict(zip("qkv", case.arrays(), strict=True)) | case.flags()
    for name, change in zip(data[2:18:2], data[3:19:2], strict=False):
        name = ARGUMENTS[name % len(ARGUMENTS)]
        # What cannot be changed like this, stays.
        with np.errstate(all="ignore"), contextlib.suppress(IndexError, TypeError, ValueError):
            found[name] = CHANGES[change % len(CHANGES)](found.get(name))
    return found


def call(given, backend):
    """(out, lse) or the refusal."""
    import fastattn

    given = given | {"return_lse": True} if given.get("return_lse") is None else given
    try:
        return fastattn.attention(**given, backend=backend)
    except REFUSALS as error:
        return error


def check(data, cases, backends):
    """Make the call on every backend; raise if one differs."""
    given = arguments(data, cases)
    answers = [call(given, backend) for backend in backends]
    kinds = {type(answer) for answer in answers}
    assert len(kinds) == 1, answers
    if kinds & set(REFUSALS):
        assert len({str(answer) for answer in answers}) == 1, answers
        return answers[0]
    if given.get("dropout_p") and given.get("dropout_seed") is None:
        return answers[0]  # each call drew a seed of its own
    first = answers[0] if isinstance(answers[0], tuple) else (answers[0],)
    for other in answers[1:]:
        other = other if isinstance(other, tuple) else (other,)
        for a, b in zip(first, other, strict=True):
            _assert_close(a, b)
    return answers[0]


def _assert_close(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    a, b = (x.astype(np.float64) for x in (a, b))
    # Scores as large as 1e8 are a matter of the order of sums: then NaN and shapes are all.
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def small_cases():
    """Those of the table that are computed at once, and need no kernels of their own."""
    from cases import CASES

    sizes = [(c, c.batch * c.heads_q * c.seqlen_q * c.seqlen_k) for c in CASES]
    return [case for case, size in sizes if size <= SIZE]


def main():
    """Fuzz with atheris."""
    import atheris

    os.environ.setdefault("FASTATTN_DEBUG", "1")
    with atheris.instrument_imports(include=["fastattn"]):
        import fastattn
    one = np.ones((1, 1), np.float32)
    chosen = fastattn.explain(one, one, one).backend
    backends = ("numpy",) if chosen == "numpy" else ("numpy", chosen)
    cases = small_cases()
    with tempfile.TemporaryDirectory() as folder:
        for n, seed in enumerate(seeds(cases)):
            (Path(folder) / str(n)).write_bytes(seed)
        atheris.Setup([*sys.argv, folder], lambda data: check(data, cases, backends))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
