"""Global and shared memory of an emulated device, and what is wrong to do with them."""

from __future__ import annotations

import numpy as np
from ptx_text import EmulationError

FIRST_ADDRESS = 0x7F0000000000
SHARED_WINDOW = 1024  # where dynamic shared memory starts on sm_90
GUARD = 4096  # bytes between arrays: an index that runs past its own finds nothing
BANKS, BANK_BYTES = 32, 4
MANY = -2  # threads, or warps


class GlobalMemory:
    """Arrays at addresses. Each access must lie in one of them, and be aligned."""

    def __init__(self):
        self._starts = np.empty(0, np.uint64)
        self._bytes: list[np.ndarray] = []
        self._next = FIRST_ADDRESS

    def put(self, array: np.ndarray, skew: int = 0) -> int:
        """Address of a copy of the array's elements in C order, `skew` bytes past alignment."""
        content = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()
        address = self._next + skew
        self._starts = np.append(self._starts, np.uint64(address))
        self._bytes.append(content)
        self._next += (content.size + skew + GUARD) // 256 * 256 + 256
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """The array at an address."""
        return self._bytes[list(self._starts).index(address)].view(like.dtype).reshape(like.shape)

    def _places(self, addresses, nbytes):
        """(content, which threads', offsets) for each array that is accessed."""
        if (addresses % np.uint64(nbytes)).any():
            raise EmulationError("global access that is not aligned")
        owners = np.searchsorted(self._starts, addresses, "right") - 1
        for owner in np.unique(owners):
            mine = owners == owner
            content = self._bytes[owner]
            offsets = (addresses[mine] - self._starts[owner]).astype(np.int64)
            if owner < 0 or (offsets + nbytes > content.size).any():
                raise EmulationError("global access outside every array")
            yield content, mine, offsets[:, None] + np.arange(nbytes)

    def load(self, addresses, nbytes):
        """(threads, nbytes) uint8."""
        data = np.empty((len(addresses), nbytes), np.uint8)
        for content, mine, places in self._places(addresses, nbytes):
            data[mine] = content[places]
        return data

    def store(self, addresses, data):
        for content, mine, places in self._places(addresses, data.shape[1]):
            content[places] = data[mine]


class SharedMemory:
    """Bytes that threads write and others read.

    Errors: a byte read that nobody wrote, or whose copy may still be on its way; and a race: two
    accesses of different threads to one word, one of them a write, that no barrier orders. What
    orders them is the barrier of all threads, or, within a warp, of its lanes.
    """

    def __init__(self, nbytes: int, threads: int):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.written = np.zeros(nbytes, bool)
        self.block_time = 1  # barriers of the block so far
        self.warp_time = np.ones(threads // 32, np.int32)  # and of each warp
        words = -(-nbytes // BANK_BYTES)
        # Of each word the last write and the last reads: thread (or MANY, and then the same of its
        # warp), and when.
        self._write = self._nobody(words)
        self._read = self._nobody(words)
        self.wavefronts: dict[str, list[int]] = {}  # by instruction: needed, and the least possible

    @staticmethod
    def _nobody(words):
        return {name: np.full(words, -1, np.int32) for name in ("thread", "warp", "block", "lanes")}

    def _offsets(self, addresses, nbytes):
        offsets = addresses.astype(np.int64) - SHARED_WINDOW
        if (offsets < 0).any() or (offsets + nbytes > self.bytes.size).any():
            raise EmulationError("shared access out of bounds")
        if (offsets % nbytes).any():
            raise EmulationError("shared access that is not aligned")
        return offsets

    def _words(self, offsets, nbytes):
        return (offsets[:, None] + np.arange(0, nbytes, BANK_BYTES)) // BANK_BYTES

    def _conflicts(self, last, words, threads, whole_warps=False):
        """Whether an access of `last` is not ordered before one of `threads` now."""
        warps = threads // 32
        other_lane = last["lanes"][words] == self.warp_time[warps]
        if not whole_warps:
            other_lane &= last["thread"][words] != threads
        recent = last["block"][words] == self.block_time
        return (recent & ((last["warp"][words] != warps) | other_lane)).any()

    def _note(self, last, words, threads, whole_warps: bool):
        """Remember an access, along with those that no barrier has made old."""
        warps = np.broadcast_to(threads // 32, words.shape)
        threads = np.broadcast_to(MANY if whole_warps else threads, words.shape)
        times = self.warp_time[warps]
        recent = last["block"][words] == self.block_time
        others = recent & (last["warp"][words] != warps)
        fellows = recent & (last["lanes"][words] == times) & (last["thread"][words] != threads)
        threads = np.where(fellows | others, MANY, threads)
        warps = np.where(others, MANY, warps)
        last["thread"][words], last["warp"][words] = threads, warps
        last["lanes"][words], last["block"][words] = times, self.block_time
        # Of several that accessed one word at once, only one is now to be seen.
        for name, mine in (("thread", threads), ("warp", warps)):
            last[name][words[last[name][words] != mine]] = MANY

    def read(self, addresses, nbytes, threads, kind, whole_warps=False):
        """(threads, nbytes) uint8. whole_warps: what a thread reads goes to all lanes."""
        offsets = self._offsets(addresses, nbytes)
        places = offsets[:, None] + np.arange(nbytes)
        if not self.written[places].all():
            raise EmulationError("read of shared memory that is not written, or still on its way")
        words = self._words(offsets, nbytes)
        if self._conflicts(self._write, words, threads[:, None], whole_warps):
            raise EmulationError("race: read of what another thread has written")
        self._note(self._read, words, threads[:, None], whole_warps)
        self._count(kind, offsets, nbytes, threads)
        return self.bytes[places]

    def check_write(self, addresses, nbytes, threads, kind):
        """Where to write, which may happen later."""
        offsets = self._offsets(addresses, nbytes)
        words = self._words(offsets, nbytes)
        if self._conflicts(self._read, words, threads[:, None]):
            raise EmulationError("race: write over what another thread may still read")
        if self._conflicts(self._write, words, threads[:, None]):
            raise EmulationError("race: write over what another thread has written")
        self._count(kind, offsets, nbytes, threads)
        return offsets

    def forget(self, offsets, nbytes):
        """What was there is about to be overwritten at some unknown time."""
        self.written[offsets[:, None] + np.arange(nbytes)] = False

    def write(self, offsets, data, threads):
        places = offsets[:, None] + np.arange(data.shape[1])
        self.bytes[places], self.written[places] = data, True
        words = self._words(offsets, data.shape[1])
        for last in (self._write, self._read):
            last["block"][words] = 0
        self._note(self._write, words, threads[:, None], False)

    def _count(self, kind, offsets, nbytes, threads):
        """Wavefronts: a warp's access takes as many as its busiest bank has words, for each group
        of lanes that together have 128 bytes.
        """
        count = self.wavefronts.setdefault(kind, [0, 0])
        groups = threads // 32 * 32 + threads % 32 * nbytes // (BANKS * BANK_BYTES)
        words = np.unique(groups[:, None] * self.bytes.size + self._words(offsets, nbytes))
        group, bank = words // self.bytes.size, words % self.bytes.size % BANKS
        busy = np.bincount(group * BANKS + bank, minlength=(group.max() + 1) * BANKS)
        busy = busy.reshape(-1, BANKS).max(axis=1)
        count[0] += int(busy.sum())
        count[1] += int((busy > 0).sum())
