"""Where the elements of a matrix are: in shared memory, and in the registers of a warp.

Fragments are those of mma.m16n8k16 and, of float32, m16n8k8 (PTX ISA, "Matrix Fragments for
mma.m16n8k16 with floating point type" and "for mma.m16n8k8"): of each 16 x 8 tile of an
accumulator, lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. Operands of both
have as many registers, and as many bytes: two chunks of 16 are the depth of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .mma import Emitter

ITEM = 2  # bytes of a storage element, unless it is float32
CHUNK_BYTES = 16  # what one thread copies, and what a row of a matrix has
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
    item: int = ITEM  # bytes of an element: 2, or 4

    @classmethod
    def of(cls, rows: int, *columns: int, item: int = ITEM) -> SharedTile:
        """Wide enough for each of `columns`, of which the first is what there is."""
        return cls(rows, columns[0], LINE * -(-max(columns) * item // LINE), item)

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.item

    @property
    def depth(self) -> int:
        """Elements of a row that a product takes at once."""
        return 2 * self.chunk

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
        """Where a lane starts to load a operands, from row `row` on."""
        lane = e.lane()
        return self.address(e, base, e.add(e.both(lane, 15), row), e.shr(lane, 4))

    def lane_address_b(self, e: Emitter, base):
        """The same for b operands of a product with the transpose of this tile."""
        lane = e.lane()
        row = e.add(e.shl(e.shr(lane, 4), 3), e.both(lane, 7))
        return self.address(e, base, row, e.both(e.shr(lane, 3), 1))

    def lane_address_v(self, e: Emitter, base):
        """The same for b operands of a product with this tile itself."""
        if self.item == ITEM:
            return self.lane_address(e, base)
        lane = e.lane()
        return self.address(e, base, e.shl(e.both(lane, 3), 1), e.shr(lane, 2))

    def a_operand(self, e: Emitter, address, row: int, column: int) -> list:
        """Rows row to row + 15, columns column to column + depth - 1."""
        return e.load_matrices(*self.moved(e, address, row, column // self.chunk))

    def b_operands(self, e: Emitter, address, row: int, column: int) -> list[list]:
        """Of the transpose, which has these rows as columns: row to row + 7, and eight more."""
        found = e.load_matrices(*self.moved(e, address, row, column // self.chunk))
        return [found[:2], found[2:]]

    def v_operands(self, e: Emitter, address, row: int, column: int) -> list[list]:
        """Rows row to row + depth - 1: operands of eight columns each, from `column` on.

        16-bit elements are transposed on their way: two operands, of eight neighbouring columns.
        float32 cannot be: a lane loads four neighbours of two rows, one for each of four operands.
        So the n-th column of the i-th one is 4 n + i, and its rows are the even ones before the odd
        ones, as Accumulator.a_operand() has them. Eight lanes go to memory together, of rows 0, 2,
        4 and 6 and two chunks, which are in different banks.
        """
        moved, place = self.moved(e, address, row, column // self.chunk)
        if self.item == ITEM:
            found = e.load_matrices(moved, place, transposed=True)
            return [found[:2], found[2:]]
        even = e.load_shared_16(moved, place)
        odd = e.load_shared_16(*self.moved(e, address, row + 1, column // self.chunk))
        return [list(pair) for pair in zip(even, odd, strict=True)]

    @property
    def v_columns(self) -> int:
        """Those that v_operands() loads at once."""
        return 16 if self.item == ITEM else 32

    @property
    def v_neighbours(self) -> int:
        """Accumulator.neighbours of a product with this tile."""
        return 2 if self.item == ITEM else 8


@dataclass(frozen=True)
class Accumulator:
    """(rows, columns) float32 in the registers of a warp, as a flat list."""

    rows: int  # a multiple of 16
    columns: int  # of 8
    # Columns that a lane has beside each other: 2, or as SharedTile.v_operands() says, 8.
    neighbours: int = 2

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
        """(register, column) of a thread's r-th row, less neighbours * (l % 4) columns."""
        tiles = self.neighbours // 2  # whose columns take turns
        return [
            (self.place(r // 2, n + i) + r % 2 * 2 + j, 8 * n + tiles * j + i)
            for n in range(0, self.tiles[1], tiles)
            for j in (0, 1)
            for i in range(tiles)
        ]

    def a_operand(self, packed: list, m: int, step: int) -> list:
        """Columns 16 step to 16 step + 15 of row tile m as an a operand, of float32 8 step to
        8 step + 7, the even ones before the odd ones. What one product leaves in a thread's
        accumulators is just what the next one reads there.

        packed  pairs of neighbours: register 2 i and 2 i + 1 of the accumulator at i. Or float32,
                each for itself.
        """
        if len(packed) == self.size:
            first = self.place(m, step)
            return [packed[first + i] for i in (0, 2, 1, 3)]
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
        chunks = self.tile.columns // self.tile.chunk
        return min(chunks & -chunks, 8)

    @property
    def height(self) -> int:
        return self.threads // self.width

    def passes(self):
        """(row, chunk) of each step, on top of a thread's own."""
        for row in range(0, self.tile.rows, self.height):
            for chunk in range(0, self.tile.columns // self.tile.chunk, self.width):
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
        chunk_bytes = e.i64(CHUNK_BYTES)
        width = chunk_bytes if column_bytes is None else e.mul(column_bytes, self.tile.chunk)
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

    def __init__(self, address, row_bytes, columns=None, column_bytes=None, item: int = ITEM):
        """columns: elements of a row, where they are fewer than the tile's; the others become 0.
        column_bytes: between elements, where a row is not a whole number of aligned chunks.
        item: bytes of an element.
        """
        self._rows, self.item = {0: address}, item
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
            left = elements_from(e, self.columns, e.add(own_chunk, chunk), self.item)
        if self.column_bytes is not None:
            self._copy_elements(e, shared, place, address, chunk, left, exists)
            return
        nbytes = None
        if left is not None:
            nbytes = e.larger(e.smaller(e.shl(left, self.item // 2), CHUNK_BYTES), 0)
        if exists is not None:
            nbytes = e.b.select(exists, e.i32(CHUNK_BYTES) if nbytes is None else nbytes, e.i32(0))
        e.copy_16(shared, place, address, chunk * CHUNK_BYTES, nbytes)

    def _copy_elements(self, e: Emitter, shared, place: int, address, chunk: int, left, exists):
        """Element by element, through registers."""
        words, low, count = [], None, CHUNK_BYTES // self.item
        for i in range(count):
            at = e.add(address, e.mul(self.column_bytes, chunk * count + i))
            wanted = e.less(i, left)
            wanted = wanted if exists is None else e.b.and_(wanted, exists)
            if self.item == 4:
                words.append(e.load_global("b32", at, wanted))
                continue
            value = e.b.zext(e.load_global("b16", at, wanted), e.i32(0).type)
            if i % 2:
                words.append(e.b.or_(low, e.shl(value, 16)))
            low = value
        e.store_shared(shared, place, words)


def elements_from(e: Emitter, columns, chunk, item: int):
    """How many of a row's elements are in a chunk and behind it."""
    return e.sub(columns, e.shl(chunk, {2: 3, 4: 2}[item]))


class PagedSource(Source):
    """Rows on pages: row r of the tile is row (first + r) % page_size of a page that a table names.
    Only those that exist are looked up.
    """

    def __init__(self, address, row_bytes, columns, pages: tuple, own_row, valid, item: int):
        """address: of the thread's first chunk in row 0 of page 0. pages: the table's address,
        `first`, page_size and the bytes from page to page. own_row: the thread's. valid: rows that
        exist.
        """
        super().__init__(address, row_bytes, columns, item=item)
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
