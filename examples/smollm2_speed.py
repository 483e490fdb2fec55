"""How fast smollm2.py runs its model, beside transformers on torch: prefill, decoding, attention.

Run by smollm2.py after its answer.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import fastattn

if TYPE_CHECKING:
    from smollm2 import Llama

PREFILL, CONTEXT = 512, 1024  # tokens
ROUNDS = 5  # contenders take turns
STEPS = 8  # tokens decoded in each
SETTLE_SECONDS = 0.15  # thread pools spin for a while after their work, on the next one's cores
PEERS = ("torch", "transformers", "accelerate")


class Ours:
    """The model on fastattn."""

    name = "fastattn"

    def __init__(self, model: Llama):
        self.model = model

    def prefill(self, ids: Sequence[int]) -> Any:
        """Process a text; return what the next tokens need."""
        caches = self.model.new_cache()
        self.model.logits(ids, caches)
        return caches

    def step(self, caches: Any) -> None:
        """Process one more token."""
        self.model.logits([0], caches)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """The attention of one layer."""
        fastattn.attention(q, k, v, causal=True)


class Transformers:
    """The same file in transformers on torch, with as many threads."""

    name = "transformers"

    def __init__(self, file: Path):
        import torch
        import transformers

        torch.set_num_threads(fastattn.get_num_threads())
        transformers.logging.set_verbosity_error()
        self.torch, self.transformers = torch, transformers
        load = transformers.AutoModelForCausalLM.from_pretrained
        options = {"attn_implementation": "sdpa", "local_files_only": True}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            self.model = load(str(file.parent), gguf_file=file.name, **options).eval()

    def prefill(self, ids: Sequence[int]) -> Any:
        """Process a text; return what the next tokens need."""
        cache = self.transformers.DynamicCache(config=self.model.config)
        self.logits(ids, cache, last=1)
        return cache

    def step(self, cache: Any) -> None:
        """Process one more token."""
        self.logits([0], cache, last=1)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """The attention of one layer."""
        q, k, v = (self.torch.from_numpy(a)[None] for a in (q, k, v))
        attend = self.torch.nn.functional.scaled_dot_product_attention
        attend(q, k, v, is_causal=q.shape[-2] > 1, enable_gqa=True)

    def logits(self, ids: Sequence[int], cache: Any = None, last: int = 0) -> np.ndarray:
        """Logits (tokens, vocabulary) after each of `ids`, or after the `last` ones."""
        with self.torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer ones call it cache
            given = self.torch.tensor([list(ids)])
            return self.model(given, past_key_values=cache, logits_to_keep=last).logits[0].numpy()


class Row(NamedTuple):
    """A row of the table: run(contender, its state) is timed, `calls` at once."""

    label: str
    tokens: int  # of one call
    calls: int
    run: Callable[[Any, Any], object]


def rows_of(model: Llama, ids: Sequence[int]) -> list[Row]:
    """What is measured: a whole prefill, one token, and the attention of all layers in each."""
    rng = np.random.default_rng(0)
    first, layers = model.layers[0].attention, range(len(model.layers))

    def operands(tokens: int, context: int) -> list[np.ndarray]:
        sizes = ((first.num_heads, tokens), *[(first.heads_kv, context)] * 2)
        return [rng.standard_normal((*size, first.head_dim), np.float32) for size in sizes]

    def attention(tokens: int, context: int) -> Callable[[Any, Any], object]:
        # Each layer has keys of its own, which are not in a cache of the processor when it runs.
        arrays = [operands(tokens, context) for _ in layers]
        return lambda contender, state: [contender.attend(*a) for a in arrays]

    return [
        Row(f"prefill of {PREFILL}", PREFILL, 1, lambda c, state: c.prefill(ids[:PREFILL])),
        Row("- of it, attention", PREFILL, 1, attention(PREFILL, PREFILL)),
        Row(f"token after {CONTEXT}", 1, STEPS, lambda c, state: c.step(state)),
        Row("- of it, attention", 1, STEPS, attention(1, CONTEXT)),
    ]


def medians(row: Row, contenders: Sequence[Any], states: Sequence[Any]) -> list[float]:
    """Seconds of one call, median over the rounds, of each contender."""
    samples: list[list[float]] = [[] for _ in contenders]
    for timed in (False, *[True] * ROUNDS):  # the first round warms up
        for contender, state, seconds in zip(contenders, states, samples, strict=True):
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            for _ in range(row.calls):
                row.run(contender, state)
            if timed:
                seconds.append((time.perf_counter() - start) / row.calls)
    return [statistics.median(seconds) for seconds in samples]


def print_speeds(model: Llama, file: Path, console: Console) -> None:
    """Print a table of times, ours beside those of transformers where that is installed."""
    contenders: list[Any] = [Ours(model)]
    missing = [name for name in PEERS if find_spec(name) is None]
    if missing:
        console.print(f"Without {', '.join(missing)}: no comparison with transformers.")
    else:
        with console.status("Loading the file in transformers"):
            contenders.append(Transformers(file))
    table = Table(caption=f"{fastattn.get_num_threads()} threads, median of {ROUNDS} rounds")
    table.add_column("")
    for contender in contenders:
        table.add_column(contender.name, justify="right")
        table.add_column("tokens / s", justify="right")
    if len(contenders) > 1:
        table.add_column("ratio", justify="right")
    ids = np.random.default_rng(0).integers(0, len(model.embedding), CONTEXT).tolist()
    with console.status("Measuring"):
        states = [contender.prefill(ids) for contender in contenders]
        for row in rows_of(model, ids):
            seconds = medians(row, contenders, states)
            cells = [(f"{s * 1e3:.1f} ms", f"{row.tokens / s:.0f}") for s in seconds]
            ratio = [f"{seconds[1] / seconds[0]:.2f}"] if len(seconds) > 1 else []
            table.add_row(row.label, *(text for cell in cells for text in cell), *ratio)
    console.print(table)
