"""The contenders: fastattn, the formula it replaces, and what else a user could call on a CPU.

Each function takes (case, x, num_threads) and returns an Entry. Everything that a user of that
library would prepare once (sessions, layouts, compiled graphs, masks in the wanted form) is
prepared before the Entry is returned, so that only the call is timed. A contender that cannot run
the case raises NotImplementedError, one that is not installed ImportError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..api import attention, explain
from ..cpu.threads import set_num_threads
from .cases import Case, Inputs
from .onnx_call import Feeds, onnx_call

# Settings by which peers keep to AVX2, as fastattn does with FASTATTN_TARGET=x86-64-v3: torch,
# oneDNN (of torch and OpenVINO), MKL, XLA. Each is read when its library is loaded.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}
# Bytes of scores, of which the formula stores all, twice while it subtracts: beyond, it only swaps.
FORMULA_LIMIT = 4 << 30
JAX_LIMIT = (1 << 30) - 1  # it stores them too, and takes twice as long (dense-4k)


class Entry(NamedTuple):
    """A contender made ready for one case."""

    run: Callable[[], Any]  # what is timed
    unpack: Callable[[Any], np.ndarray] = np.asarray  # its result as fastattn lays it out


def formula(case: Case, x: Inputs, num_threads: int) -> Entry:
    """softmax(scale * q @ k.T + bias) @ v in plain NumPy, with all scores in memory."""
    _refuse_scores(case, FORMULA_LIMIT)
    scale = x.q.dtype.type(case.head_dim**-0.5)
    hidden = None if x.mask is None else ~x.mask
    if case.causal:
        hidden = ~np.tri(case.seqlen_q, case.seqlen_k, dtype=bool)

    def run() -> np.ndarray:
        k, v = x.k, x.v
        if case.group > 1:
            k, v = k.repeat(case.group, 1), v.repeat(case.group, 1)
        s = x.q @ k.swapaxes(-1, -2)
        s *= scale
        if x.bias is not None:
            s += x.bias
        if hidden is not None:
            np.copyto(s, -np.inf, where=hidden)
        s -= s.max(axis=-1, keepdims=True)
        p = np.exp(s, out=s)
        p /= p.sum(axis=-1, keepdims=True)
        return p @ v

    return Entry(run)


def fastattn_numpy(case: Case, x: Inputs, num_threads: int) -> Entry:
    return _fastattn(case, x, num_threads, "numpy")


def fastattn_cpu(case: Case, x: Inputs, num_threads: int) -> Entry:
    return _fastattn(case, x, num_threads, "cpu")


def _fastattn(case: Case, x: Inputs, num_threads: int, backend: str) -> Entry:
    def run() -> np.ndarray:
        return attention(
            x.q, x.k, x.v, causal=case.causal, mask=x.mask, bias=x.bias, backend=backend
        )

    explain(x.q, x.k, x.v, backend=backend)  # raises ImportError if it cannot run here
    set_num_threads(num_threads)
    return Entry(run)


def torch_sdpa(case: Case, x: Inputs, num_threads: int) -> Entry:
    import torch

    torch.set_num_threads(num_threads)
    q, k, v = (torch.from_numpy(array) for array in (x.q, x.k, x.v))
    masking = x.mask if x.mask is not None else x.bias
    attn_mask = None if masking is None else torch.from_numpy(masking)

    @torch.inference_mode()
    def run() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=case.causal, enable_gqa=case.group > 1
        )

    return Entry(run, lambda result: result.numpy())


def ort_attention(case: Case, x: Inputs, num_threads: int) -> Entry:
    """ONNX's own Attention operator (opset 23) in ONNX Runtime."""
    _refuse(case, float64=True)
    feeds: Feeds = {"q": x.q, "k": x.k, "v": x.v}
    if case.masking:
        feeds["attn_mask"] = _mask_of_all_queries(case, x)
    out = (case.batch, case.heads_q, case.seqlen_q, case.head_dim)
    run = onnx_call("Attention", feeds, {"out": out}, num_threads, is_causal=int(case.causal))
    return Entry(run, lambda values: values["out"].numpy())


def ort_mha(case: Case, x: Inputs, num_threads: int) -> Entry:
    """ONNX Runtime's MultiHeadAttention: q as rows of tokens, k and v as a cache holds them."""
    _refuse(case, float64=True, groups=True)
    q = _token_rows(x.q)
    feeds: Feeds = {"q": q, "k": x.k, "v": x.v, "": None}
    if case.masking == "padding" and x.mask is not None:
        feeds["key_padding_mask"] = x.mask[:, 0, 0].astype(np.int32)
    elif case.masking:
        feeds["-"] = None
        feeds["attention_bias"] = _added(x)
    run = onnx_call(
        "MultiHeadAttention",
        feeds,
        {"out": q.shape},
        num_threads,
        domain="com.microsoft",
        num_heads=case.heads_q,
        unidirectional=int(case.causal),
    )
    return Entry(run, lambda values: _heads_first(values["out"].numpy(), case))


def ort_gqa(case: Case, x: Inputs, num_threads: int) -> Entry:
    """ONNX Runtime's GroupQueryAttention: always causal, so for causal prefill and for decoding."""
    _refuse(case, float64=True, masking=True)
    if not (case.causal or case.seqlen_q == 1):
        raise NotImplementedError("always causal")
    new = case.seqlen_q  # keys that arrive with the queries; the others lie in the cache
    q = _token_rows(x.q)
    feeds: Feeds = {"q": q, "k": _token_rows(x.k[:, :, -new:]), "v": _token_rows(x.v[:, :, -new:])}
    # Past and present share the cache, as they do when decoding: only new rows are written.
    feeds["past_k"], feeds["past_v"] = x.k.copy(), x.v.copy()
    feeds["seqlens_k"] = np.full(case.batch, case.seqlen_k - 1, np.int32)
    feeds["total"] = np.array([case.seqlen_k], np.int32)
    run = onnx_call(
        "GroupQueryAttention",
        feeds,
        {"out": q.shape, "present_k": x.k.shape, "present_v": x.v.shape},
        num_threads,
        shared={"present_k": "past_k", "present_v": "past_v"},
        domain="com.microsoft",
        num_heads=case.heads_q,
        kv_num_heads=case.heads_kv,
    )
    return Entry(run, lambda values: _heads_first(values["out"].numpy(), case))


def jax_attention(case: Case, x: Inputs, num_threads: int) -> Entry:
    # JAX has no setting for its threads: it takes every core, so it only plays where all do.
    _refuse(case, float64=True)
    if num_threads != _available_cores():
        raise NotImplementedError("takes every core")
    _refuse_scores(case, JAX_LIMIT)
    import jax

    def tokens_first(array: np.ndarray) -> Any:
        return jax.numpy.asarray(array.swapaxes(1, 2))

    q, k, v = (tokens_first(array) for array in (x.q, x.k, x.v))
    mask, bias = (None if a is None else jax.numpy.asarray(a) for a in (x.mask, x.bias))
    compiled = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, bias=bias, mask=mask, is_causal=case.causal
        )
    )
    return Entry(
        lambda: compiled(q, k, v).block_until_ready(),
        lambda result: np.asarray(result).swapaxes(1, 2),
    )


def openvino_sdpa(case: Case, x: Inputs, num_threads: int) -> Entry:
    _refuse(case, float64=True)
    # Importing it would otherwise report the use to its maker.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino
    from openvino import opset13

    q, k, v = x.q, x.k, x.v
    if case.group > 1:  # key heads broadcast: repeating them in the model takes no less time
        q, k, v = (
            q.reshape(case.batch, case.heads_kv, case.group, *q.shape[2:]),
            k[:, :, None],
            v[:, :, None],
        )
    arrays = [q, k, v, *([_added(x)] if case.masking else [])]
    parameters = [opset13.parameter(array.shape, np.float32) for array in arrays]
    node = opset13.scaled_dot_product_attention(*parameters, causal=case.causal)
    settings = {
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", settings)
    request = model.create_infer_request()
    for index, array in enumerate(arrays):
        request.set_input_tensor(index, openvino.Tensor(array))
    return Entry(request.infer, lambda result: result[0].reshape(x.q.shape))


def _refuse(
    case: Case, *, float64: bool = False, groups: bool = False, masking: bool = False
) -> None:
    """Raise NotImplementedError if the case has what a contender does not."""
    if float64 and case.dtype == "float64":
        raise NotImplementedError("no float64")
    if groups and case.group > 1:
        raise NotImplementedError("no grouped heads")
    if masking and case.masking:
        raise NotImplementedError("no masks")


def _refuse_scores(case: Case, limit: int) -> None:
    """Raise NotImplementedError if all scores together take more than so many bytes."""
    itemsize = np.dtype(case.dtype).itemsize
    if case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * itemsize > limit:
        raise NotImplementedError(f"stores {limit / 2**30:.0f} GiB of scores or more")


def _token_rows(array: np.ndarray) -> np.ndarray:
    """(batch, heads, seqlen, head_dim) -> (batch, seqlen, heads * head_dim)."""
    batch, heads, seqlen, head_dim = array.shape
    return array.swapaxes(1, 2).reshape(batch, seqlen, heads * head_dim)


def _heads_first(rows: np.ndarray, case: Case) -> np.ndarray:
    """(batch, seqlen_q, heads_q * head_dim) -> (batch, heads_q, seqlen_q, head_dim)."""
    return rows.reshape(case.batch, case.seqlen_q, case.heads_q, case.head_dim).swapaxes(1, 2)


def _added(x: Inputs) -> np.ndarray:
    """The mask or bias of a masked case as something to be added to the scores."""
    added = x.bias if x.mask is None else np.where(x.mask, np.float32(0), np.float32(-np.inf))
    return np.asarray(added)


def _mask_of_all_queries(case: Case, x: Inputs) -> np.ndarray:
    """The mask or bias as ONNX Runtime wants it: with a row for every query."""
    if x.mask is None:
        return _added(x)
    shape = (len(x.mask), 1, case.seqlen_q, case.seqlen_k)
    return np.ascontiguousarray(np.broadcast_to(x.mask, shape))


def _available_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


OURS = "fastattn cpu"

CONTENDERS: dict[str, Callable[[Case, Inputs, int], Entry]] = {
    OURS: fastattn_cpu,
    "fastattn numpy": fastattn_numpy,
    "numpy formula": formula,
    "torch sdpa": torch_sdpa,
    "ort attention": ort_attention,
    "ort mha": ort_mha,
    "ort gqa": ort_gqa,
    "jax": jax_attention,
    "openvino": openvino_sdpa,
}


def select(wanted: str) -> list[str]:
    """Contenders by a comma-separated list; a word stands for every name that contains it.

    Raises ValueError for a word that matches nothing.
    """
    chosen: dict[str, None] = {}
    for word in wanted.split(","):
        found = [name for name in CONTENDERS if word in name]
        if not found:
            raise ValueError(f"contenders must be among {tuple(CONTENDERS)}, got {word!r}")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def match_target() -> None:
    """Keep peers that are not loaded yet to AVX2 where fastattn is."""
    if os.environ.get("FASTATTN_TARGET") == "x86-64-v3":
        for name, value in AVX2_ONLY.items():
            os.environ.setdefault(name, value)


def entry(name: str, case: Case, x: Inputs, num_threads: int) -> Entry | str:
    """The contender made ready, or in a few words why it takes no part."""
    try:
        return CONTENDERS[name](case, x, num_threads)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except (ImportError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
