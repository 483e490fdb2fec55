"""What a face costs on top of the core: the same call through both, on the same memory.

python bench/faces.py
python bench/faces.py --only 'jax*' --rounds 21
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import repository
from rich.table import Table

import fastattn
from fastattn.benchmark import contest
from fastattn.commands import terminal

# (batch, tokens, heads, head_dim) of a call with almost nothing to compute, and of small ones
SHAPES = ((1, 1, 1, 16), (1, 16, 4, 64), (1, 128, 4, 64))
Call = Callable[[], Any]
Pair = tuple[Call, Call]  # through the face, and the core alone


def inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """q, k and v, tokens before heads."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


def core(arrays: list[np.ndarray]) -> Call:
    q, k, v = (a.swapaxes(1, 2) for a in arrays)
    return lambda: fastattn.attention(q, k, v, causal=True, align="top_left").swapaxes(1, 2)


def jax_eager(shape: tuple[int, ...]) -> Pair:
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention

    arrays = [jnp.asarray(a) for a in inputs(shape)]
    alone = core([np.asarray(a) for a in arrays])
    return lambda: dot_product_attention(*arrays, is_causal=True).block_until_ready(), alone


def jax_jit(shape: tuple[int, ...]) -> Pair:
    import jax
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention

    arrays = [jnp.asarray(a) for a in inputs(shape)]
    alone = core([np.asarray(a) for a in arrays])
    compiled = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))
    return lambda: compiled(*arrays).block_until_ready(), alone


def jax_callback(shape: tuple[int, ...]) -> Pair:
    """What fastattn.jax does not use: the core as a jax.pure_callback."""
    import jax
    import jax.numpy as jnp

    def attention(*arrays: Any) -> np.ndarray:
        return core([np.asarray(a) for a in arrays])()

    arrays = [jnp.asarray(a) for a in inputs(shape)]
    alone = core([np.asarray(a) for a in arrays])
    like = jax.ShapeDtypeStruct(shape, np.float32)
    compiled = jax.jit(lambda q, k, v: jax.pure_callback(attention, like, q, k, v))
    return lambda: compiled(*arrays).block_until_ready(), alone


def onnx_attention(shape: tuple[int, ...]) -> Pair:
    from fastattn.onnx import attention

    arrays = inputs(shape)
    q, k, v = (a.swapaxes(1, 2) for a in arrays)
    alone = core(arrays)
    return lambda: attention(q, k, v, is_causal=1).Y.swapaxes(1, 2), alone


def onnx_packed(shape: tuple[int, ...]) -> Pair:
    from fastattn.onnx import attention

    arrays, heads = inputs(shape), shape[2]
    alone = core(arrays)
    packed = [a.reshape(*shape[:2], -1) for a in arrays]
    counts = {"q_num_heads": heads, "kv_num_heads": heads}
    return lambda: attention(*packed, is_causal=1, **counts).Y.reshape(shape), alone


def onnx_past(shape: tuple[int, ...]) -> Pair:
    """One token after a past of the others; the core alone is given both joined."""
    from fastattn.onnx import attention

    q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2)) for a in inputs(shape))
    past, new = slice(0, -1), slice(-1, None)
    operands = [np.ascontiguousarray(a[..., new, :]) for a in (q, k, v)]
    pasts = [np.ascontiguousarray(a[..., past, :]) for a in (k, v)]
    past_len = shape[1] - 1

    def alone() -> np.ndarray:
        joined = [np.concatenate((a, b), 2) for a, b in zip(pasts, operands[1:], strict=True)]
        return fastattn.attention(operands[0], *joined, causal=True, align=past_len)

    return lambda: attention(*operands, None, *pasts, is_causal=1).Y, alone


def onnx_rotary(shape: tuple[int, ...]) -> Pair:
    """The core alone is given the angles of each token, which ONNX looks up in a table."""
    from fastattn import nn
    from fastattn.onnx import rotary_embedding

    x = inputs(shape)[0].swapaxes(1, 2)
    table = nn.positions.Rope(shape[3]).rotation(np.arange(shape[1]))
    where = np.arange(shape[1])[None].repeat(shape[0], axis=0)
    cos, sin = table.cos[where][:, None], table.sin[where][:, None]
    return (
        lambda: rotary_embedding(x, table.cos, table.sin, where),
        lambda: nn.positions.apply_rotary(x, cos, sin),
    )


def onnx_norm(shape: tuple[int, ...]) -> Pair:
    from fastattn import nn
    from fastattn.onnx import layer_normalization

    x, ones = inputs(shape)[0], np.ones(shape[3], np.float32)
    weights = nn.LayerNormWeights(ones, ones)
    return lambda: layer_normalization(x, ones, ones).Y, lambda: nn.layer_norm(x, weights)


def transformers(shape: tuple[int, ...]) -> Pair:
    """A layer's call without a mask."""
    return _layer(shape, None)


def transformers_mask(shape: tuple[int, ...]) -> Pair:
    """A layer's call with the mask of a padded batch."""
    tokens = shape[1]
    return _layer(shape, np.tri(tokens, dtype=bool)[None, None])


def _layer(shape: tuple[int, ...], mask: np.ndarray | None) -> Pair:
    import torch

    from fastattn.transformers import attend

    arrays = inputs(shape)
    q, k, v = (a.swapaxes(1, 2) for a in arrays)
    tensors = [torch.from_numpy(a).transpose(1, 2) for a in arrays]
    added = None if mask is None else torch.from_numpy(mask)

    def face() -> Any:
        return attend(None, *tensors, added)[0]

    def alone() -> Any:
        flags = {"causal": True, "align": "top_left"} if mask is None else {"mask": mask}
        return fastattn.attention(q, k, v, **flags).swapaxes(1, 2)

    return face, alone


def flash_func(shape: tuple[int, ...]) -> Pair:
    from fastattn.flash_attn import flash_attn_func

    q, k, v = inputs(shape)
    return lambda: flash_attn_func(q, k, v, causal=True), core([q, k, v])


def flash_tensors(shape: tuple[int, ...]) -> Pair:
    """The core alone is given tensors, too."""
    import torch

    from fastattn.flash_attn import flash_attn_func

    q, k, v = (torch.from_numpy(a) for a in inputs(shape))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    return (
        lambda: flash_attn_func(q, k, v, causal=True),
        lambda: fastattn.attention(*heads_first, causal=True).transpose(1, 2),
    )


def flash_varlen(shape: tuple[int, ...]) -> Pair:
    from fastattn.flash_attn import flash_attn_varlen_func

    arrays = [a.reshape(-1, *shape[2:]) for a in inputs(shape)]
    edges = np.arange(shape[0] + 1, dtype=np.int32) * shape[1]
    lengths = edges, edges
    return (
        lambda: flash_attn_varlen_func(*arrays, *lengths, *shape[1:2] * 2, causal=True),
        lambda: fastattn.attention_varlen(*arrays, *lengths, causal=True),
    )


def flash_kvcache(shape: tuple[int, ...]) -> Pair:
    """The core alone is given the table that the face makes."""
    from fastattn.flash_attn import flash_attn_with_kvcache

    q, k, v = inputs(shape)
    heads_first = [a.swapaxes(1, 2) for a in (q, k, v)]
    lengths, rows = np.full(shape[0], shape[1]), np.arange(shape[0])[:, None]
    places = {"block_table": rows, "kv_len": lengths}
    return (
        lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True),
        lambda: fastattn.attention(*heads_first, **places, causal=True).swapaxes(1, 2),
    )


def flash_append(shape: tuple[int, ...]) -> Pair:
    """One token after a cache of the others; what writes it beside the core knows its place."""
    return _one_token(shape, turns=False)


def flash_rotary(shape: tuple[int, ...]) -> Pair:
    """The same, turned; beside the core, query and key are turned by angles that are known."""
    return _one_token(shape, turns=True)


def _one_token(shape: tuple[int, ...], turns: bool) -> Pair:
    from fastattn import nn
    from fastattn.flash_attn import flash_attn_with_kvcache

    caches, last = inputs(shape)[1:], shape[1] - 1
    new = [np.ascontiguousarray(a[:, -1:]) for a in inputs(shape)]
    lengths, rows = np.full(shape[0], last), np.arange(shape[0])[:, None]
    places = {"block_table": rows, "kv_len": lengths + 1, "causal": True}
    table = nn.positions.Rope(shape[3]).rotation(np.arange(shape[1]))
    options = {"rotary_cos": table.cos, "rotary_sin": table.sin} if turns else {}
    angles = table.cos[last:], table.sin[last:]

    def alone() -> np.ndarray:
        q, k, v = new
        if turns:
            q, k = (nn.positions.apply_rotary(a, *angles, interleaved=True) for a in (q, k))
        for cache, token in zip(caches, (k, v), strict=True):
            cache[:, last:] = token
        operands = (a.swapaxes(1, 2) for a in (q, *caches))
        return fastattn.attention(*operands, **places).swapaxes(1, 2)

    def face() -> np.ndarray:
        q, k, v = new
        flags = {"cache_seqlens": lengths, "causal": True, **options}
        return flash_attn_with_kvcache(q, *caches, k, v, **flags)

    return face, alone


def torch_call(make: Callable[[Any], Call], **options: Any) -> Callable[[tuple[int, ...]], Pair]:
    """A way through fastattn.torch: make(tensors) returns the call; options are for the core."""

    def pair(shape: tuple[int, ...]) -> Pair:
        import torch

        arrays = [a.swapaxes(1, 2) for a in inputs(shape)]
        flags = {"causal": True, "align": "top_left"} | options

        def alone() -> np.ndarray:
            found = fastattn.attention(*arrays, **flags)
            return found[0] if isinstance(found, tuple) else found

        return make([torch.from_numpy(a) for a in arrays]), alone

    return pair


def torch_direct(tensors: list[Any]) -> Call:
    from fastattn.torch import scaled_dot_product_attention

    return lambda: scaled_dot_product_attention(*tensors, is_causal=True)


def torch_recorded(tensors: list[Any]) -> Call:
    from fastattn.torch import scaled_dot_product_attention

    tensors = [tensors[0].clone().requires_grad_(), *tensors[1:]]
    return lambda: scaled_dot_product_attention(*tensors, is_causal=True).detach()


def torch_operator(tensors: list[Any]) -> Call:
    import torch

    call = _operator_call(tensors)
    return lambda: torch.ops.fastattn.attention(*call)[0]


def torch_empty(shape: tuple[int, ...]) -> Pair:
    """The floor of "torch.ops": an operator of the same arguments that only makes its results, and
    after it the core alone.
    """
    import torch

    q, k, v = (torch.from_numpy(a.swapaxes(1, 2)) for a in inputs(shape))
    call, alone = _operator_call([q, k, v]), core(inputs(shape))
    _, operator = _empty_operator()

    def face() -> np.ndarray:
        operator(*call)
        return alone()

    return face, alone


@functools.cache
def _empty_operator() -> tuple[Any, Call]:
    """(the library that must outlive it, the operator)."""
    import torch

    from fastattn.torch.ops import ARGUMENTS

    library = torch.library.Library("faces", "DEF")
    library.define(f"empty({ARGUMENTS}) -> (Tensor, Tensor)")
    library.impl("empty", lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[:3])), "CPU")
    return library, torch.ops.faces.empty


def _operator_call(tensors: list[Any]) -> tuple[Any, ...]:
    return (*tensors, *[None] * 10, True, "top_left", None, None, 0, 0.0, 0.0)


FACES: dict[str, Callable[[tuple[int, ...]], Pair]] = {
    "jax": jax_eager,
    "jax, jit": jax_jit,
    "jax, pure_callback": jax_callback,
    "transformers": transformers,
    "transformers, mask": transformers_mask,
    "onnx attention": onnx_attention,
    "onnx attention, packed": onnx_packed,
    "onnx attention, past": onnx_past,
    "onnx rotary": onnx_rotary,
    "onnx norm": onnx_norm,
    "flash_attn": flash_func,
    "flash_attn, tensors": flash_tensors,
    "flash_attn, varlen": flash_varlen,
    "flash_attn, kvcache": flash_kvcache,
    "flash_attn, kvcache, append": flash_append,
    "flash_attn, kvcache, rotary": flash_rotary,
    "torch": torch_call(torch_direct),
    "torch, with gradients": torch_call(torch_recorded, return_lse=True),
    "torch.ops": torch_call(torch_operator, return_lse=True),
    "torch.ops, empty": torch_empty,
}


def measure(face: Call, alone: Call, rounds: int) -> tuple[float, float]:
    """Microseconds of both, medians over rounds in turn. Raises AssertionError if they disagree."""
    np.testing.assert_allclose(np.asarray(face()), alone(), rtol=0, atol=1e-5)
    found = contest.paired(face, alone, rounds)
    through, plain = (1e6 * float(np.median(seconds)) for seconds in found)
    return through, plain


def main() -> None:
    parser = repository.parser(__doc__)
    parser.add_argument("--only", default="*", help="faces or patterns, comma-separated")
    parser.add_argument("--rounds", type=terminal.count, default=9, help="default 9")
    options = parser.parse_args()
    # Of two threads, one would fall asleep between the calls of a face, and not between the core's.
    fastattn.set_num_threads(1)
    table = Table("face", "batch × tokens × heads × head_dim", "face µs", "core µs", "added µs")
    patterns = options.only.split(",")
    for name, make in FACES.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        for shape in SHAPES:
            through, alone = measure(*make(shape), options.rounds)
            cells = (f"{number:.1f}" for number in (through, alone, through - alone))
            table.add_row(name, " × ".join(map(str, shape)), *cells)
    terminal.console().print(table)


if __name__ == "__main__":
    main()
