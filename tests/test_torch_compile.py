"""fastattn.torch within torch.compile and torch.export: one graph, with fastattn's operator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention as theirs  # noqa: E402

from fastattn import torch as ours  # noqa: E402

sdpa = ours.scaled_dot_product_attention
# What torch itself deprecates, its compiler still calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return sdpa(q, k, v, mask, scale=0.3, enable_gqa=True)


def arrays():
    torch.manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6), (3, 5)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def nodes(graph_module):
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


@pytest.fixture
def compiled():
    """A function that compiles without breaks: by tracing alone, no C++ compiler is needed."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def test_compiled_with_gradients(compiled):
    found, wanted = [], []
    for call, results in ((compiled(Attention()), found), (Attention(), wanted)):
        inputs = [a.requires_grad_() for a in arrays()]
        out = call(*inputs)
        out.pow(2).sum().backward()
        results += [out, *(a.grad for a in inputs)]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_compiled_for_any_length(compiled):
    call = compiled(lambda q: sdpa(q, q, q, is_causal=True) + 1)
    for length in (7, 9, 12):
        q = torch.randn(2, length, 3, 8).transpose(1, 2)
        torch.testing.assert_close(call(q), theirs(q, q, q, is_causal=True) + 1)


def test_compiled_with_the_other_arguments(compiled):
    q, k, v, bias = arrays()
    options = {"bias": bias, "window": (2, 0), "softcap": 5.0, "sinks": torch.ones(4).double()}
    options |= {"kv_len": torch.tensor([4, 5]), "return_lse": True}
    found = compiled(lambda q: ours.attention(q, k, v, **options))(q)
    torch.testing.assert_close(found, ours.attention(q, k, v, **options), rtol=0, atol=0)


def test_compiled_dropout_and_autocast(compiled):
    q = torch.randn(2, 64, 8)

    def call(q):
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, q, q, dropout_p=0.5)

    first, second = (compiled(call)(q) for _ in "ab")
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    inputs = tuple(arrays())
    program = torch.export.export(Attention(), inputs, strict=strict)
    assert nodes(program.graph_module) == ["fastattn.scaled_dot_product_attention.default"]
    assert torch.equal(program.module()(*inputs), Attention()(*inputs))
    lower = program.run_decompositions()
    assert nodes(lower.graph_module)[0] == "fastattn.attention.default"
    assert torch.equal(lower.module()(*inputs), Attention()(*inputs))


def test_operators_keep_their_contracts():
    """torch's own tests of an operator: schema, fake kernel, autograd, tracing."""
    q, k, v, bias = (a.requires_grad_() for a in arrays())
    empty = (None,) * 8
    scalars = (0.3, True, "top_left", None, 1, 0, 2.0, 0.0)
    call = (q, k, v, bias, *empty, *scalars)
    torch.library.opcheck(torch.ops.fastattn.attention.default, call)
    tokens_first = torch.randn(3, 2, 4, 8).permute(1, 2, 0, 3).double()
    torch.library.opcheck(torch.ops.fastattn.attention.default, (tokens_first, *call[1:]))
    out, lse = torch.ops.fastattn.attention(*call)
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in call]
    of_backward = (*(t.detach() for t in (out, lse, out, lse)), *detached, [True, False, False])
    torch.library.opcheck(torch.ops.fastattn.attention_backward.default, of_backward)
    one_head = tuple(a.detach()[:, :1].requires_grad_() for a in (q, k, v))
    torch.library.opcheck(torch.ops.fastattn.scaled_dot_product_attention.default, one_head)


@pytest.mark.slow
def test_inductor():
    """The default backend; it compiles C++."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"inductor: {error}")
    inputs = arrays()
    call = torch.compile(
        lambda q, k, v, mask: Attention()(q * 2, k, v, mask).relu(), fullgraph=True
    )
    q, *others = inputs
    torch.testing.assert_close(call(*inputs), Attention()(q * 2, *others).relu())
