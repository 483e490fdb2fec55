"""Kernels for 64-bit Arm, run on this machine by an emulator of the processor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from unittest import mock

import pytest

import fastattn
from fastattn import repeat
from fastattn.cpu import compile, image, prebuilt, run, threads
from fastattn.machine import NEON

PAGE = 4096
CODE, STACK, STOP = 0x10000, 0x100000, 0x8000  # where Linux maps nothing
STACK_BYTES = 1 << 18


def kernel(linked):
    """The kernel of an AArch64 image: it works on this process's own memory."""
    unicorn = pytest.importorskip("unicorn")
    arm = pytest.importorskip("unicorn.arm64_const")
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    machine.mem_map(
        CODE, -(-len(linked) // PAGE) * PAGE, unicorn.UC_PROT_READ | unicorn.UC_PROT_EXEC
    )
    machine.mem_map(STACK, STACK_BYTES)
    machine.mem_write(CODE, linked)
    _, entry, _ = image.HEADER.unpack_from(linked)

    def bring(machine, access, address, size, value, data):
        """Let the page that the kernel asks for be the process's page of the same address."""
        if address < PAGE:
            return False
        first, last = address // PAGE, (address + size - 1) // PAGE
        for page in range(first, last + 1):
            try:
                machine.mem_map_ptr(page * PAGE, PAGE, unicorn.UC_PROT_ALL, page * PAGE)
            except unicorn.UcError:  # the first of two was there
                assert page < last
        return True

    machine.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, bring)

    def run(job, scratch, quota):
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        arguments = (ctypes.addressof(result), ctypes.addressof(error), job, scratch, quota)
        for number, value in enumerate(arguments):
            machine.reg_write(arm.UC_ARM64_REG_X0 + number, value)
        machine.reg_write(arm.UC_ARM64_REG_SP, STACK + STACK_BYTES)
        machine.reg_write(arm.UC_ARM64_REG_LR, STOP)
        machine.emu_start(CODE + entry, STOP)
        assert machine.reg_read(arm.UC_ARM64_REG_W0) == 0
        return result.value

    return run


@contextlib.contextmanager
def everywhere(folder):
    """Let the cpu backend run the images for AArch64 in a folder, on one thread at a time."""

    @functools.cache
    def find(key):
        return kernel(prebuilt.image_path(folder, key, "aarch64").read_bytes())

    with (
        mock.patch.object(compile, "kernel", lambda key, build: find(key)),
        mock.patch.object(compile, "host_unit", return_value=NEON),
        mock.patch.object(threads, "run_on_threads", lambda work, *others: work()),
        fastattn.num_threads(2),
    ):
        run._prepare.cache_clear()
        repeat.forget()
        try:
            yield
        finally:
            run._prepare.cache_clear()
            repeat.forget()
