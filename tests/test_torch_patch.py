"""fastattn.torch.patch(): what goes through fastattn, what to torch, and no trace later."""

from __future__ import annotations

import inspect
import threading

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from fastattn.torch import dispatch, patch, patching, scaled_dot_product_attention  # noqa: E402

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _as_before():
    """Every test leaves torch as it was."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.manual_seed(0)
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


@pytest.fixture
def answered(monkeypatch):
    """The list of queries that fastattn has answered."""
    queries = []

    def spy(query, *arguments, **options):
        out = scaled_dot_product_attention(query, *arguments, **options)
        queries.append(query)
        return out

    monkeypatch.setattr(patching, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(dispatch, "MUCH_BYTES", 0)
    return queries


def qkv(dtype=torch.float32, device="cpu"):
    return [torch.randn(2, 3, 5, 8).to(device, dtype) for _ in "qkv"]


# --- what goes where ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_the_cpu_go_through_fastattn(answered, dtype):
    arrays = qkv(dtype)
    options = {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(), "scale": 0.25}
    wanted = F.scaled_dot_product_attention(*arrays, **options)
    with patch():
        found = F.scaled_dot_product_attention(*arrays, **options)
        assert not F.scaled_dot_product_attention(*arrays, None, 1.0).any()
    assert len(answered) == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_gradients_go_through_fastattn(answered):
    arrays = [a.requires_grad_() for a in qkv()]
    with patch():
        out = F.scaled_dot_product_attention(*arrays, is_causal=True)
    assert len(answered) == 1
    found = torch.autograd.grad(out.sum(), arrays)
    wanted = torch.autograd.grad(ORIGINAL(*arrays, is_causal=True).sum(), arrays)
    torch.testing.assert_close(found, wanted)


OTHERS = {
    "meta": lambda: F.scaled_dot_product_attention(*qkv(device="meta")),
    "nested": lambda: F.scaled_dot_product_attention(
        *(torch.nested.as_nested_tensor(list(a)) for a in qkv())
    ),
    "scale": lambda: F.scaled_dot_product_attention(*qkv(), scale=float("inf")),
    "mask and causal": lambda: F.scaled_dot_product_attention(
        *qkv(), torch.ones(5, 5), is_causal=True
    ),
    "vmap": lambda: torch.vmap(F.scaled_dot_product_attention)(*qkv()),
    "meta bias": lambda: F.scaled_dot_product_attention(
        *qkv(device="meta"), causal_lower_right(5, 5)
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
def test_all_else_goes_to_torch(answered, kind):
    torch.manual_seed(1)
    wanted = OTHERS[kind]()
    torch.manual_seed(1)
    with patch():
        found = OTHERS[kind]()
    assert not answered
    if wanted.is_nested:
        found, wanted = (a.to_padded_tensor(0.0) for a in (found, wanted))
    if found.device.type == "cpu":
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_within_modes_torch_answers(answered):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    class Counting(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, arguments=(), options=None):
            self.seen += function is ORIGINAL
            return function(*arguments, **(options or {}))

    with patch():
        with FakeTensorMode():
            assert F.scaled_dot_product_attention(*qkv()).shape == (2, 3, 5, 8)
        with Counting() as mode:
            F.scaled_dot_product_attention(*qkv())
        assert mode.seen == 1
    assert not answered


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"query": torch.ones(2, 3, 5, 9)}, RuntimeError),
        ({"query": [1.0]}, TypeError),
        ({"query": None}, TypeError),
    ],
    ids=["shape", "type", "nothing"],
)
def test_errors_are_torchs_own(change, error):
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | change
    with pytest.raises(error) as theirs:
        F.scaled_dot_product_attention(**arguments)
    with patch(), pytest.raises(error) as found:
        F.scaled_dot_product_attention(**arguments)
    assert str(found.value).replace(" (position 1)", "") == str(theirs.value)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases(answered, bias):
    q, k, v = qkv()
    mask = bias(3, 5)
    wanted = F.scaled_dot_product_attention(q[:, :, :3], k, v, mask)
    with patch():
        found = F.scaled_dot_product_attention(q[:, :, :3], k, v, mask)
    assert len(answered) == 1
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_sizes_of_nested_tensors_are_not_asked_for():
    with patch():
        assert OTHERS["nested"]().is_nested


def test_small_calls_go_to_torch(answered, monkeypatch):
    monkeypatch.setattr(dispatch, "MUCH_BYTES", 1 << 20)
    monkeypatch.setattr(dispatch, "MUCH_FLOP", 1 << 20)
    sizes = (1, 100), (64, 63), (64, 64), (1, 16384)
    with patch():
        for seqlen_q, seqlen_k in sizes:
            q, k = torch.ones(1, 8, seqlen_q, 8), torch.ones(1, 8, seqlen_k, 8)
            F.scaled_dot_product_attention(q, k, k)
    assert [q.shape[2] for q in answered] == [64, 1]


# --- torch.nn -----------------------------------------------------------------------------------


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


def decoder():
    return nn.TransformerDecoderLayer(24, 3, 32, batch_first=True, dropout=0.0)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_layers_of_torch(answered, train):
    x, padding = torch.randn(2, 5, 24), torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]).bool()
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    mha, enc, dec = nn.MultiheadAttention(24, 3, batch_first=True), encoder(), decoder()
    calls = [
        (1, lambda: mha(x, x, x, need_weights=False)[0]),
        (1, lambda: mha(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0]),
        (0, lambda: mha(x, x, x)[0]),  # the weights need the formula
        (2, lambda: enc(x)),
        (2, lambda: enc(x, mask=causal, is_causal=True)),
        (2, lambda: enc(x, src_key_padding_mask=padding)[~padding]),
        (2, lambda: dec(x, x[:, :3], tgt_mask=causal, tgt_is_causal=True)),
    ]
    for module in (mha, enc, dec):
        module.train(train)
    for number, call in calls:
        with torch.set_grad_enabled(train):
            wanted = call()
            with patch():
                found = call()
        assert len(answered) == number
        answered.clear()
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


# --- entering and leaving -----------------------------------------------------------------------


def test_reentrant_and_a_decorator(answered):
    @patch()
    def call(depth):
        """A function."""
        F.scaled_dot_product_attention(*qkv())
        return call(depth - 1) if depth else depth

    assert call(2) == 0
    assert call.__doc__ == "A function."
    with pytest.raises(KeyError), patch(), patch():
        raise KeyError
    assert len(answered) == 3


def test_signature_and_text_are_torchs():
    with patch():
        assert F.scaled_dot_product_attention.__doc__ == ORIGINAL.__doc__
        shown = inspect.signature(F.scaled_dot_product_attention, follow_wrapped=False)
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(shown.parameters) == names


def test_threads(answered):
    """Threads enter and leave as they like; as long as one is inside, calls go through fastattn."""
    barrier, wrong = threading.Barrier(4), []

    def enter_and_leave():
        barrier.wait()
        for _ in range(30):
            with patch():
                if F.scaled_dot_product_attention is ORIGINAL:
                    wrong.append("not routed")
                F.scaled_dot_product_attention(*qkv())

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(answered) == 120


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_graphs_follow_the_patch():
    operators = []

    def backend(graph_module, _):
        targets = (str(n.target) for n in graph_module.graph.nodes if n.op == "call_function")
        operators.extend(targets)
        return graph_module.forward

    torch._dynamo.reset()
    q, k, v = qkv()
    call = torch.compile(
        lambda: F.scaled_dot_product_attention(q, k, v), backend=backend, fullgraph=True
    )
    with patch():
        call()
    assert operators == ["fastattn.scaled_dot_product_attention"]
    call()
    assert len(operators) == 2
    with patch():
        call()
    torch._dynamo.reset()
    assert len(operators) == 2


def test_models_of_transformers(answered):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=24,
        num_attention_heads=3,
        intermediate_size=32,
        num_hidden_layers=2,
        vocab_size=11,
    )
    model = transformers.BertModel(config).eval()
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).last_hidden_state
        with patch():
            found = model(ids, attention_mask=mask).last_hidden_state
    assert len(answered) == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
