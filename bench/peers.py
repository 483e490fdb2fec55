"""The contenders: fastattn, the formula it replaces, and what else a user could call on a CPU.

Each function takes (case, x, num_threads) and returns an Entry, or None where the contender does
not apply. Everything that a user of that library would prepare once (sessions, layouts, compiled
graphs, masks in the wanted form) is prepared before the Entry is returned, so that only the call is
timed. A contender that is not installed raises ImportError, which entry() turns into None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from cases import Case, Inputs

import fastattn

# The formula stores all scores, twice while it subtracts: beyond this many bytes it only swaps.
FORMULA_LIMIT = 4 << 30


class Entry(NamedTuple):
    """A contender made ready for one case."""

    run: Callable[[], Any]  # what is timed
    unpack: Callable[[Any], np.ndarray] = np.asarray  # its result as fastattn lays it out


def formula(case: Case, x: Inputs, num_threads: int) -> Entry | None:
    """softmax(scale * q @ k.T + bias) @ v in plain NumPy, with all scores in memory."""
    itemsize = x.q.dtype.itemsize
    if case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * itemsize > FORMULA_LIMIT:
        return None
    scale = x.q.dtype.type(case.head_dim**-0.5)
    hidden = None if x.mask is None else ~x.mask
    if case.causal:
        hidden = ~np.tri(case.seqlen_q, case.seqlen_k, dtype=bool)

    def run():
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
    def run():
        return fastattn.attention(
            x.q, x.k, x.v, causal=case.causal, mask=x.mask, bias=x.bias, backend=backend
        )

    fastattn.set_num_threads(num_threads)
    return Entry(run)


def torch_sdpa(case: Case, x: Inputs, num_threads: int) -> Entry:
    import torch

    torch.set_num_threads(num_threads)
    q, k, v = (torch.from_numpy(array) for array in (x.q, x.k, x.v))
    masking = x.mask if x.mask is not None else x.bias
    attn_mask = None if masking is None else torch.from_numpy(masking)

    @torch.inference_mode()
    def run():
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=case.causal, enable_gqa=case.group > 1
        )

    return Entry(run, lambda result: result.numpy())


def ort_attention(case: Case, x: Inputs, num_threads: int) -> Entry | None:
    """ONNX's own Attention operator (opset 23) in ONNX Runtime."""
    if case.dtype != "float32":
        return None
    feeds = {"q": x.q, "k": x.k, "v": x.v}
    if case.masking:
        feeds["attn_mask"] = _mask_of_all_queries(case, x)
    out = {"out": (case.batch, case.heads_q, case.seqlen_q, case.head_dim)}
    run = _onnx_call("Attention", feeds, out, num_threads, is_causal=int(case.causal))
    return Entry(run, lambda values: values["out"].numpy())


def ort_mha(case: Case, x: Inputs, num_threads: int) -> Entry | None:
    """ONNX Runtime's MultiHeadAttention: q as rows of tokens, k and v as a cache holds them."""
    if case.dtype != "float32" or case.group > 1:
        return None
    feeds = {"q": _token_rows(x.q), "k": x.k, "v": x.v, "": None}
    if case.masking == "padding":
        feeds["key_padding_mask"] = x.mask[:, 0, 0].astype(np.int32)
    elif case.masking:
        feeds["-"] = None
        bias = x.bias if x.mask is None else np.where(x.mask, np.float32(0), np.float32(-np.inf))
        feeds["attention_bias"] = bias
    run = _onnx_call(
        "MultiHeadAttention",
        feeds,
        {"out": feeds["q"].shape},
        num_threads,
        domain="com.microsoft",
        num_heads=case.heads_q,
        unidirectional=int(case.causal),
    )
    return Entry(run, lambda values: _heads_first(values["out"].numpy(), case))


def ort_gqa(case: Case, x: Inputs, num_threads: int) -> Entry | None:
    """ONNX Runtime's GroupQueryAttention: always causal, so for causal prefill and for decoding."""
    if case.dtype != "float32" or case.masking or not (case.causal or case.seqlen_q == 1):
        return None
    new = case.seqlen_q  # keys that arrive with the queries; the others lie in the cache
    feeds = {"q": _token_rows(x.q), "k": _token_rows(x.k[:, :, -new:])}
    feeds["v"] = _token_rows(x.v[:, :, -new:])
    # Past and present share the cache, as they do when decoding: only new rows are written.
    feeds["past_k"], feeds["past_v"] = x.k.copy(), x.v.copy()
    feeds["seqlens_k"] = np.full(case.batch, case.seqlen_k - 1, np.int32)
    feeds["total"] = np.array([case.seqlen_k], np.int32)
    run = _onnx_call(
        "GroupQueryAttention",
        feeds,
        {"out": feeds["q"].shape, "present_k": x.k.shape, "present_v": x.v.shape},
        num_threads,
        shared={"present_k": "past_k", "present_v": "past_v"},
        domain="com.microsoft",
        num_heads=case.heads_q,
        kv_num_heads=case.heads_kv,
    )
    return Entry(run, lambda values: _heads_first(values["out"].numpy(), case))


def _onnx_call(op, feeds, outputs, num_threads, *, shared=None, **attributes):
    """Return a call of a one-node model with all memory bound beforehand: it returns all values.

    feeds maps input names to arrays, None for an optional input left out; outputs maps names to
    shapes; shared maps outputs to the inputs whose memory they take over.
    """
    from onnxruntime import OrtValue

    session = _onnx_session(op, feeds, outputs, num_threads, attributes)
    binding = session.io_binding()
    values = {}
    for name, array in feeds.items():
        if array is not None:
            values[name] = OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, values[name])
    for name, shape in outputs.items():
        if shared and name in shared:
            values[name] = values[shared[name]]
        else:
            values[name] = OrtValue.ortvalue_from_shape_and_type(shape, np.float32)
        binding.bind_ortvalue_output(name, values[name])

    def run():
        session.run_with_iobinding(binding)
        return values

    return run


def _onnx_session(op, feeds, outputs, num_threads, attributes):
    import onnxruntime
    from onnx import helper

    def value(name, shape, dtype=np.float32):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return helper.make_tensor_value_info(name, kind, shape)

    given = {name: array for name, array in feeds.items() if array is not None}
    names = [name if name in given else "" for name in feeds]
    graph = helper.make_graph(
        [helper.make_node(op, names, list(outputs), **attributes)],
        op,
        [value(name, array.shape, array.dtype) for name, array in given.items()],
        [value(name, shape) for name, shape in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def jax_attention(case: Case, x: Inputs, num_threads: int) -> Entry | None:
    # JAX has no setting for its threads: it takes every core, so it only plays where all do.
    if case.dtype != "float32" or num_threads != _available_cores():
        return None
    import jax

    def tokens_first(array):
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


def openvino_sdpa(case: Case, x: Inputs, num_threads: int) -> Entry | None:
    if case.dtype != "float32" or case.group > 1:
        return None
    import openvino
    from openvino import opset13

    arrays = [x.q, x.k, x.v]
    if case.masking:
        arrays.append(x.bias if x.mask is None else np.where(x.mask, 0, -np.inf).astype(np.float32))
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
    return Entry(request.infer, lambda result: result[0])


def _token_rows(array: np.ndarray) -> np.ndarray:
    """(batch, heads, seqlen, head_dim) -> (batch, seqlen, heads * head_dim)."""
    batch, heads, seqlen, head_dim = array.shape
    return array.swapaxes(1, 2).reshape(batch, seqlen, heads * head_dim)


def _heads_first(rows: np.ndarray, case: Case) -> np.ndarray:
    """(batch, seqlen_q, heads_q * head_dim) -> (batch, heads_q, seqlen_q, head_dim)."""
    return rows.reshape(case.batch, case.seqlen_q, case.heads_q, case.head_dim).swapaxes(1, 2)


def _mask_of_all_queries(case: Case, x: Inputs) -> np.ndarray:
    """The mask or bias as ONNX Runtime wants it: with a row for every query."""
    if x.mask is None:
        return x.bias
    shape = (len(x.mask), 1, case.seqlen_q, case.seqlen_k)
    return np.ascontiguousarray(np.broadcast_to(x.mask, shape))


def _available_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


OURS = "fastattn cpu"

CONTENDERS: dict[str, Callable[[Case, Inputs, int], Entry | None]] = {
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


def entry(name: str, case: Case, x: Inputs, num_threads: int) -> Entry | None:
    """The contender made ready, or None where it does not apply or is not installed."""
    try:
        return CONTENDERS[name](case, x, num_threads)
    except (ImportError, NotImplementedError):
        return None
