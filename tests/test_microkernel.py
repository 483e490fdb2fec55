"""Each micro-kernel alone against NumPy: all edge sizes, poisoned outputs, canaries around them."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import (
    Guarded,
    everywhere,
    everywhere_stored,
    lanes_of,
    largest,
    numpy_dtype,
    run,
    tile_of,
    whole_numbers,
)

DEPTHS = [0, 1, 2, 3, 64, 65]


# --- products -----------------------------------------------------------------------------------


def products(dtype, transposed):
    """Kernel (panel registers, accumulate, rows, a, rs_a, b, rs_b, c, rs_c, depth)."""

    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.microkernel import panel_product
        from fastattn.cpu.registers import jit

        real, apply = pointer_to(dtype), panel_product(dtype, unit, transposed)

        @jit
        def body(job):
            wide, accumulate, rows, rs_a, rs_b = job[0] > 1, job[1], job[2], job[4], job[6]
            a, b, c, rs_c, depth = real(job[3]), real(job[5]), real(job[7]), job[8], job[9]
            apply(wide, rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate)

        return body

    return build


def multiply(machine, a, b, c, nv, accumulate, depth, transposed=False):
    build = products(a.dtype.name, transposed)
    sizes = (c.view.shape[0], a, a.stride, b, b.stride, c, c.stride, depth)
    run(machine, ("products", a.dtype.name, transposed), build, nv, int(accumulate), *sizes)


@everywhere
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_product_of_every_edge_size(machine, dtype, accumulate, transposed, rng):
    mr, nv, _ = tile_of(machine, dtype)
    lanes = lanes_of(machine, dtype)
    for rows in range(1, 2 * mr + 6):
        for depth in DEPTHS if rows in (1, 7, mr, 2 * mr + 1) else DEPTHS[1::3]:
            for width in range(1, nv + 1):
                a = Guarded((depth, rows) if transposed else (rows, depth), dtype, gap=3)
                b = Guarded((depth, width * lanes), dtype, gap=rows % 2 * 5)
                c = Guarded((rows, width * lanes), dtype, gap=depth % 2 * 7)
                a.view[...] = whole_numbers(rng, a.view.shape, dtype)
                b.view[...] = whole_numbers(rng, b.view.shape, dtype)
                before = whole_numbers(rng, c.view.shape, dtype)
                if accumulate:
                    c.view[...] = before
                multiply(machine, a, b, c, width, accumulate, depth, transposed)
                exact = (a.view.T if transposed else a.view) @ b.view
                c.check(exact + (before if accumulate else 0))
                a.check()
                b.check()


@everywhere
def test_product_of_a_row_does_not_depend_on_its_neighbours(machine, dtype, rng):
    mr, nv, nr = tile_of(machine, dtype)
    rows, depth = 2 * mr + 7, 129
    a, b = Guarded((rows, depth), dtype), Guarded((depth, nr), dtype)
    a.view[...], b.view[...] = rng.standard_normal((rows, depth)), rng.standard_normal((depth, nr))
    together = Guarded((rows, nr), dtype)
    multiply(machine, a, b, together, nv, False, depth)
    for m in range(rows):
        one, alone = Guarded((1, depth), dtype, value=a.view[m]), Guarded((1, nr), dtype)
        multiply(machine, one, b, alone, nv, False, depth)
        alone.check(together.view[m : m + 1])


@everywhere
def test_product_errs_as_one_chain_of_fused_steps(machine, dtype, rng):
    """(1 + e)**2 - 1 - 2 e loses e**2 where the product is rounded before it is added."""
    _, nv, nr = tile_of(machine, dtype)
    e = np.finfo(dtype).eps
    a = Guarded((1, 3), dtype, value=np.array([-1, -2 * e, 1 + e], dtype))
    b = Guarded((3, nr), dtype, value=np.array([[1], [1], [1 + e]], dtype))
    c = Guarded((1, nr), dtype)
    multiply(machine, a, b, c, nv, False, 3)
    c.check(np.full((1, nr), e * e, dtype))


# --- packing ------------------------------------------------------------------------------------


def packers(dtype, storage):
    """Kernel (which, result, source, row stride, column stride, sizes 3, destination)."""

    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.packing import pack_k, pack_v
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.square import transpose_square

        real, stored, integers = pointer_to(dtype), pointer_to(storage), pointer_to("int64")
        keys, values = pack_k(dtype, unit, storage), pack_v(dtype, unit, storage)
        square = transpose_square(dtype, unit.lanes(ITEMSIZE[dtype]), storage)

        @jit
        def body(job):
            source, rs, cs, to = stored(job[2]), job[3], job[4], real(job[8])
            if job[0] == 0:
                keys(source, rs, cs, job[5], job[6], to)
            elif job[0] == 1:
                integers(job[1])[0] = values(source, rs, cs, job[5], job[6], job[7], to)
            else:
                square(source, rs, job[5], to, job[6])

        return body

    return build


def pack(machine, which, source, sizes, to):
    """Return what the packer answered; sources are views with any strides."""
    answer = np.full(1, -1, np.int64)
    strides = (s // source.itemsize for s in source.strides)
    sizes = (*sizes, 0, 0)[:3]
    types = to.dtype.name, source.dtype.name
    run(machine, ("packers", types), packers(*types), which, answer, source, *strides, *sizes, to)
    return answer[0]


def layouts(a):
    """The same elements as rows with a gap, as columns, and reversed; NaN all around."""
    rows, columns = a.shape
    gap, down, back = (
        np.full(shape, np.nan, a.dtype)
        for shape in ((rows, columns + 5), (columns + 2, rows + 3), (rows + 1, 2 * columns + 1))
    )
    for view in (
        gap[:, 2 : columns + 2],
        down[1 : columns + 1, 1 : rows + 1].T,
        back[rows:0:-1, 1 : 2 * columns : 2],
    ):
        view[...] = a
        yield view


@everywhere_stored
def test_transpose_square(machine, dtype, storage, rng):
    lanes = lanes_of(machine, dtype)
    for last in (0, 1, lanes // 2, lanes - 1):
        k = rng.random((lanes, lanes + 3)).astype(numpy_dtype(storage))
        panel = Guarded((lanes, lanes), dtype, 5)
        k[last + 1 :] = np.nan
        pack(machine, 2, k, (last, panel.stride), panel)
        panel.check(k[np.minimum(np.arange(lanes), last), :lanes].T)


@everywhere_stored
def test_pack_k(machine, dtype, storage, rng):
    _, _, nr = tile_of(machine, dtype)
    lanes = lanes_of(machine, dtype)
    for count in (1, 2, lanes - 1, lanes, lanes + 1, nr - 1, nr, nr + 1, 3 * nr + 1):
        for head_dim in (1, lanes - 1, lanes, lanes + 1, 2 * lanes + 3):
            for k in layouts(rng.random((count, head_dim)).astype(numpy_dtype(storage))):
                padded = -(-count // lanes) * lanes
                panels = Guarded((-(-count // nr) * head_dim * nr,), dtype)
                pack(machine, 0, k, (count, head_dim), panels)
                panels.check()
                got = panels.view.reshape(-1, head_dim, nr).swapaxes(1, 2).reshape(-1, head_dim)
                # keys past the last repeat it, up to whole registers
                expected = k[np.minimum(np.arange(padded), count - 1)]
                np.testing.assert_array_equal(got[:padded], expected)
                assert np.isnan(got[padded:]).all()


@everywhere_stored
def test_pack_v(machine, dtype, storage, rng):
    _, _, nr = tile_of(machine, dtype)
    lanes = lanes_of(machine, dtype)
    for count in (1, 2, 5):
        for width in (1, lanes - 1, lanes, lanes + 1, nr - 1, nr, nr + 1, 2 * nr + lanes + 1):
            for v in layouts(rng.random((count, width)).astype(numpy_dtype(storage))):
                block_n, padded = count + 3, -(-width // lanes) * lanes
                panels = Guarded((block_n * padded,), dtype)
                assert pack(machine, 1, v, (count, block_n, width), panels) == 0
                panels.check()
                wide = np.zeros((count, padded), dtype)
                wide[:, :width] = v
                for start in range(0, padded, nr):
                    columns = min(nr, padded - start)
                    panel = panels.view[start * block_n :][: count * columns]
                    np.testing.assert_array_equal(
                        panel.reshape(count, columns), wide[:, start : start + columns]
                    )


@everywhere_stored
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pack_v_tells_of_values_that_are_not_finite(machine, dtype, storage, value):
    _, _, nr = tile_of(machine, dtype)
    width = nr + 3
    for place in range(2 * width):
        v = np.full((2, width), largest(numpy_dtype(storage)))
        panels = Guarded((2 * 2 * nr,), dtype)
        assert pack(machine, 1, v, (2, 2, width), panels) == 0
        v[divmod(place, width)] = value
        assert pack(machine, 1, v, (2, 2, width), panels) == 1


# --- the products of a block --------------------------------------------------------------------


def blocks(dtype, storage):
    """Kernel (which, then the arguments of score_block, few_scores, output_block, few_outputs)."""

    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.products import few_outputs, few_scores, output_block, score_block
        from fastattn.cpu.registers import jit

        real, stored = pointer_to(dtype), pointer_to(storage)
        packed, lying = score_block(dtype, unit), few_scores(dtype, unit, storage)
        output, few = output_block(dtype, unit), few_outputs(dtype, unit)

        @jit
        def body(job):
            a, count, b, c, rs_c = real(job[1]), job[2], real(job[3]), real(job[4]), job[5]
            if job[0] == 0:
                packed(a, job[6], count, job[6], b, job[7], job[8], c, rs_c)
            elif job[0] == 1:
                k, part = stored(job[3]), real(job[10])
                lying(a, count, job[6], k, job[7], job[8], job[9], c, rs_c, part)
            elif job[0] == 2:
                output(a, job[6], count, b, job[7], job[8], job[9], c, rs_c, job[10])
            else:
                few(a, job[6], count, b, job[7], job[8], job[9], c, rs_c, real(job[11]))

        return body

    return build


def on_block(machine, which, a, b, c, *rest):
    """Call a product of a block on count rows a, keys or values b, output c."""
    types = a.dtype.name, b.dtype.name
    sizes = (*rest, 0, 0, 0, 0, 0)[:7]
    rows = a.view.shape[0]
    run(machine, ("blocks", types), blocks(*types), which, a, rows, b, c, c.stride, *sizes)


def packed_keys(k, nr):
    """Keys as pack_k() leaves them."""
    rows = np.minimum(np.arange(-(-len(k) // nr) * nr), len(k) - 1)
    return np.ascontiguousarray(k[rows].reshape(-1, nr, k.shape[1]).swapaxes(1, 2))


@everywhere_stored
@pytest.mark.parametrize("head_dim", [1, 16, 17, 63, 64, 65, 128, 150])
def test_scores_of_a_block(machine, dtype, storage, head_dim, rng):
    """From packed keys and from keys as they lie: the product, and the same bits."""
    _, _, nr = tile_of(machine, dtype)
    lanes = lanes_of(machine, dtype)
    for count in (1, 2, 3, 4):
        for keys in (1, lanes - 1, lanes, lanes + 1, 2 * nr - 1, 3 * nr):
            padded = -(-keys // lanes) * lanes
            q = Guarded((count, head_dim), dtype)
            k = Guarded((keys, head_dim), numpy_dtype(storage), gap=keys % 2 * 3)
            part = Guarded((5 * lanes,), dtype)
            q.view[...] = rng.standard_normal(q.view.shape)
            k.view[...] = rng.standard_normal(k.view.shape)
            exact = q.view.astype(float) @ k.view.astype(float).T
            bound = np.abs(q.view.astype(float)) @ np.abs(k.view.astype(float)).T
            packed, lying = (Guarded((count, padded), dtype, gap=5) for _ in range(2))
            keys_packed = packed_keys(k.view.astype(dtype), nr)
            on_block(machine, 0, q, keys_packed, packed, head_dim, 0, padded)
            on_block(machine, 1, q, k, lying, head_dim, k.stride, keys, keys, part)
            error = np.abs(packed.view[:, :keys] - exact)
            assert (error <= head_dim * np.finfo(dtype).eps * bound).all()
            lying.check(packed.view)
            for buffer in (packed, q, k, part):
                buffer.check()


@everywhere
@pytest.mark.parametrize("head_dim", [16, 150])
def test_scores_of_a_row_have_the_same_bits_beside_any_rows(machine, dtype, head_dim, rng):
    """Where few keys are left, rows share registers."""
    _, _, nr = tile_of(machine, dtype)
    lanes, count = lanes_of(machine, dtype), 29
    for keys in (1, lanes // 2, lanes + 1, lanes + lanes // 2, nr + 1, 2 * nr + lanes // 2):
        padded = -(-keys // lanes) * lanes
        k = packed_keys(rng.standard_normal((keys, head_dim)).astype(dtype), nr)
        q = Guarded((count, head_dim), dtype, value=rng.standard_normal((count, head_dim)))
        found = Guarded((count, padded), dtype, gap=3)
        on_block(machine, 0, q, k, found, head_dim, 0, keys)
        found.check()
        for m in range(count):
            row = Guarded((1, head_dim), dtype, value=q.view[m : m + 1])
            alone = Guarded((1, padded), dtype)
            on_block(machine, 0, row, k, alone, head_dim, 0, padded)
            np.testing.assert_array_equal(found.view[m, :keys], alone.view[0, :keys])


@everywhere
@pytest.mark.parametrize("gap", [0, 3])
def test_values_as_they_lie_are_added_in_the_order_of_packed_ones(machine, dtype, gap, rng):
    """Numbers that are rounded: one chain a block, however it is cut into pieces."""
    _, _, nr = tile_of(machine, dtype)
    lanes, keys = lanes_of(machine, dtype), 53
    for count in (1, 2, 3, 4):
        for width in (lanes, 4 * lanes, 8 * lanes, 13 * lanes):
            v = Guarded((keys, width), dtype, gap=gap)
            p = Guarded((count, keys), dtype, gap=2)
            sums = Guarded((4 * width,), dtype)
            for buffer in (v, p):
                buffer.view[...] = rng.standard_normal(buffer.view.shape)
            parts = [v.view[:, d : d + nr].ravel() for d in range(0, width, nr)]
            found = []
            for which, values, step in ((2, np.concatenate(parts), keys), (3, v, v.stride)):
                acc = Guarded((count, width), dtype, value=np.ones((count, width), dtype))
                on_block(machine, which, p, values, acc, p.stride, step, 0, keys, width, sums)
                found.append(acc)
            found[1].check(found[0].view)


@everywhere
def test_output_of_a_row_has_the_same_bits_beside_any_rows(machine, dtype, rng):
    """Numbers that are rounded. Where few columns are left, rows share registers."""
    _, _, nr = tile_of(machine, dtype)
    lanes, keys, count = lanes_of(machine, dtype), 53, 29
    for width in (lanes, nr, nr + lanes, 2 * nr):
        head_dim_v = width - lanes // 2
        panels = rng.standard_normal(keys * width).astype(dtype)
        p = Guarded((count, keys), dtype, gap=2, value=rng.standard_normal((count, keys)))
        acc = Guarded((count, width), dtype, value=np.ones((count, width), dtype))
        sizes = keys, 0, keys, head_dim_v
        on_block(machine, 2, p, panels, acc, p.stride, *sizes)
        for m in range(count):
            row = Guarded((1, keys), dtype, value=p.view[m : m + 1])
            alone = Guarded((1, width), dtype, value=np.ones((1, width), dtype))
            on_block(machine, 2, row, panels, alone, row.stride, *sizes)
            np.testing.assert_array_equal(acc.view[m, :head_dim_v], alone.view[0, :head_dim_v])


@everywhere
@pytest.mark.parametrize(("keys", "gap"), [(7, 3), (53, 0)])  # 53: several pieces of a stream
def test_output_of_a_block(machine, dtype, keys, gap, rng):
    """acc += p @ v from packed values and from values as they lie, over any range of keys."""
    mr, _, nr = tile_of(machine, dtype)
    lanes = lanes_of(machine, dtype)
    panel_n = keys + 2
    for count in (1, 2, 3, 4, mr, mr + 1, 2 * mr + 5):
        for width in (lanes, nr, nr + lanes, 3 * nr, 9 * lanes, 11 * lanes):
            head_dim_v = width - (count % 3 + 1) * lanes // 4  # more or less than half a register
            v = Guarded((keys, width), dtype, gap=gap)
            sums = Guarded((4 * width,), dtype)
            v.view[...] = whole_numbers(rng, v.view.shape, dtype)
            v.view[:, head_dim_v:] = 0
            panels = np.full(panel_n * width, np.nan, dtype)
            for d in range(0, width, nr):
                panel = v.view[:, d : d + nr]
                panels[d * panel_n :][: panel.size] = panel.ravel()
            for start, stop in ((0, keys), (2, 5), (3, 3)):
                p = Guarded((count, keys), dtype, gap=2)
                p.view[:, start:stop] = whole_numbers(rng, (count, stop - start), dtype)
                before = whole_numbers(rng, (count, width), dtype)
                expected = before + p.view[:, start:stop] @ v.view[start:stop]
                few = [(3, v, v.stride)] if count <= 4 else []
                for which, values, step in [(2, panels, panel_n), *few]:
                    acc = Guarded((count, width), dtype, value=before)
                    sizes = p.stride, step, start, stop, head_dim_v
                    on_block(machine, which, p, values, acc, *sizes, sums)
                    acc.check(expected)
                    for buffer in (p, v, sums):
                        buffer.check()
