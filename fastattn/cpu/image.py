"""A kernel as a file that is mapped and called: no linker, no LLVM, no copy.

An image is a header and the sections of an ELF object, laid out so that all references between
them, which are relative, hold wherever the image begins at a page.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Kernel = Callable[[int, int, int], int]  # (job address, scratch address, quota) -> work items left

# int32 status f(int64 *result, void **error, void *job, void *scratch, int64 quota): Numba's own
# calling convention. ctypes takes an address in half the time of an int64, which is passed alike.
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 5)

ANSWER = ctypes.c_int64 * 2  # the result, and the address of an error
HEADER = struct.Struct("<24sQ32s")  # magic, where the entry is, digest of all that follows
MAGIC = b"fastattn image 1".ljust(24, b"\0")

# ELF, of 64 bits and little-endian: System V ABI, chapters 4 and 5.
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
SYMBOLS, RELOCATIONS = 2, 4  # types of sections
WRITABLE, OCCUPIES = 1, 2  # flags of sections
# Relocation types, of x86-64 and of AArch64: "ELF for the Arm 64-bit Architecture", 5.7.
RELATIVE = {2, 4, 261}  # 32 bits: PC32, PLT32, PREL32
PAGE, ADD = 275, 277  # adrp and the add after it
LOAD = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # log2 of the bytes that an instruction moves
BRANCH = {282, 283}


class Entry(NamedTuple):
    """Where a kernel begins, a function of the type ENTRY."""

    address: int
    name: str
    keep: Any  # what holds the machine code

    def failure(self, status: int) -> RuntimeError:
        """The error of a kernel that did not answer 0."""
        return RuntimeError(f"kernel {self.name} failed with status {status}")


_entries: dict[Kernel, Entry] = {}  # of all kernels, for as long as the process lives


def call_at(address: int, name: str, keep: Any) -> Kernel:
    """The kernel whose entry lies at an address; `keep` is what holds its memory."""
    call, entry = ENTRY(address), Entry(address, name, keep)

    def run(job: int, scratch: int, quota: int) -> int:
        answer = ANSWER()
        place = ctypes.addressof(answer)
        status = call(place, place + 8, job, scratch, quota)
        if status:
            raise entry.failure(status)
        return answer[0]

    _entries[run] = entry
    return run


def entry_of(kernel: Kernel) -> Entry:
    """Where it begins."""
    return _entries[kernel]


def load(path: Path, name: str) -> Kernel:
    """The kernel of an image file.

    Raises
    ------
    OSError     the file cannot be read, or its file system may not hold programs
    ValueError  it is not an image, or damaged
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC
        )
    content = np.frombuffer(mapped, np.uint8)
    if len(mapped) < HEADER.size:
        raise ValueError(f"{path} is not an image")
    magic, entry, digest = HEADER.unpack_from(mapped)
    if magic != MAGIC or digest != _digest(entry, content[HEADER.size :]):
        raise ValueError(f"{path} is damaged")
    return call_at(content.ctypes.data + entry, name, content)


def _digest(entry: int, code: Any) -> bytes:
    digest = hashlib.sha256(struct.pack("<Q", entry))
    digest.update(code)
    return digest.digest()


def link(code: bytes, entry: str) -> bytes:
    """The image of object code whose entry has this name.

    Raises
    ------
    ValueError  it refers to something outside, to an absolute address, or writes to memory of its
                own
    """
    sections = list(_sections(code))
    image = bytearray(HEADER.size)
    places: dict[int, int] = {}
    for index, section in enumerate(sections):
        if not section.flags & OCCUPIES or not section.size:
            continue
        if section.flags & WRITABLE:
            raise ValueError(f"section {index} of {entry} is writable")
        image += bytes(-len(image) % max(section.align, 1))
        places[index] = len(image)
        image += section.content
    (table,) = (section for section in sections if section.type == SYMBOLS)
    symbols = list(_symbols(table, sections[table.link].content, places))
    for section in sections:
        if section.type == RELOCATIONS and section.info in places:
            for where, word, more in RELOCATION.iter_unpack(section.content):
                to = symbols[word >> 32]
                if to.place is None:
                    raise ValueError(f"{entry} refers to {to.name}, which is outside")
                _resolve(image, word & 0xFFFFFFFF, places[section.info] + where, to.place + more)
    (start,) = (s.place for s in symbols if s.name == entry and s.place is not None)
    image[: HEADER.size] = HEADER.pack(MAGIC, start, _digest(start, image[HEADER.size :]))
    return bytes(image)


class _Section(NamedTuple):
    type: int
    flags: int
    size: int
    link: int
    info: int
    align: int
    content: bytes


class _Symbol(NamedTuple):
    name: str
    place: int | None  # in the image


def _sections(code: bytes) -> Iterator[_Section]:
    if code[:6] != b"\x7fELF\x02\x01":
        raise ValueError("object code is not ELF of 64 bits, little-endian")
    (table,) = struct.unpack_from("<Q", code, 40)
    (count,) = struct.unpack_from("<H", code, 60)
    for index in range(count):
        header = SECTION.unpack_from(code, table + index * SECTION.size)
        _, kind, flags, _, offset, size, linked, info, align, _ = header
        yield _Section(kind, flags, size, linked, info, align, code[offset : offset + size])


def _symbols(table: _Section, names: bytes, places: dict[int, int]) -> Iterator[_Symbol]:
    for name, _, _, section, value, _ in SYMBOL.iter_unpack(table.content):
        text = names[name : names.index(b"\0", name)].decode()
        yield _Symbol(text, places[section] + value if section in places else None)


def _resolve(image: bytearray, kind: int, at: int, to: int) -> None:
    """Let what stands `at` refer `to`; both are offsets in the image."""
    if kind in RELATIVE:
        struct.pack_into("<i", image, at, to - at)
        return
    if kind == PAGE:
        pages = (to >> 12) - (at >> 12)
        bits = (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    elif kind == ADD:
        bits = (to & 0xFFF) << 10
    elif kind in LOAD:
        bits = (to & 0xFFF) >> LOAD[kind] << 10
    elif kind in BRANCH:
        bits = (to - at) >> 2 & 0x3FFFFFF
    else:
        raise ValueError(f"relocation type {kind} is not one that an image can have")
    (instruction,) = struct.unpack_from("<I", image, at)
    struct.pack_into("<I", image, at, instruction | bits)
