"""Images: linked by us, mapped from a file, called without LLVM; for Arm, run by an emulator."""

from __future__ import annotations

import re
import struct

import emulated
import numpy as np
import pytest

from fastattn.cpu import compile, image, prebuilt

pytest.importorskip("numba")
here = pytest.mark.skipif(not prebuilt.host_name(), reason="no images run on this system")
ARM = "aarch64"


def exponentials(unit):
    """A kernel with constants in memory and a call of memset: 64 floats at scratch become 2 to the
    power of those at job, and then `quota` times 8 bytes there 0.
    """
    from fastattn.cpu.memory import address, pointer_to
    from fastattn.cpu.simd import operations

    lanes = unit.lanes(4)
    real, integers, simd = pointer_to("float32"), pointer_to("int64"), operations("float32", lanes)
    load, store, exp2 = simd.load, simd.store, simd.exp2

    def kernel(job, scratch, quota):
        x, y = real(address(job)), real(address(scratch))
        for n in range(0, 64, lanes):
            store(y, n, exp2(load(x, n)))
        counts = integers(address(job))
        for n in range(quota):
            counts[n] = 0
        return quota + 1

    return kernel


def linked(target):
    machine = compile.named_target(target)
    return image.link(*reversed(compile.compile_object(exponentials(machine.unit), machine)))


def assert_works(kernel):
    x, y = np.linspace(-30, 30, 64, dtype=np.float32), np.zeros(64, np.float32)
    expected = np.exp2(x)
    assert kernel(x.ctypes.data, y.ctypes.data, 31) == 32
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert not x[:62].any()
    assert x[62:].all()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """An image that this machine can run."""
    file = tmp_path_factory.mktemp("image") / "kernel.img"
    file.write_bytes(linked(prebuilt.host_name()))
    return file


@here
def test_image_runs(path):
    assert_works(image.load(path, "test"))


def test_image_runs_on_arm():
    assert_works(emulated.kernel(linked(ARM)))


@here
def test_damage_anywhere_is_noticed(path, tmp_path):
    whole, broken = path.read_bytes(), tmp_path / "broken.img"
    for place in (0, 23, 24, 31, 32, 63, 64, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            image.load(broken, "test")
    for content in (b"", whole[:40], whole[:-1], whole + b"\0"):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged|is not an image|empty file"):
            image.load(broken, "test")


def test_what_cannot_be_mapped_is_refused(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        image.load(tmp_path / "missing.img", "test")
    with pytest.raises(ValueError, match="object code is not ELF of 64 bits, little-endian"):
        image.link(path.read_bytes(), "entry")


REFUSED = {
    "outside": (
        "declare i64 @getpid() define i64 @entry() { %a = call i64 @getpid() ret i64 %a }",
        "entry refers to getpid, which is outside",
    ),
    "writable": (
        "@n = internal global i64 3 define i64 @entry() { %a = load i64, i64* @n ret i64 %a }",
        r"section \d+ of entry is writable",
    ),
    "absolute": (
        "@m = constant i64 3 @n = internal constant i64* @m define i64* @entry() "
        "{ %a = load volatile i64*, i64** @n ret i64* %a }",
        r"section \d+ of entry is writable",  # a loader would have to write it
    ),
    "table of addresses": (
        "@n = constant i64 3 define i64 @entry() { %a = load volatile i64, i64* @n ret i64 %a }",
        r"relocation type \d+ is not one that an image can have",
    ),
}


@pytest.mark.parametrize("target", compile.TARGETS)
@pytest.mark.parametrize("why", REFUSED)
def test_code_that_needs_a_loader_is_refused(why, target):
    text, message = REFUSED[why]
    llvm, machine = compile._llvm(), compile.named_target(target)
    made = llvm.Target.from_triple(machine.triple).create_target_machine(
        reloc="pic", codemodel="small"
    )
    if llvm.llvm_version_info >= (17,):  # which know one type of pointers only
        text = re.sub(r"i64\*+", "ptr", text)
    code = made.emit_object(llvm.parse_assembly(text))
    with pytest.raises(ValueError, match=message):
        image.link(code, "entry")


@pytest.mark.parametrize(
    ("kind", "before", "at", "to", "after"),
    [
        (image.PAGE, 0x90000000, 0x1FFC, 0x3010, 0xD0000000),  # adrp x0, 2 pages on
        (image.PAGE, 0x90000000, 0x3000, 0x2FF0, 0xF0FFFFE0),  # one page back
        (image.ADD, 0x91000000, 0x1000, 0x3010, 0x91004000),  # add x0, x0, 16
        (299, 0x3DC00000, 0x1000, 0x3010, 0x3DC00400),  # ldr q0, [x0, 16]
        (286, 0xF9400000, 0x1000, 0x3010, 0xF9400800),  # ldr x0, [x0, 16]
        (283, 0x94000000, 0x1000, 0x1008, 0x94000002),  # bl, two instructions on
        (283, 0x94000000, 0x1000, 0xFFC, 0x97FFFFFF),  # one back
        (2, 0, 0x40, 0x20, 0xFFFFFFE0),
    ],
)
def test_references(kind, before, at, to, after):
    code = bytearray(0x4000)
    struct.pack_into("<I", code, at, before)
    image._resolve(code, kind, at, to)
    assert struct.unpack_from("<I", code, at) == (after,)
