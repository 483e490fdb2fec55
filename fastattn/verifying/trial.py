"""One random problem, and how far an implementation is from the oracle on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ..api import attention, attention_varlen, dropout_mask
from ..backward import attention_backward, attention_varlen_backward
from ..cpu.threads import num_threads
from ..merging import merge
from . import gradient_oracle, oracle
from .case import Case, laid_out
from .modifiers import Modified, modified

Results = dict[str, np.ndarray]
PACKED = ("varlen", "varlen backward")
BACKWARD = ("backward", "varlen backward")
HALVES = ("float16", "bfloat16")
ORDERS = 4  # of the formula's sums, where one is not enough: see oracle.judge()


@dataclass(frozen=True)
class Trial:
    """A call of a public function, all of it known from these values."""

    case: Case
    kind: str = "forward"  # or "merge", "backward", "varlen", "varlen backward"
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")  # of q, k and v: see LAYOUTS
    poison: str = ""  # "q", "k" or "v": the one that holds a NaN somewhere
    num_threads: int = 1
    page_size: int = 0  # of k and v: 0 for arrays in one piece. It must divide seqlen_k
    seed: int = 0


@dataclass
class Inputs:
    """The arrays of a trial, drawn once for all implementations and the oracle."""

    arrays: tuple[np.ndarray, ...]  # q, k and v of rank 4
    flags: dict[str, Any]
    dout: np.ndarray  # (batch, heads_q, seqlen_q, head_dim_v)
    dlse: np.ndarray
    modified: Modified = field(default_factory=lambda: Modified({}))
    floors: dict[str, float] = field(default_factory=dict)  # what _floors() has said
    # What judged() has said, by the number of orders and whether factors are rounded.
    truth: dict[tuple[int, bool], dict[str, tuple[Any, ...]]] = field(default_factory=dict)


def inputs_of(trial: Trial) -> Inputs:
    """The arrays of a trial."""
    case, rng = trial.case, np.random.default_rng((trial.seed, 2))
    arrays, flags = case.arrays(trial.seed), case.flags(trial.seed)
    if trial.kind in PACKED:
        # Of a padded batch of members; lengths beyond a member's are cut to it.
        flags["q_len"] = rng.integers(0, case.seqlen_q + 1, case.batch)
        members = rng.integers(0, case.seqlen_k + 1, case.batch)
        flags["members"] = members
        flags["kv_len"] = np.minimum(flags.get("kv_len", members), members)
        flags["kv_start"] = np.minimum(flags.get("kv_start", 0), flags["kv_len"])
    if trial.poison:
        a = arrays["qkv".index(trial.poison)]
        a.reshape(-1)[rng.integers(a.size)] = np.nan
    dtype = arrays[0].dtype
    rows = case.shape("bhq")
    dout = rng.standard_normal((*rows, arrays[2].shape[-1])).astype(dtype)
    dlse = rng.standard_normal(rows).astype("float64" if case.dtype == "float64" else "float32")
    if trial.kind in PACKED:  # there is no such row that could add to the gradient of a sink
        past = np.arange(case.seqlen_q) >= flags["q_len"][:, None, None]
        dout[np.broadcast_to(past, rows)], dlse[np.broadcast_to(past, rows)] = 0, 0
    sizes = case.seqlen_q, case.seqlen_k
    if trial.kind in PACKED:
        sizes = flags["q_len"].max(), flags["members"].max()
    return Inputs(arrays, flags, dout, dlse, modified(case, sizes, rng))


def results(trial: Trial, x: Inputs, backend: str) -> Results:
    """What a backend answers, in the shapes of a padded batch.

    The call is made twice, the second time without `out` and on one thread: its bits must be the
    same on a backend that promises it. Raises WrongAnswer if they are not.
    """
    arrays = tuple(map(laid_out, x.arrays, trial.layouts))
    flags = x.flags | x.modified.arguments
    if trial.page_size:
        arrays, flags["block_table"] = _on_pages(trial, x)
    with num_threads(trial.num_threads):
        if trial.kind in PACKED:
            return _packed(trial, x, arrays, flags, backend)
        if trial.kind == "merge":
            return _merged(trial, arrays, flags, backend)
        found = _dense(trial, x, arrays, flags, backend)
    if backend != "numpy" and trial.kind == "forward":
        with num_threads(1):
            again = attention(*arrays, **flags, backend=backend)
        if again.tobytes() != found["out"].tobytes():
            raise oracle.WrongAnswer("other bits in a second call, on one thread")
    return found


def _dense(
    trial: Trial, x: Inputs, arrays: tuple[np.ndarray, ...], flags: dict[str, Any], backend: str
) -> Results:
    out = np.full(x.dout.shape, np.nan, x.dout.dtype)
    _, lse = attention(*arrays, **flags, out=out, return_lse=True, backend=backend)
    if trial.kind not in BACKWARD:
        return {"out": out, "lse": lse}
    names = _wanted(flags)
    flags = flags | {f"return_{name}": True for name in names[3:]}
    q, k, v = arrays
    found = attention_backward(x.dout, q, k, v, out, lse, dlse=x.dlse, **flags, backend=backend)
    return dict(zip(names, found, strict=True))


def _merged(
    trial: Trial, arrays: tuple[np.ndarray, ...], flags: dict[str, Any], backend: str
) -> Results:
    """The merge of two calls, of which one sees the keys before a place and one the others."""
    place = np.random.default_rng((trial.seed, 3)).integers(trial.case.seqlen_k + 1)
    early = np.arange(trial.case.seqlen_k) < place
    mask, sinks = flags.pop("mask", True), flags.pop("sinks", None)
    flags |= {"return_lse": True, "backend": backend}
    first = attention(*arrays, **flags, mask=mask & early, sinks=sinks)
    second = attention(*arrays, **flags, mask=mask & ~early)
    return dict(zip(("out", "lse"), merge(*first, *second), strict=True))


def _packed(
    trial: Trial, x: Inputs, arrays: tuple[np.ndarray, ...], flags: dict[str, Any], backend: str
) -> Results:
    """The same through the packed functions; rows and keys past a member's are 0."""
    rows, members = flags.pop("q_len"), flags.pop("members")
    edges = np.cumsum([0, *rows]), np.cumsum([0, *members])
    dout, q = (_rows(a, rows) for a in (x.dout, arrays[0]))
    k, v = arrays[1:] if trial.page_size else (_rows(a, members) for a in arrays[1:])
    out = np.full(dout.shape, np.nan, dout.dtype)
    _, lse = attention_varlen(q, k, v, *edges, **flags, out=out, return_lse=True, backend=backend)
    if trial.kind not in BACKWARD:
        lse = _padded(lse.T[..., None], rows, (*x.dlse.shape, 1))[..., 0]
        return {"out": _padded(out, rows, x.dout.shape), "lse": lse}
    dlse = _rows(x.dlse[..., None], rows)[..., 0].T
    names = _wanted(flags)
    flags = flags | {f"return_{name}": True for name in names[3:]}
    given = dout, q, k, v, out, lse, *edges
    found = attention_varlen_backward(*given, dlse=dlse, **flags, backend=backend)
    lengths = (rows, members, members)
    main = map(_padded, found, lengths, [a.shape for a in x.arrays])
    return dict(zip(names, [*main, *found[3:]], strict=True))


def _on_pages(trial: Trial, x: Inputs) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """((q, pages of k, pages of v), block_table): pages in any order, between others of NaN.

    Where the table has no keys, it says nothing that could be used.
    """
    case, rng = trial.case, np.random.default_rng((trial.seed, 3))
    size = gcd(trial.page_size, case.seqlen_k)  # what divides it, also of a problem made smaller
    per_entry = case.seqlen_k // size
    count = case.batch * per_entry
    table = rng.permutation(count + 2)[:count].reshape(case.batch, per_entry)
    found = [laid_out(x.arrays[0], trial.layouts[0])]
    for a, layout in zip(x.arrays[1:], trial.layouts[1:], strict=True):
        _, heads, _, dim = a.shape
        pages = np.full((count + 2, heads, size, dim), np.nan, a.dtype)
        pages[table] = a.reshape(case.batch, heads, per_entry, size, dim).swapaxes(1, 2)
        found.append(laid_out(pages, layout))
    first = size * np.arange(per_entry)
    start, stop = (
        np.broadcast_to(x.flags.get(name, default), case.batch)[:, None]
        for name, default in (("kv_start", 0), ("kv_len", case.seqlen_k))
    )
    used = (first < stop) & (first + size > start) & (start < stop)
    return tuple(found), np.where(used, table, -(2**31))


def _rows(a: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(batch, heads, rows, n) -> (tokens, heads, n): the first rows of each member."""
    return np.concatenate(
        [member[:, :n].swapaxes(0, 1) for member, n in zip(a, lengths, strict=True)]
    )


def _padded(a: np.ndarray, lengths: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The way back, with 0 for what is no member's."""
    found, start = np.zeros(shape, a.dtype), 0
    for b, n in enumerate(lengths):
        found[b, :, :n] = a[start : start + n].swapaxes(0, 1)
        start += n
    return found


def _wanted(flags: dict[str, Any]) -> list[str]:
    """The names of the gradients to ask for, in the order of the results."""
    return ["dq", "dk", "dv", *("d" + name for name in ("bias", "sinks", "alibi") if name in flags)]


def judged(trial: Trial, x: Inputs, orders: int, tf32: bool) -> dict[str, tuple[Any, ...]]:
    """{name: (exact, formula)} of what results() returns."""
    others = ("members", "precision")
    flags = {name: value for name, value in x.flags.items() if name not in others}
    if x.modified.arguments:
        flags["mask"] = flags.get("mask", True) & np.asarray(x.modified.visible)
        flags["change"] = x.modified.change
    seed = flags.pop("dropout_seed", None)
    if seed is not None:
        p = trial.case.dropout_p
        flags["keep"] = dropout_mask(trial.case.shape("bhqk"), dropout_p=p, dropout_seed=seed)
    if trial.kind in BACKWARD:
        flags["slope"] = x.modified.slope
        pair = gradient_oracle.judge(x.dout, *x.arrays, dlse=x.dlse, **flags, orders=orders)
        return {
            name: tuple(_summed(name, part[name], flags) for part in pair)
            for name in _wanted(flags)
        }
    exact, formula = oracle.judge(*x.arrays, **flags, orders=orders, tf32=tf32)
    found: dict[str, tuple[Any, ...]] = {
        "out": (exact[0], formula[0]),
        "lse": (exact[1], formula[1]),
    }
    if trial.kind in PACKED:
        past = np.arange(trial.case.seqlen_q) >= flags["q_len"][:, None, None]
        found["lse"] = tuple(np.where(past, 0, a) for a in found["lse"])
    return found


def _summed(name: str, a: np.ndarray, flags: dict[str, Any]) -> np.ndarray:
    """A gradient in the shape of its argument."""
    if name in ("dq", "dk", "dv"):
        return a
    if name == "dsinks":
        return a.sum((0, 2))
    shape = flags[name[1:]].shape
    shape = (1,) * (a.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return a.sum(axes, keepdims=True).reshape(flags[name[1:]].shape)


def error_ratio(trial: Trial, x: Inputs, found: Results, rounds: bool = False) -> float:
    """The largest error over what is allowed: right up to 1. Raises WrongAnswer where NaNs or
    infinities stand in the wrong places.

    rounds: whether the implementation rounds factors where the trial allows it.
    """
    floors = x.floors = x.floors or _floors(trial, x)
    tf32 = rounds and trial.case.precision == "tf32" and trial.case.dtype == "float32"
    for orders in (1, ORDERS):
        key = orders, tf32
        if key not in x.truth:
            x.truth[key] = judged(trial, x, *key)
        ratio = 0.0
        for name, ours in found.items():
            exact, formula = x.truth[key][name]
            floor = floors.get(name, floors[""])
            if tf32 and name == "out":
                # Of few numbers, it is luck how those of the formula are rounded: each probability
                # by half a unit, but relative to another sum.
                floor += 2 * oracle.TF32_EPS / oracle.EPS["float32"]
            error, allowed = oracle.errors(ours, exact, formula, floor)
            ratio = max(ratio, float((error / allowed).max(initial=0.0)))
        if ratio <= 1:
            break
    return ratio


def _floors(trial: Trial, x: Inputs) -> dict[str, float]:
    """Roundings to allow where the formula's own error is a poor estimate of them: {name of a
    result: how many}, and for the others under "".
    """
    case = trial.case
    q, k, v, dout = (_largest(a) for a in (*x.arrays, x.dout))
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    # A score is rounded in units of its own size before it is an exponent.
    floor = case.floor() + scale * q.row * k.row / 4
    halves = oracle.EPS[case.dtype] / oracle.EPS["float32"] if case.dtype in HALVES else 0.0
    if trial.kind == "merge":
        return {"": floor + 2 * halves}  # both parts were rounded
    if trial.kind not in BACKWARD:
        return {"": floor}
    # ds = p * (dp - delta), where one key has all the weight, is the difference of two like
    # products, as large as the norms of dout and v. Then come scale and k, or q, or the distance.
    ds = dout.row * v.row
    if halves:
        # out was rounded to the type of dout, and delta is a product of the two.
        floor, ds = 2 * halves, ds / 8 * halves
    factor = max(1.0, scale * max(q.element, k.element))
    distance = 2.0 * (case.seqlen_q + case.seqlen_k)
    return {"": floor + 2 * ds * factor, "dalibi": floor + 2 * ds * distance}


class _Largest(NamedTuple):
    """Of the numbers of an array."""

    element: float
    row: float  # norm


def _largest(a: np.ndarray) -> _Largest:
    a = np.nan_to_num(a.astype(float))
    squares = np.einsum("...d,...d", a, a)
    return _Largest(float(np.abs(a).max(initial=0)), float(np.sqrt(squares.max(initial=0))))
