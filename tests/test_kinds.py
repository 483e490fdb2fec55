"""Arrays of other libraries go in without a copy, and results come back as the caller's kind."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from processes import fresh
from rules import ones

import fastattn
from fastattn.kinds import is_on_device, like, numpy_view

BF16 = np.dtype(ml_dtypes.bfloat16)
HALF_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Exported:
    """An array that other libraries see by DLPack alone."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


class Standard:
    """An array of a library with the standard's namespace."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __array_namespace__(self):
        return type("namespace", (), {"asarray": Standard})


class OnDevice:
    def __init__(self):
        self.__cuda_array_interface__ = {}


# --- seen without a copy ------------------------------------------------------------------------


@pytest.mark.parametrize("name", HALF_FLOATS)
def test_a_tensor_is_seen_without_a_copy(torch, name):
    x = torch.randn(3, 4, 5).to(getattr(torch, name)).transpose(0, 2)[1:, ::2]
    seen = numpy_view("x", x)
    assert (seen.dtype.name, seen.shape, seen.flags.writeable) == (name, tuple(x.shape), True)
    np.testing.assert_array_equal(seen.astype("f8"), x.double().numpy())
    seen[...] = 7
    assert (x == 7).all()


def test_a_parameter_is_seen_where_gradients_are_off(torch):
    x = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))
    rule = "x must not require a gradient, which would not be recorded. Pass x"
    with pytest.raises(TypeError, match=rule):
        numpy_view("x", x)
    with torch.no_grad():
        assert numpy_view("x", x).dtype == BF16


def test_dlpack_is_seen_without_a_copy():
    array = ones(3, 4)
    assert np.shares_memory(numpy_view("x", Exported(array)), array)


def test_numpy_arrays_are_themselves():
    array = ones(3)
    assert numpy_view("x", array) is array
    assert like(array, array) is array
    assert like([1.0], array) is array
    assert not is_on_device(array)


AWKWARD = {
    "sparse": lambda torch: torch.eye(3).to_sparse(),
    "quantized": lambda torch: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    "meta": lambda torch: torch.empty(3, 3, device="meta"),
    "nested": lambda torch: torch.nested.nested_tensor([torch.eye(3)], layout=torch.jagged),
    "negative": lambda torch: torch.ones(3, 3, dtype=torch.complex64).conj().imag,
    "float8": lambda torch: torch.eye(3).to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", AWKWARD)
def test_other_tensors_are_refused(torch, kind):
    x = AWKWARD[kind](torch)
    with pytest.raises(TypeError, match="x must be a dense tensor in the memory of the CPU, got "):
        numpy_view("x", x)
    assert not is_on_device(x)


def test_a_tensor_within_vmap_is_refused(torch):
    x = torch.ones(3, 2, 4)
    with pytest.raises(TypeError, match="q must be a dense tensor in the memory of the CPU, got "):
        torch.vmap(lambda x: fastattn.attention(x, x, x))(x)


@pytest.mark.parametrize("x", [OnDevice(), Exported(ones(2, 2), (2, 0))], ids=["cuda", "dlpack"])
def test_arrays_of_a_device_are_refused(x):
    assert is_on_device(x)
    rule = "x must be an array in the memory of the CPU, got .*: it lies in the memory of a CUDA"
    with pytest.raises(TypeError, match=rule):
        numpy_view("x", x)


# --- the result is of the caller's kind ---------------------------------------------------------


def tensors(torch, name, *shapes):
    return [torch.randn(shape).to(getattr(torch, name)) for shape in shapes]


def assert_same_bits(tensor, array, torch):
    """The tensor holds what the array holds."""
    assert type(tensor) is torch.Tensor
    seen = numpy_view("x", tensor)
    assert seen.dtype == array.dtype
    assert (seen.shape, seen.tobytes()) == (array.shape, array.tobytes())


@pytest.mark.parametrize("name", HALF_FLOATS)
def test_attention_of_tensors(torch, name):
    q, k, v, bias = tensors(torch, name, (2, 4, 7, 8), (2, 2, 5, 8), (2, 2, 5, 6), (7, 5))
    arrays = [numpy_view("x", x) for x in (q, k, v)]
    options = {"bias": bias, "kv_len": torch.tensor([5, 3]), "sinks": torch.zeros(4)}
    plain = {key: numpy_view("x", x) for key, x in options.items()}
    found = fastattn.attention(q, k, v, **options, return_lse=True)
    wanted = fastattn.attention(*arrays, **plain, return_lse=True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs, torch)
    for _ in range(2):  # the second time, the call is known
        assert_same_bits(fastattn.attention(q, k, v), fastattn.attention(*arrays), torch)


def test_out_may_be_a_tensor(torch):
    q = torch.randn(7, 8)
    out = torch.full((7, 8), torch.nan)
    assert fastattn.attention(q, q, q, out=out) is out
    assert torch.equal(out, fastattn.attention(q, q, q))
    with pytest.raises(ValueError, match="out must not overlap q"):
        fastattn.attention(q, q, q, out=q)


def test_every_function_returns_tensors(torch):
    (x,) = tensors(torch, "float32", (6, 2, 8))
    edges = torch.tensor([0, 2, 6])
    out, lse = fastattn.attention_varlen(x, x, x, edges, edges, return_lse=True)
    assert (out.shape, lse.shape) == (x.shape, (2, 6))
    found = [out, lse, *fastattn.attention_varlen_backward(out, x, x, x, out, lse, edges, edges)]
    bias, slopes = torch.randn(2, 2), torch.ones(6)
    options = {"bias": bias, "alibi": slopes, "sinks": slopes}
    out, lse = fastattn.attention(x, x, x, **options, return_lse=True)
    asked = {"return_dbias": True, "return_dalibi": True, "return_dsinks": True}
    found += fastattn.attention_backward(out, x, x, x, out, lse, **options, **asked)
    found += fastattn.merge(out, lse, out, lse)
    found += [fastattn.attention_weights(x, x), fastattn.attention_key_sums(x, x)]
    found += fastattn.merge(*[out[0, 0], lse[0, 0]] * 2)
    found += [fastattn.scaled_dot_product_attention(x, x, x, bias)]
    assert len(found) == 18
    assert all(type(a) is torch.Tensor for a in found)


def test_modifiers_may_index_tensors(torch):
    x, slopes = torch.randn(2, 5, 4), torch.tensor([0.5, 2.0], dtype=torch.float64)

    def alibi(score, b, h, i, j, aux):
        return score - aux[0][h] * (i - j)

    found = fastattn.attention(x, x, x, score_mod=alibi, aux=(slopes,), backend="numpy")
    wanted = fastattn.attention(x, x, x, score_mod=alibi, aux=(slopes.numpy(),), backend="numpy")
    assert torch.equal(found, wanted)


def test_other_libraries_get_their_own():
    array = ones(2, 3, 4)
    found = fastattn.attention(Standard(array), array, array)
    assert type(found) is Standard
    np.testing.assert_array_equal(found.array, fastattn.attention(array, array, array))


@pytest.mark.slow
def test_arrays_of_jax():
    pytest.importorskip("jax")
    code = """
import json, jax, fastattn, numpy as np
from fastattn.kinds import numpy_view
jax.config.update("jax_platforms", "cpu")
q = jax.numpy.ones((2, 3, 4), jax.numpy.bfloat16)
out, lse = fastattn.attention(q, q, q, return_lse=True, backend="numpy")
shared = numpy_view("q", q).ctypes.data == q.unsafe_buffer_pointer()
try:
    jax.jit(fastattn.attention)(q, q, q)
except TypeError as error:
    refused = str(error)
print(json.dumps([str(out.dtype), isinstance(lse, jax.Array), shared, refused]))
"""
    *found, refused = fresh(code, None)
    assert found == ["bfloat16", True, True]
    assert refused.startswith("q must be an array in the memory of the CPU, got ")
