"""Imports point down: a module may import only what stands below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fastattn

PACKAGE = Path(fastattn.__file__).parent
LAYERS = [
    "fastattn __main__",
    "commands",
    "commands.bench commands.info commands.verify commands.warmup",
    "commands.terminal",
    "verifying.campaign",
    "verifying.draw verifying.peer verifying.shrink",
    "verifying.trial",
    "verifying.modifiers",
    "benchmark.contest benchmark.plots",
    "benchmark.limits benchmark.peers benchmark.summary benchmark.verify",
    "benchmark.onnx_call benchmark.record benchmark.roofline benchmark.work",
    "benchmark benchmark.cases",
    "verifying.gradient_oracle verifying.case",
    "verifying verifying.oracle",
    "dask",
    "dask.report dask.backward",
    "dask.forward",
    "dask.graph",
    "dask.layout dask.tasks",
    "dask.arrays dask.call",
    "dask.reading",
    "dask.storage dask.sizes",
    "dask.grid",
    "part",
    "plot",
    "flash_attn",
    "flash_attn.flash_attn_interface flash_attn.cute flash_attn.bert_padding "
    "flash_attn.layers.rotary flash_attn.layers",
    "flash_attn.kvcache flash_attn.probabilities flash_attn.cute.interface",
    "flash_attn.cute.lengths",
    "flash_attn.call",
    "flash_attn.recorded flash_attn.arguments flash_attn.rotation",
    "onnx",
    "onnx.backend",
    "onnx.operators",
    "onnx.attention onnx.cache onnx.norms onnx.rotary",
    "onnx.heads",
    "transformers",
    "torch",
    "torch.patching",
    "torch.api torch.sdpa",
    "torch.ops",
    "torch.batching torch.threads",
    "torch.dispatch",
    "torch.call",
    "udl",
    "udl.layers",
    "udl.attention",
    "nn",
    "nn.backward",
    "nn.transformer",
    "nn.multihead",
    "nn.loading",
    "nn.multihead_weights",
    "nn.activations nn.norms nn.cache nn.positions",
    "nn.positions.xpos nn.positions.config",
    "nn.positions.rope nn.positions.absolute nn.positions.biases nn.positions.shaw "
    "nn.positions.transformer_xl",
    "nn.positions.rotary nn.positions.scaling nn.positions.integers",
    "nn.linear nn.compiled",
    "jax",
    "jax.call",
    "jax.handlers",
    "jax.rows jax.frame jax.arguments",
    "jax.options",
    "sdpa weights backward",
    "api",
    "launch",
    "check_backward",
    "repeat check plan cpu.built_in",
    "paging",
    "modifying",
    "merging",
    "probabilities gradients cpu.run_backward cuda.run_backward",
    "reference cpu.run cpu.elementwise cuda.run",
    "cpu.share cpu.job_fields cuda.maps",
    "cpu.threads",
    "cpu.scratch",
    "cuda.prepared",
    "modified cpu.layout cuda.packing",
    "cuda.choice",
    "cuda.simt cuda.combine cuda.tensor.forward cuda.tensor.gradients cuda.gradient_rows "
    "cuda.tensor.warpgroup_forward",
    "cuda.tensor.ending cuda.tensor.warpgroup_steps",
    "cuda.gradient_sums cuda.simt_gradients",
    "cuda.entry cuda.gradient_scores cuda.products",
    "cuda.tensor.forward_steps cuda.tensor.options cuda.tensor.repair cuda.tensor.gradient_steps",
    "cuda.tensor.end_steps cuda.tensor.lost_steps cuda.tensor.score_steps",
    "cuda.tensor.block_masks",
    "cuda.tensor.placement cuda.tensor.random_steps",
    "cuda.tensor.operation cuda.tensor.shapes cuda.tensor.products cuda.tensor.warpgroup",
    "cuda.tensor.tiles cuda.tensor.gradient_tilings",
    "cuda.tensor.mma cuda.tensor.tilings",
    "cpu.awake",
    "cpu.decode cpu.backward cpu.region",
    "cpu.forward cuda.softmax cuda.place cuda.writing",
    "cuda.scores",
    "cpu.overflow",
    "cpu.products cpu.masking cpu.spans cpu.rows cpu.ahead cpu.elementwise_kernels",
    "cpu.gradient_rows cpu.gradient_scores cpu.stream cpu.packing",
    "cpu.softmax cpu.microkernel cpu.modifiers cpu.items",
    "cpu.pages cpu.square cpu.asks",
    "cpu.random cpu.fields",
    "cpu.simd cpu.auxiliary",
    "cpu.elementary cpu.memory",
    "cpu.registers cpu.compile mods block_mask cuda.modifiers cuda.random cuda.tile",
    "arguments",
    "arrays",
    "derivative",
    "trace cpu.prebuilt cpu.translation cuda.compile cuda.words",
    "cpu.mailbox",
    "cpu.cache cpu.image cpu.lowering",
    "cpu cpu.job cpu.elementwise_job dropout guards large_rows machine problem signatures normal",
    "modifier",
    "kinds errors",
    "cuda.memory",
    "cuda.driver",
    "cuda cuda.job cuda.tensor optional results",
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row.split()}


def module_name(path):
    """Return the dotted name below the package; the package's own is "fastattn"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "fastattn"


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(name):
    """Return the package's modules that `name` imports, at any depth of its code."""
    folder = () if name == "fastattn" else tuple(name.split("."))
    if MODULES[name].name != "__init__.py":
        folder = folder[:-1]
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "fastattn" for alias in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        assert (node.module or "").split(".")[0] != "fastattn", "use a relative import"
        if node.level:
            base = folder[: len(folder) - node.level + 1]
            base += tuple((node.module or "").split(".")) if node.module else ()
            targets = [".".join((*base, alias.name)) for alias in node.names]
            found |= {t if t in MODULES else ".".join(base) or "fastattn" for t in targets}
    return found


def test_every_module_has_a_rank():
    assert set(MODULES) <= set(RANK)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    for imported in imported_modules(name):
        assert RANK[imported] > RANK[name], f"{name} imports {imported}"


def test_the_test_sees_imports():
    assert imported_modules("api") >= {"check", "plan", "problem", "launch"}
    assert imported_modules("launch") >= {"plan", "problem", "reference", "cpu.run"}
    assert {"api", "cpu.threads"} <= imported_modules("fastattn")
