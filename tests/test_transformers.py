"""fastattn.transformers in models of Transformers: random, small, beside "eager"."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

import fastattn
from fastattn.transformers import _computes_itself, attend, register

TOLERANCE = 1e-5  # of the largest element
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TEXT = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DECODER = SIZES | TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {"sliding_window": 6}
# name: folder under transformers.models, class, and what its configuration says
MODELS = {
    "llama": ("llama", "LlamaForCausalLM", DECODER),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        DECODER | WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gpt-oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        DECODER | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": ("mistral", "MistralForCausalLM", DECODER | WINDOW),  # windows in every layer
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None},
    ),
    "bert": ("bert", "BertModel", SIZES | {"num_attention_heads": 4}),
    "vit": (
        "vit",
        "ViTModel",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
    ),
}
DECODERS = ("llama", "gemma2", "gpt-oss", "mistral", "t5")
PADDINGS = {
    "none": [(0, 0)] * 3,
    "left": [(4, 0), (1, 0), (0, 0)],
    "right": [(0, 5), (0, 0), (0, 1)],
}
EIGHT_BITS = {"backend": "fp8"}
WAYS = {  # of generate(): texts at once, and its arguments
    "dynamic cache": (3, {}),
    "static cache": (3, {"cache_implementation": "static"}),
    "no cache": (3, {"use_cache": False}),
    # Padding has a share in the scales, and rows of padding differ from eager's.
    "quantized cache": (1, {"cache_implementation": "quantized", "cache_config": EIGHT_BITS}),
    "beams": (3, {"num_beams": 3}),
    "samples": (3, {"do_sample": True, "num_return_sequences": 2}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 3}),
    "assistant": (1, {}),
}


@pytest.fixture(scope="module", autouse=True)
def set_up():
    register()
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="module")
def models():
    """A function that returns the model of a name with this attention: always the same weights."""
    made = {}

    def model(name, attention):
        if (name, attention) not in made:
            folder, cls, options = MODELS[name]
            package = f"transformers.models.{folder}"
            module = importlib.import_module(f"{package}.modeling_{folder}")
            config_cls = getattr(module, cls).config_class
            if name == "t5" and _computes_itself(config_cls):
                pytest.skip("T5 of this version of transformers computes its attention itself")
            torch.manual_seed(0)
            new = getattr(module, cls)._from_config(
                config_cls(**options), attn_implementation=attention
            )
            for (
                parameter
            ) in new.parameters():  # fresh ones are so small that nothing depends on them
                parameter.data += 0.1 * torch.randn_like(parameter)
            made[name, attention] = new.eval()
        return made[name, attention]

    return model


def inputs_of(name, padding="none"):
    """Return the inputs of a model and which rows of its first output are those of real tokens."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}, slice(None)
    ids = torch.randint(2, 97, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    for row, (left, right) in zip(mask, PADDINGS[padding], strict=True):
        row[:left] = 0
        row[len(row) - right :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        return inputs | {"decoder_input_ids": ids[:, :7]}, slice(None)
    return inputs, mask.bool()


def assert_same(ours, theirs, tolerance=TOLERANCE):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


# --- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "padding", ["left", *(pytest.param(p, marks=pytest.mark.slow) for p in ("none", "right"))]
)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prefill(name, padding, models):
    inputs, is_real = inputs_of(name, padding)
    theirs, ours = (models(name, kind)(**inputs)[0] for kind in ("eager", "fastattn"))
    assert_same(ours[is_real], theirs[is_real])


QUICK = [("llama", "dynamic cache"), ("gemma2", "static cache"), ("llama", "beams")]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.slow)
        for name in DECODERS
        for way in WAYS
        if way != "quantized cache" or name == "llama"  # made for full attention alone
    ],
)
@torch.no_grad()
def test_generation(name, way, models):
    """Left padding, sliding windows that fill, and every kind of cache: the same texts, logits."""
    texts, arguments = WAYS[way]
    inputs, _ = inputs_of(name, "left" if texts > 1 else "none")
    inputs = {key: inputs[key][:texts] for key in ("input_ids", "attention_mask")}
    found = []
    for kind in ("eager", "fastattn"):
        torch.manual_seed(2)
        if way == "assistant":
            arguments = {"assistant_model": models(name, kind)}
        found.append(
            models(name, kind).generate(
                **inputs,
                **arguments,
                max_new_tokens=12,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    theirs, ours = found
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    # Eight bits make large steps of small differences between the layers.
    tolerance = 1e-2 if way == "quantized cache" else TOLERANCE
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        assert_same(a, b, tolerance)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@torch.no_grad()
def test_masks_of_four_axes(name, kind, models):
    """The caller's own, which no row leaves without a key."""
    inputs, _ = inputs_of(name)
    mask = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(3)) < 0.6
    mask |= torch.eye(11, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    theirs = models(name, "eager")(**inputs | {"attention_mask": added})[0]
    ours = models(name, "fastattn")(
        **inputs | {"attention_mask": mask if kind == "bool" else added}
    )
    assert_same(ours[0], theirs)


@torch.no_grad()
def test_halves(models):
    inputs, is_real = inputs_of("llama", "left")
    exact = models("llama", "eager")(**inputs)[0][is_real]
    errors = []
    for kind in ("eager", "fastattn"):
        model = models("llama", kind)
        try:
            found = model.to(torch.bfloat16)(**inputs)[0][is_real]
        finally:
            model.float()
        errors.append(float((found.float() - exact).abs().max()))
    assert errors[1] <= 2 * errors[0]


def test_gradients(models):
    inputs, _ = inputs_of("gpt-oss", "left")
    gradients = []
    for kind in ("eager", "fastattn"):
        model = models("gpt-oss", kind)
        model.zero_grad()
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model(**inputs, labels=labels).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    theirs, ours = gradients
    assert theirs.keys() == ours.keys()
    assert any("sinks" in name for name in ours)
    for name in theirs:
        assert_same(ours[name], theirs[name])


def test_no_probabilities(models):
    inputs, _ = inputs_of("llama")
    with pytest.raises(ValueError, match=r"output_attentions must be None .*\(\"eager\"\)"):
        models("llama", "fastattn")(**inputs, output_attentions=True)


def test_models_that_compute_their_attention_themselves():
    """Not silently wrong: they would add a mask of zeros and ones, or none at all."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    model = transformers.BloomModel._from_config(config, attn_implementation="fastattn")
    with pytest.raises(ValueError, match=r"must be 'eager' for BloomConfig .*, got 'fastattn'"):
        model(torch.zeros(1, 4, dtype=torch.long))


# --- one layer's call ---------------------------------------------------------------------------


class Layer:
    """A module, as far as attend() looks at it."""

    is_causal = True


def operands(seqlen_q=5, seqlen_k=5):
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, seqlen_q, 4, 8, generator=generator).transpose(1, 2)
    return q, *torch.randn(2, 2, 2, seqlen_k, 8, generator=generator)


def expected(q, k, v, **flags):
    arrays = (a.numpy() if isinstance(a, torch.Tensor) else a for a in (q, k, v))
    return fastattn.attention(*arrays, **flags).swapaxes(1, 2)


@pytest.mark.parametrize("seqlen_k", [5, 9])
def test_causal_from_the_top_left(seqlen_k):
    """Without a mask: on its first text, a static cache is longer than that."""
    q, k, v = operands(5, seqlen_k)
    out, nothing = attend(Layer(), q, k, v, None)
    assert nothing is None
    assert out.is_contiguous()
    np.testing.assert_array_equal(out, expected(q, k, v, causal=True, align="top_left"))
    everything = expected(q, k, v)
    np.testing.assert_array_equal(attend(Layer(), q, k, v, None, is_causal=False)[0], everything)
    mask = torch.ones(1, 1, 5, seqlen_k, dtype=torch.bool)
    np.testing.assert_array_equal(attend(Layer(), q, k, v, mask)[0], everything)
    np.testing.assert_array_equal(
        attend(Layer(), q[:, :, :1], k, v, None)[0], expected(q[:, :, :1], k, v)
    )


def test_the_module_says_whether_it_is_causal():
    q, k, v = operands()
    causal = expected(q, k, v, causal=True)
    np.testing.assert_array_equal(attend(object(), q, k, v, None)[0], causal)
    encoder = Layer()
    encoder.is_causal = False
    np.testing.assert_array_equal(attend(encoder, q, k, v, None)[0], expected(q, k, v))
    np.testing.assert_array_equal(attend(encoder, q, k, v, None, is_causal=True)[0], causal)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_everything_at_once(kind):
    q, k, v = operands()
    generator = torch.Generator().manual_seed(5)
    bias, added = torch.randn(2, 1, 4, 5, 5, generator=generator)
    sinks = torch.randn(4, generator=generator)
    attention_mask = {"none": None, "bool": added > 0, "float": added}[kind]
    arguments = {"scaling": 0.7, "softcap": 2.0, "s_aux": sinks, "sliding_window": 3}
    found, _ = attend(
        Layer(), q, k, v, attention_mask, 0.0, position_bias=bias, position_ids=None, **arguments
    )
    flags = {"scale": 0.7, "softcap": 2.0, "sinks": sinks.numpy(), "bias": bias.numpy()}
    flags |= {
        "none": {"causal": True},
        "bool": {"mask": (added > 0).numpy()},
        "float": {"bias": (bias + added).numpy()},
    }[kind]
    np.testing.assert_array_equal(found, expected(q, k, v, **flags))


@pytest.mark.parametrize("name", ["output_attentions", "sinks", "indices", "block_indices"])
def test_refuses(name):
    q, k, v = operands()
    attend(Layer(), q, k, v, None, **{name: None})
    with pytest.raises(ValueError, match=rf"{name} must be None in 'fastattn' attention"):
        attend(Layer(), q, k, v, None, **{name: True})


@pytest.mark.slow
@torch.no_grad()
def test_compiles_to_one_graph():
    q, k, v = operands()
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(5))

    def both(q, k, v):
        plain, _ = attend(Layer(), q, k, v, None, position_ids=None)
        return plain + attend(Layer(), q, k, v, None, softcap=2.0, s_aux=sinks)[0]

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    np.testing.assert_array_equal(compiled(q, k, v), both(q, k, v))


def test_without_transformers():
    code = """
import sys
sys.modules["transformers"] = None
import fastattn.transformers
fastattn.transformers.register()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert "fastattn.transformers needs transformers, which is not installed: pip" in done.stderr
