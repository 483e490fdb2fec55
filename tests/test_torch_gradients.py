"""Gradients of fastattn.torch: finite differences, torch's own, torch.func, and what is refused."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad, gradcheck  # noqa: E402
from torch.func import grad, jvp, vmap  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as theirs  # noqa: E402

from fastattn import torch as ours  # noqa: E402

sdpa, attention = ours.scaled_dot_product_attention, ours.attention


def operator(*arguments, **options):
    return torch.ops.fastattn.scaled_dot_product_attention(*arguments, **options)


ways = pytest.mark.parametrize("way", [sdpa, operator], ids=["recorded", "operator"])


def tensors(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def leaves(*shapes, **options):
    return [t.requires_grad_() for t in tensors(*shapes, **options)]


# --- where they lie -----------------------------------------------------------------------------


def in_many_orders(heads, seqlen):
    """Views of shape (2, heads, seqlen, 8) with axes in other orders, gaps, and shared memory."""
    yield torch.randn(2, heads, seqlen, 8)
    yield torch.randn(2, seqlen, heads, 8).transpose(1, 2)
    yield torch.randn(2, seqlen, 3, heads, 8)[:, :, 1].transpose(1, 2)
    yield torch.randn(2, heads, 8, seqlen).transpose(2, 3)
    yield torch.randn(2, heads, seqlen, 16)[..., ::2]
    yield torch.randn(seqlen, heads, 8).transpose(0, 1).expand(2, -1, -1, -1)
    yield torch.randn(1, seqlen, heads, 8).transpose(1, 2)


def test_gradients_lie_as_their_tensors():
    """Tokens before heads, as models have them: transposed back, they are contiguous. And the
    compiler's stand-ins lie as they do.
    """
    flags = (0.3, True, "top_left", None, 1, 0, 2.0, 0.0)
    for q, k in itertools.product(in_many_orders(4, 3), in_many_orders(2, 5)):
        call = (q, k, k, *(None,) * 9, *flags)
        out, lse = torch.ops.fastattn.attention(*call)
        arguments = (out, None, out, lse, *call, [False] * 3)
        found = torch.ops.fastattn.attention_backward(*arguments)
        with FakeTensorMode() as mode:
            stand_ins = (mode.from_tensor(a) if torch.is_tensor(a) else a for a in arguments)
            fake = torch.ops.fastattn.attention_backward(*stand_ins)
        assert [g.stride() for g in found] == [g.stride() for g in fake]
    assert found[1].stride()[1:] == k.stride()[1:]


# --- finite differences -------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("mask", [(3, 5), (2, 1, 1, 5), (4, 3, 1)], ids=str)
def test_gradcheck_with_a_mask(way, mask):
    assert gradcheck(way, leaves((2, 4, 3, 4), (2, 4, 5, 4), (2, 4, 5, 3), mask))


@ways
def test_gradcheck_causal_and_broadcast(way):
    arrays = leaves((2, 4, 3, 4), (1, 1, 5, 4), (2, 2, 5, 3))
    assert gradcheck(lambda q, k, v: way(q, k, v[:, :1], is_causal=True, scale=0.7), arrays)
    assert gradcheck(lambda q, k, v: way(q, k.expand(-1, 2, -1, -1), v, enable_gqa=True), arrays)
    arrays = leaves((3, 4), (4, 5, 4), (5, 2))
    assert gradcheck(lambda q, k, v: way(q, k, v), arrays)


def test_gradcheck_of_the_other_arguments():
    q, k, v = leaves((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))
    bias, sinks, alibi = leaves((3, 5), (4,), (4,))

    def both(q, k, v, bias, sinks, alibi):
        added = {"bias": bias, "sinks": sinks, "alibi": alibi}
        lengths = {"kv_len": torch.tensor([4, 5]), "kv_start": 1, "align": torch.tensor([0, 1])}
        return attention(q, k, v, **added, **lengths, window=(2, 1), softcap=3.0, return_lse=True)

    assert gradcheck(both, (q, k, v, bias, sinks, alibi))
    assert gradcheck(lambda *a: attention(*a, return_lse=True)[1], (q, k, v))
    seeded = {"dropout_p": 0.5, "dropout_seed": 3, "causal": True}
    assert gradcheck(lambda *a: attention(*a, **seeded), (q, k, v))


# --- torch's own --------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_same_gradients_as_torch(way, dtype):
    shapes = [(2, 3, 9, 16)] * 3 + [(9, 9)]
    mine, exact = leaves(*shapes, dtype=dtype), leaves(*shapes)
    with torch.no_grad():
        for a, b in zip(mine, exact, strict=True):
            b.copy_(a)
    out = way(*mine)
    out.backward(torch.ones_like(out))
    theirs(*exact).sum().backward()
    for a, b in zip(mine, exact, strict=True):
        assert a.grad.dtype == dtype
        error = (a.grad.double() - b.grad).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * b.grad.abs().max()


@ways
def test_gradients_are_finite_where_no_key_is_seen(way):
    arrays = leaves((2, 3, 8), (2, 5, 8), (2, 5, 8))
    mask = torch.tensor([[False], [True], [False]])
    way(*arrays, mask).sum().backward()
    assert not arrays[0].grad[:, [0, 2]].any()
    assert all(a.grad.isfinite().all() for a in arrays)


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = tensors((2, 3, 8), (2, 5, 8), (2, 5, 8))
    k.requires_grad_()
    out = sdpa(q, k, v)
    assert out.requires_grad
    out.sum().backward()
    assert (q.grad, v.grad) == (None, None)
    assert k.grad is not None
    with torch.no_grad():
        assert not sdpa(q, k, v).requires_grad


def test_dropout_again_in_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    def gradient(call):
        (q,) = leaves((2, 9, 8))
        torch.manual_seed(1)
        call(q).sum().backward()
        return q.grad

    def layer(q):
        return sdpa(q, q, q, dropout_p=0.5)

    again = gradient(lambda q: checkpoint(layer, q, use_reentrant=False))
    assert torch.equal(again, gradient(layer))


# --- torch.func ---------------------------------------------------------------------------------


def test_grad_and_vmap_agree_with_torch():
    shapes = (2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6), (3, 5)
    arrays = tensors(*shapes)

    def gradients(call):
        return grad(lambda *a: call(*a).pow(2).sum(), argnums=(0, 1, 2, 3))

    mine, other = gradients(sdpa), gradients(theirs)
    torch.testing.assert_close(mine(*arrays), other(*arrays))
    axes = (0, 0, 0, None)
    found = vmap(mine, axes)(*arrays)
    torch.testing.assert_close(found, vmap(other, axes)(*arrays))
    moved = [arrays[0][0], arrays[1].movedim(0, 2), *arrays[2:]]
    axes = (None, 2, 0, None)
    torch.testing.assert_close(vmap(mine, axes)(*moved), vmap(other, axes)(*moved))


@pytest.mark.parametrize("rank", [2, 3])
def test_vmap_of_ranks(rank):
    arrays = tensors(*[(2, 3, 4, 5, 8)[-rank - 1 :]] * 3)
    found = vmap(sdpa)(*arrays)
    torch.testing.assert_close(found, theirs(*arrays))
    assert vmap(vmap(sdpa))(*tensors(*[(2, 3, 4, 8)] * 3)).shape == (2, 3, 4, 8)


def test_vmap_of_lengths_and_slopes():
    q, slopes = tensors((2, 3, 4, 5, 8), (2, 4))
    lengths = torch.tensor([3, 5])

    def call(q, slopes, kv_len):
        return attention(q, q, q, alibi=slopes, kv_len=kv_len, return_lse=True)

    found = vmap(call)(q, slopes, lengths)
    wanted = [call(*each) for each in zip(q, slopes, lengths, strict=True)]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))


def test_dropout_under_vmap():
    (q,) = tensors((2, 3, 5, 8))
    out = vmap(lambda q: sdpa(q, q, q, dropout_p=0.5), randomness="different")(
        q[:1].expand(2, -1, -1, -1)
    )
    assert not torch.equal(out[0], out[1])
    with pytest.raises(NotImplementedError, match="needs randomness='different'"):
        vmap(lambda q: sdpa(q, q, q, dropout_p=0.5), randomness="same")(q)


# --- refused ------------------------------------------------------------------------------------


@ways
def test_second_derivatives_are_refused(way):
    arrays = leaves(*[(2, 3, 8)] * 3)
    (first,) = torch.autograd.grad(way(*arrays).sum(), arrays[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="fastattn has no second derivatives: call torch"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_is_refused():
    (q,) = tensors((2, 3, 8))
    with pytest.raises(RuntimeError, match="jvp"):
        jvp(lambda q: sdpa(q, q, q), (q,), (q,))
    with forward_ad.dual_level():
        torch.testing.assert_close(sdpa(q, q, q), theirs(q, q, q))
        with pytest.raises(RuntimeError, match="jvp"):
            sdpa(forward_ad.make_dual(q, q), q, q)
