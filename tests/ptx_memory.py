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
    orders them is a barrier of their warps, or, within a warp, of its lanes. Each warp has a clock
    that its barriers advance, and knows the others' clocks as far as barriers have told it; bulk
    copies are one more such agent.
    """

    def __init__(self, nbytes: int, threads: int):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.written = np.zeros(nbytes, bool)
        agents = threads // 32 + 1
        self.copies = agents - 1
        self.seen = np.eye(agents, dtype=np.int32)  # [agent, whose clock]: its own is the present
        self.warp_time = np.ones(agents, np.int32)  # barriers of lanes so far
        words = -(-nbytes // BANK_BYTES)
        # Of each word the last write, and the last read of each agent: thread (or MANY), when.
        names = ("thread", "time", "lanes")
        self._write = {name: np.zeros(words, np.int32) for name in (*names, "agent")}
        self._read = {name: np.zeros((words, agents), np.int32) for name in names}
        self._unfenced = np.full(words, -1)  # the thread whose write products do not see yet
        self.wavefronts: dict[str, list[int]] = {}  # by instruction: needed, and the least possible

    def meet(self, warps):
        """A barrier of these warps."""
        self.seen[warps] = self.seen[warps].max(axis=0)
        self.seen[warps, warps] += 1

    def _offsets(self, addresses, nbytes):
        offsets = addresses.astype(np.int64) - SHARED_WINDOW
        if (offsets < 0).any() or (offsets + nbytes > self.bytes.size).any():
            raise EmulationError("shared access out of bounds")
        if (offsets % nbytes).any():
            raise EmulationError("shared access that is not aligned")
        return offsets

    def _words(self, offsets, nbytes):
        return (offsets[:, None] + np.arange(0, nbytes, BANK_BYTES)) // BANK_BYTES

    def _after_write(self, words, agents, threads, whole_warps=False):
        """Whether the last write is ordered before an access now."""
        last = {name: values[words] for name, values in self._write.items()}
        lanes = (last["time"] == self.seen[agents, agents]) & (
            last["lanes"] == self.warp_time[agents]
        )
        if not whole_warps:
            lanes &= last["thread"] != threads
        others = last["time"] > self.seen[agents, last["agent"]]
        return not np.where(last["agent"] == agents, lanes, others).any()

    def _after_reads(self, words, agents, threads):
        """The same of all reads."""
        last = {name: values[words] for name, values in self._read.items()}
        agents, threads = (np.broadcast_to(x, words.shape)[..., None] for x in (agents, threads))
        everyone = np.arange(len(self.seen))
        own = everyone == agents
        lanes = (last["time"] == self.seen[agents, agents]) & (last["thread"] != threads)
        lanes &= last["lanes"] == self.warp_time[agents]
        others = last["time"] > self.seen[agents, everyone]
        return not np.where(own, lanes, others).any()

    def _note_read(self, words, agents, threads):
        agents, threads = (np.broadcast_to(x, words.shape) for x in (agents, threads))
        last, place = self._read, (words, agents)
        now, lanes = self.seen[agents, agents], self.warp_time[agents]
        fellows = (last["time"][place] == now) & (last["lanes"][place] == lanes)
        threads = np.where(fellows & (last["thread"][place] != threads), MANY, threads)
        last["thread"][place], last["time"][place], last["lanes"][place] = threads, now, lanes
        # Of several that read one word at once, only one is now to be seen.
        same = last["thread"][place] == threads
        last["thread"][words[~same], agents[~same]] = MANY

    def read(self, addresses, nbytes, threads, kind, whole_warps=False):
        """(threads, nbytes) uint8. whole_warps: what a thread reads goes to all lanes."""
        offsets = self._offsets(addresses, nbytes)
        places = offsets[:, None] + np.arange(nbytes)
        if not self.written[places].all():
            raise EmulationError("read of shared memory that is not written, or still on its way")
        words, threads = self._words(offsets, nbytes), threads[:, None]
        if not self._after_write(words, threads // 32, threads, whole_warps):
            raise EmulationError("race: read of what another thread has written")
        self._note_read(words, threads // 32, MANY if whole_warps else threads)
        self._count(kind, offsets, nbytes, threads[:, 0])
        return self.bytes[places]

    def read_by_product(self, offsets, warps):
        """(n,) uint8 that four warps read together."""
        if offsets.min() < 0 or offsets.max() >= self.bytes.size:
            raise EmulationError("shared access out of bounds")
        if not self.written[offsets].all():
            raise EmulationError("product of what is not written, or still on its way")
        words = np.unique(offsets // BANK_BYTES)
        if (self._unfenced[words] >= 0).any():
            raise EmulationError("product of what was written without a fence")
        for warp in warps:
            if not self._after_write(words, np.full(len(words), warp), MANY, True):
                raise EmulationError("race: product of what another thread has written")
            self._note_read(words, np.int64(warp), MANY)
        return self.bytes[offsets]

    def still_reads(self, offsets, warps):
        """A product that began earlier has read until now."""
        words = np.unique(offsets // BANK_BYTES)
        for warp in warps:
            self._note_read(words, np.int64(warp), MANY)

    def check_write(self, addresses, nbytes, threads, kind):
        """Where to write, which may happen later."""
        offsets = self._offsets(addresses, nbytes)
        words, threads = self._words(offsets, nbytes), threads[:, None]
        self._check_order(words, threads // 32, threads)
        self._count(kind, offsets, nbytes, threads[:, 0])
        return offsets

    def _check_order(self, words, agents, threads):
        if not self._after_reads(words, agents, threads):
            raise EmulationError("race: write over what another thread may still read")
        if not self._after_write(words, agents, threads):
            raise EmulationError("race: write over what another thread has written")

    def check_copy(self, offsets, thread):
        """Before a bulk copy that a thread starts."""
        words = np.unique(offsets // BANK_BYTES)
        self._check_order(words, np.full(len(words), thread // 32), np.full(len(words), thread))
        if (self._unfenced[words] >= 0).any():
            raise EmulationError("copy over what was written without a fence")
        self.written[offsets] = False

    def forget(self, offsets, nbytes):
        """What was there is about to be overwritten at some unknown time."""
        self.written[offsets[:, None] + np.arange(nbytes)] = False

    def write(self, offsets, data, threads):
        places = offsets[:, None] + np.arange(data.shape[1])
        self.bytes[places], self.written[places] = data, True
        words = self._words(offsets, data.shape[1])
        self._note_write(words, threads[:, None] // 32, threads[:, None])
        self._unfenced[words] = threads[:, None]

    def land(self, offsets, data):
        """A bulk copy has arrived."""
        self.seen[self.copies, self.copies] += 1
        self.bytes[offsets], self.written[offsets] = data, True
        words = np.unique(offsets // BANK_BYTES)
        self._note_write(words, np.int64(self.copies), MANY)
        self._unfenced[words] = -1

    def _note_write(self, words, agents, threads):
        last = self._write
        last["agent"][words], last["thread"][words] = agents, threads
        last["time"][words] = self.seen[agents, agents]
        last["lanes"][words] = self.warp_time[agents]
        self._read["time"][words] = 0
        if (last["agent"][words] != agents).any():
            raise EmulationError("race: two threads write at once")
        last["thread"][words[last["thread"][words] != threads]] = MANY

    def fence(self, threads):
        """Products and copies see what these threads have written."""
        self._unfenced[np.isin(self._unfenced, threads)] = -1

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
