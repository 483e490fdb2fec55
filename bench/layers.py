"""What norms, activations and RoPE cost, beside the same in a line or two of NumPy, and in torch.

python bench/layers.py
python bench/layers.py --only 'gelu,*norm' --threads 1

Times are those of the public functions, checks and the new array included; ratios are how many
times longer the others take.
"""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import repository
from rich.table import Table

import fastattn
from fastattn import nn
from fastattn.benchmark import contest
from fastattn.commands import terminal

# (tokens, features) of one token of SmolLM2-135M, of a few, and of a prompt
SHAPES = ((1, 1536), (64, 1536), (1024, 1536))
Calls = dict[str, Callable[[], Any]]  # by contender


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    slope, half = np.float32(0.7978845608), np.float32(0.5)
    return half * x * (1 + np.tanh(slope * (x + np.float32(0.044715) * x * x * x)))


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(1e-5)) * weight + bias


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * weight


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def calls(shape: tuple[int, int]) -> dict[str, Calls]:
    """What is timed, by function and contender. NumPy has no erf: its gelu is fastattn's own."""
    rng = np.random.default_rng(0)
    x, up = rng.standard_normal((2, *shape)).astype(np.float32)
    weight, bias = rng.standard_normal((2, shape[1])).astype(np.float32)
    heads = x.reshape(shape[0], -1, 64).swapaxes(0, 1)
    turn = nn.positions.Rope(64).rotation(np.arange(shape[0]))
    layer, rms = nn.LayerNormWeights(weight, bias), nn.RMSNormWeights(weight)
    ours = {
        "relu": lambda: nn.relu(x),
        "silu": lambda: nn.silu(x),
        "silu, gated": lambda: nn.activate("silu", x, up=up),
        "gelu": lambda: nn.gelu(x),
        "gelu_tanh": lambda: nn.gelu_tanh(x),
        "layer_norm": lambda: nn.layer_norm(x, layer),
        "rms_norm": lambda: nn.rms_norm(x, rms),
        "add, rms_norm": lambda: nn.add_norm(x, rms, residual=up),
        "rope": lambda: turn.apply(heads),
    }
    numpys = {
        "relu": lambda: np.maximum(x, 0),
        "silu": lambda: silu(x),
        "silu, gated": lambda: silu(x) * up,
        "gelu": lambda: nn.gelu(x, backend="numpy"),
        "gelu_tanh": lambda: gelu_tanh(x),
        "layer_norm": lambda: layer_norm(x, weight, bias),
        "rms_norm": lambda: rms_norm(x, weight),
        "add, rms_norm": lambda: rms_norm(x + up, weight),
        "rope": lambda: rotated(heads, turn.cos, turn.sin),
    }
    torchs = torch_calls(x, up, weight, bias) if find_spec("torch") else {}
    contenders = {"fastattn": ours, "numpy": numpys, "torch": torchs}
    return {
        name: {peer: given[name] for peer, given in contenders.items() if name in given}
        for name in ours
    }


def torch_calls(*arrays: np.ndarray) -> Calls:
    """torch's functions on the same memory, by function."""
    import torch

    torch.set_num_threads(fastattn.get_num_threads())
    torch.set_grad_enabled(False)
    x, up, weight, bias = map(torch.from_numpy, arrays)
    f, features = torch.nn.functional, (x.shape[-1],)
    return {
        "relu": lambda: f.relu(x),
        "silu": lambda: f.silu(x),
        "silu, gated": lambda: f.silu(x) * up,
        "gelu": lambda: f.gelu(x),
        "gelu_tanh": lambda: f.gelu(x, approximate="tanh"),
        "layer_norm": lambda: f.layer_norm(x, features, weight, bias),
        "rms_norm": lambda: f.rms_norm(x, features, weight, 1e-5),
        "add, rms_norm": lambda: f.rms_norm(x + up, features, weight, 1e-5),
    }


def measure(contenders: Calls, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call in each round, by contender; they take turns.

    Raises AssertionError where one computes something else.
    """
    exact = contenders["numpy"]()
    for call in contenders.values():
        np.testing.assert_allclose(np.asarray(call()), exact, rtol=1e-3, atol=1e-4)
    counts = {name: contest.calls_per_sample(call) for name, call in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            time.sleep(contest.SETTLE_SECONDS)
            call()
            seconds[name].append(contest.sample(call, counts[name]))
    return seconds


def ratio(seconds: dict[str, list[float]], peer: str) -> str:
    """How many times longer a peer takes than fastattn, median over the rounds."""
    if peer not in seconds:
        return "–"
    return f"{statistics.median(np.divide(seconds[peer], seconds['fastattn'])):.2f}"


def main() -> None:
    parser = repository.parser(__doc__)
    parser.add_argument("--only", default="*", help="functions or patterns, comma-separated")
    parser.add_argument("--rounds", type=terminal.count, default=5, help="default 5")
    parser.add_argument("--threads", type=terminal.count, default=fastattn.get_num_threads())
    options = parser.parse_args()
    fastattn.set_num_threads(options.threads)
    table = Table("function", "tokens × features", "fastattn", "ns / element", "numpy", "torch")
    chosen = [
        (shape, name, contenders)
        for shape in SHAPES
        for name, contenders in calls(shape).items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.only.split(","))
    ]
    for shape, name, contenders in terminal.each(chosen, lambda item: f"{item[1]} {item[0]}"):
        seconds = measure(contenders, options.rounds)
        own = statistics.median(seconds["fastattn"])
        size = f"{shape[0]} × {shape[1]}"
        times = f"{own * 1e6:.1f} µs", f"{own * 1e9 / (shape[0] * shape[1]):.2f}"
        table.add_row(name, size, *times, ratio(seconds, "numpy"), ratio(seconds, "torch"))
    terminal.console().print(table)


if __name__ == "__main__":
    main()
