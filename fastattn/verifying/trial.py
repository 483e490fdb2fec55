"""One random problem, and how far an implementation is from the oracle on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..api import attention, attention_varlen, dropout_mask
from ..backward import attention_backward, attention_varlen_backward
from ..cpu.threads import num_threads
from . import gradient_oracle, oracle
from .case import Case, laid_out

Results = dict[str, np.ndarray]
PACKED = ("varlen", "varlen backward")
BACKWARD = ("backward", "varlen backward")
ORDERS = 4  # of the formula's sums, where one is not enough: see oracle.judge()


@dataclass(frozen=True)
class Trial:
    """A call of a public function, all of it known from these values."""

    case: Case
    kind: str = "forward"  # or "backward", "varlen", "varlen backward"
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")  # of q, k and v: see LAYOUTS
    poison: str = ""  # "q", "k" or "v": the one that holds a NaN somewhere
    num_threads: int = 1
    seed: int = 0


@dataclass
class Inputs:
    """The arrays of a trial, drawn once for all implementations and the oracle."""

    arrays: tuple[np.ndarray, ...]  # q, k and v of rank 4
    flags: dict[str, Any]
    dout: np.ndarray  # (batch, heads_q, seqlen_q, head_dim_v)
    dlse: np.ndarray
    # What judged() has said, by the number of orders.
    truth: dict[int, dict[str, tuple[Any, ...]]] = field(default_factory=dict)


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
    return Inputs(arrays, flags, dout, dlse)


def results(trial: Trial, x: Inputs, backend: str) -> Results:
    """What a backend answers, in the shapes of a padded batch.

    The call is made twice, the second time without `out` and on one thread: its bits must be the
    same on a backend that promises it. Raises WrongAnswer if they are not.
    """
    arrays = tuple(map(laid_out, x.arrays, trial.layouts))
    with num_threads(trial.num_threads):
        found = _packed(trial, x, arrays, backend) if trial.kind in PACKED else None
        found = found or _dense(trial, x, arrays, backend)
    if backend != "numpy" and trial.kind == "forward":
        with num_threads(1):
            again = attention(*arrays, **x.flags, backend=backend)
        if again.tobytes() != found["out"].tobytes():
            raise oracle.WrongAnswer("other bits in a second call, on one thread")
    return found


def _dense(trial: Trial, x: Inputs, arrays: tuple[np.ndarray, ...], backend: str) -> Results:
    out = np.full(x.dout.shape, np.nan, x.dout.dtype)
    _, lse = attention(*arrays, **x.flags, out=out, return_lse=True, backend=backend)
    if trial.kind not in BACKWARD:
        return {"out": out, "lse": lse}
    names = _wanted(x.flags)
    others = {f"return_{name}": True for name in names[3:]}
    found = attention_backward(
        x.dout, *arrays, out, lse, dlse=x.dlse, **x.flags, **others, backend=backend
    )
    return dict(zip(names, found, strict=True))


def _packed(trial: Trial, x: Inputs, arrays: tuple[np.ndarray, ...], backend: str) -> Results:
    """The same through the packed functions; rows and keys past a member's are 0."""
    flags = dict(x.flags)
    rows, members = flags.pop("q_len"), flags.pop("members")
    edges = np.cumsum([0, *rows]), np.cumsum([0, *members])
    dout, q = (_rows(a, rows) for a in (x.dout, arrays[0]))
    k, v = (_rows(a, members) for a in arrays[1:])
    out = np.full(dout.shape, np.nan, dout.dtype)
    _, lse = attention_varlen(q, k, v, *edges, **flags, out=out, return_lse=True, backend=backend)
    if trial.kind not in BACKWARD:
        lse = _padded(lse.T[..., None], rows, (*x.dlse.shape, 1))[..., 0]
        return {"out": _padded(out, rows, x.dout.shape), "lse": lse}
    dlse = _rows(x.dlse[..., None], rows)[..., 0].T
    names = _wanted(flags)
    others = {f"return_{name}": True for name in names[3:]}
    found = attention_varlen_backward(
        dout, q, k, v, out, lse, *edges, dlse=dlse, **flags, **others, backend=backend
    )
    lengths = (rows, members, members)
    main = map(_padded, found, lengths, [a.shape for a in x.arrays])
    return dict(zip(names, [*main, *found[3:]], strict=True))


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


def judged(trial: Trial, x: Inputs, orders: int) -> dict[str, tuple[Any, ...]]:
    """{name: (exact, formula)} of what results() returns."""
    flags = {name: value for name, value in x.flags.items() if name != "members"}
    seed = flags.pop("dropout_seed", None)
    if seed is not None:
        p = trial.case.dropout_p
        flags["keep"] = dropout_mask(trial.case.shape("bhqk"), dropout_p=p, dropout_seed=seed)
    if trial.kind in BACKWARD:
        pair = gradient_oracle.judge(x.dout, *x.arrays, dlse=x.dlse, **flags, orders=orders)
        return {
            name: tuple(_summed(name, part[name], flags) for part in pair)
            for name in _wanted(flags)
        }
    exact, formula = oracle.judge(*x.arrays, **flags, orders=orders)
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


def error_ratio(trial: Trial, x: Inputs, found: Results) -> float:
    """The largest error over what is allowed: right up to 1. Raises WrongAnswer where NaNs or
    infinities stand in the wrong places.
    """
    for orders in (1, ORDERS):
        if orders not in x.truth:
            x.truth[orders] = judged(trial, x, orders)
        ratio = 0.0
        for name, ours in found.items():
            exact, formula = x.truth[orders][name]
            error, allowed = oracle.errors(ours, exact, formula, _floor(trial, x, name))
            ratio = max(ratio, float((error / allowed).max(initial=0.0)))
        if ratio <= 1:
            break
    return ratio


def _floor(trial: Trial, x: Inputs, name: str) -> float:
    """Roundings to allow where the formula's own error is a poor estimate of them."""
    case = trial.case
    q, k, v, dout = (np.abs(np.nan_to_num(a.astype(float))) for a in (*x.arrays, x.dout))
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    # A score is rounded in units of its own size before it is an exponent.
    floor = (
        case.floor()
        + scale * np.sqrt((q**2).sum(-1).max(initial=0) * (k**2).sum(-1).max(initial=0)) / 4
    )
    if trial.kind not in BACKWARD:
        return float(floor)
    # ds = p * (dp - delta), where one key has all the weight, is the difference of two like
    # products, as large as the norms of dout and v. Then come scale and k, or q, or the distance.
    ds = np.sqrt((dout**2).sum(-1).max(initial=0) * (v**2).sum(-1).max(initial=0))
    if case.dtype in ("float16", "bfloat16"):
        # out was rounded to the type of dout, and delta is a product of the two.
        floor, ds = (x * oracle.EPS[case.dtype] / oracle.EPS["float32"] for x in (2, ds / 8))
    factor = scale * max(q.max(initial=0), k.max(initial=0))
    if name == "dalibi":
        factor = 2.0 * (case.seqlen_q + case.seqlen_k)
    return float(floor + 2 * ds * max(1.0, factor))
