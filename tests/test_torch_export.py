"""Graphs of torch that leave it, and of whole models: ONNX, TorchScript, export, compiler."""

from __future__ import annotations

import contextlib
import io

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

import fastattn.torch as ours  # noqa: E402

# What torch itself deprecates, its exporters still call.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


class Model(torch.nn.Module):
    """Attention between other operators; large enough for patch() to route it."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        q = self.linear(x).reshape(*x.shape[:-1], 2, 16).transpose(-2, -3)
        return self.attend(q, q, q, is_causal=True).transpose(-2, -3).flatten(-2)


# How a model calls attention, and within what: looked up when it calls, as models do.
WAYS = {
    "patch": (lambda *given, **flags: F.scaled_dot_product_attention(*given, **flags), ours.patch),
    "face": (ours.scaled_dot_product_attention, contextlib.nullcontext),
}


def inputs():
    torch.manual_seed(0)
    return torch.randn(1, 900, 32)  # 50 million multiplies and adds


@pytest.mark.parametrize("way", WAYS)
def test_traced_for_torchscript(way):
    """A trace follows its input: nothing that fastattn computes is taken for a constant."""
    attend, within = WAYS[way]
    x, model = inputs(), Model(attend).eval()
    with within():
        traced = torch.jit.trace(model, torch.zeros_like(x))
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_exported_to_onnx(way, dynamo):
    """ONNX gets torch's own attention, for which it has nodes."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    attend, within = WAYS[way]
    x, model = inputs(), Model(attend).eval()
    with within(), contextlib.redirect_stdout(io.StringIO()):
        file = io.BytesIO()
        torch.onnx.export(model, (x,), file, dynamo=dynamo)
    session = runtime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=0, atol=1e-5)


def test_what_onnx_cannot_say_is_refused():
    pytest.importorskip("onnx")

    def windowed(q, k, v, is_causal):
        return ours.attention(q, k, v, causal=is_causal, window=(5, 0))

    with pytest.raises(RuntimeError, match=r"fastattn::attention"):
        torch.onnx.export(Model(windowed).eval(), (inputs(),), io.BytesIO(), dynamo=False)


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    from fastattn.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="fastattn")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_whole_model_compiled(llama, compiler):
    """One graph of all layers, and its gradients."""
    if compiler == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            pytest.skip(f"inductor: {error}")
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = []
    torch._dynamo.reset()
    for call in (llama, torch.compile(llama, fullgraph=True, backend=compiler)):
        llama.zero_grad()
        logits = call(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        logits.pow(2).sum().backward()
        found.append([logits.detach(), *(p.grad for p in llama.parameters())])
    torch._dynamo.reset()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(a.abs().max()))


@pytest.mark.slow
def test_whole_model_exported(llama):
    ids = torch.arange(24).reshape(2, 12)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        program = torch.export.export(llama.eval(), (), arguments)
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count("fastattn.scaled_dot_product_attention.default") == 2
        found = program.module()(**arguments).logits
        torch.testing.assert_close(found, llama(**arguments).logits, rtol=0, atol=1e-6)
