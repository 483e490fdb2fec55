"""The kernels of gradients on the emulated device, against the oracle."""

from __future__ import annotations

import gradient_oracle
import numpy as np
import oracle
import pytest
from cuda_assembled import assemble, need_assembler
from cuda_emulated import SM_80, SM_90, Device, inputs, need_numba_cuda
from ptx_block import launch

import fastattn
from fastattn.check_backward import check_backward
from fastattn.cuda import compile
from fastattn.cuda.job import PARTS, GradientJob
from fastattn.cuda.packing import job_of
from fastattn.cuda.tensor.gradient_tilings import GradientTiling

need_numba_cuda()
SMALL = GradientTiling("float16", 64, block_m=32, block_n=32, warps=2)


def code(name, tiling, target=SM_80):
    def build():
        from fastattn.cuda.tensor import gradients

        makers = {
            "delta": lambda: gradients.delta_kernel(tiling.storage),
            "query": lambda: gradients.query_kernel(tiling),
            "key": lambda: gradients.key_kernel(tiling),
        }
        return makers[name]()

    return compile.code((name, tiling), build, target).ptx


def gradients_of(tiling, dout, q, k, v, dlse=None, **flags):
    """{"dq", "dk", "dv"} that the three kernels write."""
    out, lse = fastattn.attention(q, k, v, return_lse=True, backend="numpy", **flags)
    problem, operands, gradients = check_backward(dout, q, k, v, out, lse, dlse=dlse, **flags)
    delta = np.full((problem.batch, problem.heads_q, problem.seqlen_q), np.nan, np.float32)
    results = gradients.dq, gradients.dk, gradients.dv
    device = Device(delta, *results)

    class Pieces:
        m_blocks, num_splits, split_n = -(-problem.seqlen_q // tiling.block_m), 1, 0

    fields = job_of(problem, operands, Pieces, device.address)._asdict()
    for name, array in (("dout", gradients.dout), *zip(("dq", "dk", "dv"), results, strict=True)):
        steps = [stride // array.itemsize for stride in array.strides]
        values = (device.address(array), 0, *([0] * (4 - array.ndim)), *steps)
        fields |= {name + part: value for part, value in zip(PARTS, values, strict=True)}
    fields["delta"] = device.address(delta)
    fields["dlse"] = 0 if dlse is None else device.address(gradients.dlse)
    job, memory = GradientJob(**fields), device.memory
    launch(code("delta", tiling), memory, job, -(-delta.size // 128), 0)
    queries = job.m_blocks * problem.heads_q * problem.batch
    launch(code("query", tiling), memory, job, queries, tiling.shared_bytes)
    blocks = -(-problem.seqlen_k // tiling.block_m)
    keys = blocks * problem.heads_kv * problem.batch
    launch(code("key", tiling), memory, job._replace(m_blocks=blocks), keys, tiling.shared_bytes)
    device.fetch()
    return dict(zip(("dq", "dk", "dv"), results, strict=True))


CALLS = {
    "dense": ((1, 2, 2, 50, 70), {}),
    "causal, grouped heads": ((1, 4, 2, 50, 70), {"causal": True}),
    "causal, rows without keys": ((1, 1, 1, 70, 40), {"causal": True}),
    "window, scale below 0": ((1, 1, 1, 70, 90), {"window": (20, 10), "scale": -0.2}),
    "scale 0": ((1, 1, 1, 40, 40), {"scale": 0.0}),
    "lengths": (
        (2, 2, 1, 50, 60),
        {"q_len": np.array([50, 20]), "kv_len": np.array([60, 33]), "kv_start": np.array([0, 5])},
    ),
    "sinks": ((1, 2, 1, 40, 50), {"sinks": np.array([0.5, 1.0], np.float32)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients(name):
    sizes, flags = CALLS[name]
    assert_gradients(SMALL, sizes, **flags)


def test_gradient_of_lse():
    dlse = np.random.default_rng(4).standard_normal((1, 2, 50)).astype(np.float32)
    assert_gradients(SMALL, (1, 2, 1, 50, 50), dlse=dlse)


def assert_gradients(tiling, sizes, **flags):
    q, k, v = inputs(tiling, *sizes, head_dim_v=tiling.head_dim)
    dout = np.random.default_rng(3).standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    if "q_len" in flags:
        for b, rows in enumerate(flags["q_len"]):
            dout[b, :, rows:] = 0
    found = gradients_of(tiling, dout, q, k, v, **flags)
    exact, _ = gradient_oracle.judge(dout, q, k, v, orders=1, **flags)
    for name, array in found.items():
        # p and ds are rounded to the type of the inputs, as out was, whose products delta sums.
        allowed = 3 * oracle.EPS[tiling.storage] * max(1, np.abs(exact[name]).max())
        np.testing.assert_allclose(array, exact[name], rtol=0, atol=allowed, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("target", [SM_80, SM_90], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_code(head_dim, target):
    """Nothing is spilled in the loop; with the products of p and ds there are three and four."""
    need_assembler()
    for name, products in (("query", 3), ("key", 4)):
        found = assemble(code(name, GradientTiling("bfloat16", head_dim), target))
        # Three registers wait outside the loop for sm_90 where head_dim is 96.
        assert found.spilled <= 24
        assert not found.loop["STL"] + found.loop["LDL"]
        assert found.loop["HMMA"] == products * head_dim // 2
