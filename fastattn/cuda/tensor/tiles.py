"""Where the elements of a matrix are: in shared memory, and in the registers of a warp.

Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): of each 16 x 8
tile of an accumulator, lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .mma import Emitter

ITEM = 2  # bytes of a storage element
CHUNK = 8  # elements of the 16 bytes that one thread copies, and that a row of a matrix has
LINE = 128  # bytes across all banks of shared memory


@dataclass(frozen=True)
class SharedTile:
    """(rows, columns) storage elements in shared memory, whole rows one after the other.

    Chunk c of row r is where chunk c ^ (r % 8) would be: eight rows of one chunk, which is what
    ldmatrix reads at once, then lie in eight different groups of four banks. Measured by the
    emulator: no access of any kernel takes more wavefronts than its bytes need.
    """

    rows: int
    columns: int  # a multiple of 16
    row_bytes: int  # a multiple of LINE

    @classmethod
    def of(cls, rows: int, *columns: int) -> SharedTile:
        """Wide enough for each of `columns`, of which the first is what there is."""
        return cls(rows, columns[0], LINE * -(-max(columns) * ITEM // LINE))

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def address(self, e: Emitter, base, row, chunk):
        """Of a chunk; row and chunk are registers."""
        swizzled = e.shl(e.xor(chunk, e.both(row, 7)), 4)
        return e.add(base, e.add(e.mul(row, self.row_bytes), swizzled))

    def moved(self, e: Emitter, address, row: int, chunk: int):
        """(address, place) of what is so many rows and chunks from `address`.

        Both must be multiples of what the address leaves free: their low bits may only be set where
        those of its own row and chunk are not.
        """
        flipped = e.xor(address, ((row ^ chunk) & 7) << 4)
        return flipped, row * self.row_bytes + chunk // 8 * LINE

    def lane_address(self, e: Emitter, base, row=0):
        """Where a lane starts to load operands with matrices(), from row `row` on."""
        lane = e.lane()
        return self.address(e, base, e.add(e.both(lane, 15), row), e.shr(lane, 4))

    def lane_address_b(self, e: Emitter, base):
        """The same for the second operand of a product with the transpose of this tile."""
        lane = e.lane()
        row = e.add(e.shl(e.shr(lane, 4), 3), e.both(lane, 7))
        return self.address(e, base, row, e.both(e.shr(lane, 3), 1))

    def matrices(self, e: Emitter, address, row: int, column: int, transposed: bool = False):
        """The 16 x 16 elements from (row, column) on: four registers. The address decides what
        they are.

        lane_address()    not transposed: an a operand. Transposed: b operands of columns
                          column and column + 8, for a product with this tile.
        lane_address_b()  b operands of rows row and row + 8, for one with its transpose.
        """
        moved, place = self.moved(e, address, row, column // CHUNK)
        return e.load_matrices(moved, place, transposed)


@dataclass(frozen=True)
class Accumulator:
    """(rows, columns) float32 in the registers of a warp, as a flat list."""

    rows: int  # a multiple of 16
    columns: int  # of 8

    @cached_property
    def tiles(self) -> tuple[int, int]:
        return self.rows // 16, self.columns // 8

    @property
    def size(self) -> int:
        """Registers of a thread."""
        return self.rows * self.columns // 32

    @property
    def thread_rows(self) -> int:
        """Rows of which a thread holds a part: the r-th is row_of(r), and l / 4 more in lane l."""
        return self.rows // 8

    @staticmethod
    def row_of(r: int) -> int:
        return 8 * r

    def place(self, m: int, n: int) -> int:
        """Of the first of the four registers of tile (m, n)."""
        return 4 * (m * self.tiles[1] + n)

    def of_row(self, r: int) -> list[tuple[int, int]]:
        """(register, column) of a thread's r-th row, less 2 (l % 4) columns."""
        return [
            (self.place(r // 2, n) + r % 2 * 2 + j, 8 * n + j)
            for n in range(self.tiles[1])
            for j in (0, 1)
        ]

    def a_operand(self, packed: list, m: int, step: int) -> list:
        """Columns 16 step to 16 step + 15 of row tile m as an a operand. What one product leaves in
        a thread's accumulators is just what the next one reads there.

        packed  pairs of neighbours: register 2 i and 2 i + 1 of the accumulator at i.
        """
        first = self.place(m, 2 * step) // 2
        return packed[first : first + 4]


@dataclass(frozen=True)
class Copy:
    """How `threads` threads share the copying of a tile, 16 bytes at a time."""

    tile: SharedTile
    threads: int

    @cached_property
    def width(self) -> int:
        """Threads that copy neighbouring chunks of a row: as many as divide it, at most a line."""
        chunks = self.tile.columns // CHUNK
        return min(chunks & -chunks, 8)

    @property
    def height(self) -> int:
        return self.threads // self.width

    def passes(self):
        """(row, chunk) of each step, on top of a thread's own."""
        for row in range(0, self.tile.rows, self.height):
            for chunk in range(0, self.tile.columns // CHUNK, self.width):
                yield row, chunk

    def own(self, e: Emitter):
        """(row, chunk) of this thread."""
        thread = e.both(e.thread(), self.threads - 1)
        row = e.shr(thread, self.width.bit_length() - 1)
        if self.width == 4:
            # Eight threads, which go to memory together, then have rows r and r + 4: their chunks
            # lie in different banks, and those of neighbouring rows do not.
            row = e.b.or_(e.shl(e.both(row, 1), 2), e.shr(e.both(row, 6), 1))
            row = e.b.or_(row, e.shl(e.shr(thread, 5), 3))
        return row, e.both(thread, self.width - 1)

    def shared_address(self, e: Emitter, base):
        return self.tile.address(e, base, *self.own(e))

    def offset(self, e: Emitter, row_bytes, column_bytes=None):
        """Bytes from the first element of a matrix in global memory to this thread's chunk."""
        row, chunk = (e.i64(x) for x in self.own(e))
        width = e.i64(16) if column_bytes is None else e.mul(column_bytes, CHUNK)
        return e.add(e.mul(row, row_bytes), e.mul(chunk, width))

    def start(self, e: Emitter, source: Source, shared, valid=None):
        """Start to copy the tile. shared: shared_address(). valid: rows that exist, or None for
        all; the others become 0.
        """
        own_row, own_chunk = self.own(e)
        for row, chunk in self.passes():
            address, place = self.tile.moved(e, shared, row, chunk)
            exists = None if valid is None else e.less(e.add(own_row, row), valid)
            source.copy(e, address, place, row, chunk, own_chunk, exists)


class Source:
    """Rows in global memory, from a thread's first chunk on; see Copy.offset()."""

    def __init__(self, address, row_bytes, columns=None, column_bytes=None):
        """columns: elements of a row, where they are fewer than the tile's; the others become 0.
        column_bytes: between elements, where a row is not a whole number of aligned chunks.
        """
        self._rows = {0: address}
        self.row_bytes, self.columns, self.column_bytes = row_bytes, columns, column_bytes

    def row(self, e: Emitter, row: int):
        """Address of a row, of the thread's first chunk in it. Called with growing rows: one
        addition each.
        """
        if row not in self._rows:
            last = max(self._rows)
            self._rows[row] = e.add(self._rows[last], e.mul(self.row_bytes, row - last))
        return self._rows[row]

    def copy(self, e: Emitter, shared, place: int, row: int, chunk: int, own_chunk, exists):
        """One chunk; exists: whether its row does, None if all do."""
        address = self.row(e, row)
        left = None
        if self.columns is not None:
            left = e.sub(self.columns, e.shl(e.add(own_chunk, chunk), 3))  # elements
        if self.column_bytes is not None:
            self._copy_elements(e, shared, place, address, chunk, left, exists)
            return
        nbytes = None if left is None else e.larger(e.smaller(e.shl(left, 1), 16), 0)
        if exists is not None:
            nbytes = e.b.select(exists, e.i32(16) if nbytes is None else nbytes, e.i32(0))
        e.copy_16(shared, place, address, chunk * CHUNK * ITEM, nbytes)

    def _copy_elements(self, e: Emitter, shared, place: int, address, chunk: int, left, exists):
        """Element by element, through registers."""
        words, low = [], None
        for i in range(CHUNK):
            at = e.add(address, e.mul(self.column_bytes, chunk * CHUNK + i))
            wanted = e.less(i, left)
            wanted = wanted if exists is None else e.b.and_(wanted, exists)
            value = e.b.zext(e.load_global("b16", at, wanted), e.i32(0).type)
            if i % 2:
                words.append(e.b.or_(low, e.shl(value, 16)))
            low = value
        e.store_shared(shared, place, words)


class PagedSource(Source):
    """Rows on pages: row r of the tile is row (first + r) % page_size of a page that a table names.
    Only those that exist are looked up.
    """

    def __init__(self, address, row_bytes, columns, pages: tuple, own_row, valid):
        """address: of the thread's first chunk in row 0 of page 0. pages: the table's address,
        `first`, page_size and the bytes from page to page. own_row: the thread's. valid: rows that
        exist.
        """
        super().__init__(address, row_bytes, columns)
        self._address, self._rows = address, {}
        self._pages, self._own_row, self._valid = pages, own_row, valid

    def row(self, e: Emitter, row: int):
        if row not in self._rows:
            table, first, page_size, page_bytes = self._pages
            number = e.add(self._own_row, row)
            exists, key = e.less(number, self._valid), e.add(number, first)
            page, inside = e.i64(e.b.udiv(key, page_size)), e.i64(e.b.urem(key, page_size))
            page = e.load_global("b64", e.add(table, e.shl(page, 3)), exists)
            place = e.add(e.mul(page, page_bytes), e.mul(inside, self.row_bytes))
            self._rows[row] = e.add(self._address, place)
        return self._rows[row]
