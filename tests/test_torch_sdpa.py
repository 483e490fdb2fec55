"""fastattn.torch.scaled_dot_product_attention beside torch's own, called in each of its ways."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import fastattn

torch = pytest.importorskip("torch")
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as theirs  # noqa: E402

from fastattn import torch as ours  # noqa: E402

INF = float("inf")
MATH = torch.nn.attention.SDPBackend.MATH


def direct(*arguments, **options):
    with torch.no_grad():
        return ours.scaled_dot_product_attention(*arguments, **options)


def recorded(query, *arguments, **options):
    query = query.clone().requires_grad_()
    return ours.scaled_dot_product_attention(query, *arguments, **options).detach()


def operator(*arguments, **options):
    return torch.ops.fastattn.scaled_dot_product_attention(*arguments, **options)


def dispatched(*arguments, **options):
    """By way of the dispatcher: a lazily negative query is none of which the values are at hand."""
    arguments = (torch._neg_view(-arguments[0]), *arguments[1:])
    return ours.scaled_dot_product_attention(*arguments, **options)


ways = pytest.mark.parametrize("way", [direct, recorded, operator, dispatched])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tensors(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_close(found, wanted, atol=1e-14):
    assert found.dtype == wanted.dtype
    assert found.stride() == wanted.stride() or not wanted.numel()
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


SHAPES = [
    ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
    ((2, 4, 3, 8), (1, 4, 5, 8), (2, 4, 5, 8), {}),
    ((2, 1, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
    ((2, 4, 3, 8), (2, 1, 5, 8), (2, 4, 5, 8), {}),
    ((2, 4, 3, 8), (2, 1, 5, 8), (2, 1, 5, 6), {}),
    ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), {"enable_gqa": True}),
    ((4, 3, 8), (4, 5, 8), (4, 5, 8), {}),
    ((3, 8), (4, 5, 8), (4, 5, 8), {}),
    ((4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
    ((3, 8), (5, 8), (5, 7), {"is_causal": True}),
    ((2, 3, 4, 6, 8), (1, 3, 4, 5, 8), (2, 1, 4, 5, 8), {}),
    ((1, 2, 1, 8), (1, 2, 5, 8), (1, 2, 5, 8), {"is_causal": True}),
    ((1, 2, 2, 8), (1, 2, 5, 8), (1, 2, 5, 8), {"is_causal": True, "scale": -0.3}),
    ((1, 2, 5, 8), (1, 2, 2, 8), (1, 2, 2, 8), {"is_causal": True, "scale": 0}),
    ((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8), {}),
    ((1, 2, 0, 8), (1, 2, 5, 8), (1, 2, 5, 8), {}),
    ((0, 2, 3, 8), (0, 2, 5, 8), (0, 2, 5, 8), {}),
    ((1, 2, 3, 0), (1, 2, 5, 0), (1, 2, 5, 4), {}),
]


@ways
@pytest.mark.parametrize(("q", "k", "v", "options"), SHAPES, ids=str)
def test_shapes(way, q, k, v, options):
    arrays = tensors(q, k, v)
    with torch.nn.attention.sdpa_kernel(MATH):
        wanted = theirs(*arrays, **options)
    assert_close(way(*arrays, **options), wanted.contiguous())


@ways
@pytest.mark.parametrize(
    "shape", [(3, 5), (3, 1), (1, 5), (1, 1), (4, 3, 5), (2, 1, 1, 5)], ids=str
)
def test_masks(way, shape):
    arrays = tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))
    (bias,) = tensors(shape)
    assert_close(way(*arrays, bias), theirs(*arrays, bias))
    assert_close(way(*arrays, bias > 0), theirs(*arrays, bias > 0))
    assert_close(way(*arrays, torch.where(bias > 0, bias, -INF)), theirs(*arrays, bias > 0), 2)


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(way, dtype):
    arrays = tensors(*[(2, 3, 9, 16)] * 3, dtype=dtype)
    mask = torch.randn(9, 9)  # float32 for each of them, as torch has it
    exact = theirs(*(a.double() for a in arrays), mask.double())
    found = way(*arrays, mask)
    assert found.dtype == dtype
    error = (found.double() - exact).abs().max().item()
    assert error <= 2 * torch.finfo(dtype).eps * exact.abs().max().item()


@ways
def test_memory_lies_as_torch_has_it(way):
    arrays = [a.transpose(1, 2) for a in tensors(*[(2, 7, 3, 8)] * 3)]
    for _ in range(2):  # the second call is known
        assert_close(way(*arrays), theirs(*arrays))
    arrays = [a.transpose(1, 2) for a in torch.randn(2, 7, 3, 3, 8).double().unbind(2)]
    assert_close(way(*arrays), theirs(*arrays))


def test_memory_of_arrays_lies_as_the_querys():
    q = np.ones((2, 7, 3, 8)).swapaxes(1, 2)
    for _ in range(2):
        assert fastattn.scaled_dot_product_attention(q, q, q).strides == q.strides
    one = np.broadcast_to(q, (4, *q.shape))
    assert fastattn.scaled_dot_product_attention(one, one, one).flags.c_contiguous


@ways
def test_numbers_may_be_tensors(way):
    arrays = tensors(*[(2, 5, 8)] * 3)
    assert_close(way(*arrays, scale=torch.tensor(0.25)), theirs(*arrays, scale=0.25))
    assert not way(*arrays, None, torch.tensor(1.0)).any()
    assert not way(*arrays, None, 1).any()


@pytest.mark.parametrize(
    "way", [direct, recorded, dispatched]
)  # not what takes tensors with values
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
def test_causal_biases(way):
    q, k = tensors((2, 3, 8), (2, 5, 8))
    for a, b in ((q, k), (k, q)):
        for bias in (causal_upper_left, causal_lower_right):
            mask = bias(a.shape[1], b.shape[1])
            wanted = theirs(a, b, b, mask._materialize())
            assert_close(way(a, b, b, mask), wanted)


@ways
def test_rows_without_keys(way):
    q, k = tensors((2, 3, 8), (2, 5, 8))
    mask = torch.tensor([[False], [True], [False]])
    for of_rows in (mask, torch.where(mask, 0.0, -INF)):
        out = way(q, k, k, of_rows)
        assert not out[:, [0, 2]].any()
        assert_close(out[:, 1:2], theirs(q, k, k)[:, 1:2])
    least = torch.full((3, 5), torch.finfo(torch.float32).min)
    assert_close(way(q, k, k, least), k.mean(1, keepdim=True).expand(q.shape).contiguous())


@ways
def test_what_hidden_keys_hold_does_not_matter(way):
    q, k = tensors((2, 3, 8), (2, 5, 8))
    mask = torch.arange(5) < 3
    wanted = way(q, k, k, mask)
    k[:, 3:] = torch.nan
    assert_close(way(q, k, k, mask), wanted, 0)
    q[:, 0] = torch.nan
    out = way(q, k, k, mask)
    assert out[:, 0].isnan().all()
    assert_close(out[:, 1:], wanted[:, 1:], 0)


# --- dropout ------------------------------------------------------------------------------------


@ways
def test_dropout_is_drawn_by_torchs_generator(way):
    q = torch.eye(64).repeat(2, 1, 1)
    first, second = (way(q, q, q, None, 0.25) for _ in "ab")
    torch.manual_seed(0)
    assert torch.equal(way(q, q, q, None, 0.25), first)
    assert not torch.equal(first, second)
    kept = (first > 0).double().mean().item()  # every value of eye() is seen by every row
    assert abs(kept - 0.75) < 0.02


# --- errors -------------------------------------------------------------------------------------

ERRORS = [
    ({"key": (2, 4, 5, 9)}, "query and key must have the same head_dim"),
    ({"value": (2, 4, 6, 7)}, "key and value must have the same seqlen_k"),
    ({"key": (2, 3, 5, 8)}, "query, key and value must have the same heads, or 1, unless enable_g"),
    ({"key": (3, 4, 5, 8)}, "leading dimensions of query, key and value must broadcast"),
    ({"query": (8,)}, "query must have rank 2 or more"),
    ({"attn_mask": torch.ones(3, 4)}, "attn_mask must broadcast to the scores"),
    ({"attn_mask": torch.ones(2, 3, 5)}, "attn_mask must broadcast to the scores"),
    ({"attn_mask": torch.ones(5, 2, 4, 3, 5)}, "attn_mask must broadcast to the scores"),
    ({"attn_mask": torch.ones(3, 5, dtype=torch.float16)}, "attn_mask must be bool, float32 or of"),
    ({"attn_mask": torch.ones(3, 5, dtype=torch.int64)}, "attn_mask must be bool, float32 or of"),
    ({"enable_gqa": True, "key": (2, 3, 5, 8), "value": (2, 3, 5, 8)}, "query heads must be a mul"),
    ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1, got 1.5"),
    ({"query": torch.float32}, "query, key and value must have the same dtype"),
    ({"query": torch.int32, "key": torch.int32, "value": torch.int32}, "query must be float16, bf"),
]
TYPES = [
    ({"query": [[1.0]]}, "query must be a"),
    ({"key": None}, "key must be a tensor, got NoneType"),
    ({"attn_mask": [[1.0]]}, "attn_mask must be a"),
    ({"is_causal": 1}, "is_causal must be a bool"),
    ({"enable_gqa": 1}, "enable_gqa must be a bool"),
    ({"scale": "x"}, "scale must be a real number"),
]


def broken(change):
    """Arguments that work, with a change."""
    query, key, value = tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))
    arguments = {"query": query, "key": key, "value": value}
    for name, value in change.items():
        if isinstance(value, tuple):
            (value,) = tensors(value)
        elif isinstance(value, torch.dtype):
            value = arguments[name].to(value)
        arguments[name] = value
    return arguments


def name_of(value):
    return getattr(value, "__name__", str(value)[:40])


# Integers have no gradients to record.
BROKEN = [(direct, *error) for error in ERRORS]
BROKEN += [(recorded, *error) for error in ERRORS if torch.int32 not in error[0].values()]


@pytest.mark.parametrize(("way", "change", "message"), BROKEN, ids=name_of)
def test_errors_are_torchs_and_ours(way, change, message):
    arguments = broken(change)
    with torch.nn.attention.sdpa_kernel(MATH), pytest.raises(RuntimeError):
        theirs(**arguments)
    query = arguments.pop("query")
    with pytest.raises(ours.ArgumentError, match=message) as caught:
        way(query, **arguments)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("change", "message"), TYPES, ids=str)
def test_types(change, message):
    arguments = broken(change)
    with pytest.raises(TypeError):
        theirs(**arguments)
    with pytest.raises(ours.ArgumentTypeError, match=message):
        direct(**arguments)


@pytest.mark.parametrize("other", [None, np.ones((2, 3))], ids=["nothing", "an array"])
def test_attention_takes_tensors(other):
    q = torch.ones(2, 3)
    for name in "qkv":
        arguments = {"q": q, "k": q, "v": q, name: other}
        with pytest.raises(ours.ArgumentTypeError, match=f"{name} must be a tensor, got"):
            ours.attention(**arguments)


def test_what_torch_leaves_open_is_refused():
    q, k = tensors((2, 3, 8), (2, 5, 8))
    with pytest.raises(ours.ArgumentError, match="attn_mask must be None if is_causal is True"):
        direct(q, k, k, torch.ones(3, 5), is_causal=True)
    with pytest.raises(ours.ArgumentError, match="scale must be finite in float64, got nan"):
        direct(q, k, k, scale=float("nan"))
    with pytest.raises(TypeError, match="takes from 3 to 6 positional arguments but 7"):
        direct(q, k, k, None, 0.0, False, 1.0)


def test_masks_of_rank_0_and_1_broadcast():
    q, k = tensors((2, 3, 8), (2, 5, 8))
    mask = torch.arange(5) < 3
    assert_close(direct(q, k, k, mask), theirs(q, k, k, mask[None]))
    assert_close(direct(q, k, k, mask[0]), theirs(q, k, k))


# --- subclasses and modes -----------------------------------------------------------------------


def test_autocast():
    q, mask = torch.randn(2, 3, 8), torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        for attn_mask in (None, mask, mask > 0):
            found = ours.scaled_dot_product_attention(q, q, q, attn_mask)
            assert_close(found, theirs(q, q, q, attn_mask), 0.02)
        assert ours.scaled_dot_product_attention(*[q.double()] * 3).dtype == torch.float64
        assert ours.attention(q, q, q).dtype == torch.bfloat16


def test_other_devices():
    q = torch.ones(2, 3, 8, device="meta")
    assert ours.scaled_dot_product_attention(q, q, q).device.type == "meta"  # shapes alone
    with FakeTensorMode(), mock.patch.object(F, "scaled_dot_product_attention") as torchs_own:
        q, mask = torch.ones(2, 3, 8, device="cuda"), torch.ones(3, 3, device="cuda")
        found = ours.scaled_dot_product_attention(q, q, q, mask, scale=2.0)
        torchs_own.assert_called_once_with(q, q, q, mask, 0.0, False, scale=2.0, enable_gqa=False)
        assert found is torchs_own.return_value
        with pytest.raises(NotImplementedError, match="must be in the memory of the CPU, got cuda"):
            ours.attention(q, q, q)


def test_sparse_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="'fastattn::attention'"):
        ours.scaled_dot_product_attention(*[torch.eye(3).to_sparse()] * 3)


@pytest.mark.parametrize("name", ["Parameter", "Buffer"])
def test_parameters_without_gradients(name):
    q = getattr(torch.nn, name)(torch.randn(2, 3, 8))
    with torch.no_grad():
        assert_close(ours.scaled_dot_product_attention(q, q, q), theirs(q, q, q), 1e-6)
