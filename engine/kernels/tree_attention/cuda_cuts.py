"""Which CUDA C++ kernel takes a problem, and how it is cut into blocks of rows.

On Hopper few packed rows go to `csrc/tree_attention_sm90.cu`, many to
`csrc/tree_attention_sm90_wide.cu`; elsewhere all go to `csrc/tree_attention_mma.cu`, which needs
neither Hopper's matrix instructions nor more than 99 KB of shared memory. See there for why. fp8
rows have a kernel on Hopper alone, `csrc/tree_attention_sm90_fp8.cu`, for few packed rows and many.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE_DIM, ROPE_DIM = 512, 64
KEYS = 64  # rows of a tile
ROW_STEP = 8  # packed rows in the N of the matrix instructions
BARRIER_BYTES = 8
WORK_BYTES, PARTS_BYTES = 80, 8  # what a block finds of its share, and of each sequence
HOPPER = 90
MOST_ROWS_MERGED_INSIDE = (
    576  # of all sequences; with more a merge of its own has more warps at work
)
MOST_WIDE_ROWS_MERGED_INSIDE = 8 * 132  # a row a warp of those that merge, on H200
ROW_BYTES = 656  # of an fp8 row
MOST_SHARED_BYTES = 232_448  # of a block on Hopper
MOST_BYTE_TILES = 5  # of fp8 rows that a block has room for
MOST_NARROW_ROWS = 216  # packed rows of a sequence from which on the wide kernel is faster


@dataclass(frozen=True, slots=True)
class Cut:
    """A kernel and how it cuts a problem."""

    source: str
    rows: int  # packed rows of a block
    num_threads: int
    shared_bytes: int  # dynamic, of a block, as the source lays it out
    arch_features: str = ""  # "a": those of one architecture alone
    merges_inside: bool = False  # the kernel, launched cooperatively, merges what it has written
    is_alone: bool = False  # one sequence, for which half of the code is enough
    reads_boxes: bool = False  # a tensor map of the pages goes with the arguments
    kernel: str = "tree_attention"  # its name in the source

    def arch_name(self, arch: int) -> str:
        """Return the architecture as the compiler calls it."""
        return f"sm_{arch}{self.arch_features}"


LEAST_BOX_ROWS = (
    8  # else 16 bytes a copy: 72 boxes of a few rows take longer to start than a tile has
)
WIDE_ROWS = 64
WIDE_CHUNKS = 8 + 2 * 8 + 2 + 2  # of 64 x 64: queries, two tiles, their ropes, two groups' weights
WIDE_WORK_BYTES = 88
WIDE_BYTES = (
    WIDE_CHUNKS * KEYS * 64 * 2 + 2 * (2 * WIDE_ROWS + 4) * 4 + 16 * BARRIER_BYTES + WIDE_WORK_BYTES
)


def fastest(num_seqs: int, packed: int, arch: int) -> Cut:
    """Return the kernel for sequences of so many packed rows on an architecture."""
    if arch != HOPPER:
        return portable(num_seqs, packed, arch)
    return (wide if packed > MOST_NARROW_ROWS else narrow)(num_seqs, packed)


def wide(num_seqs: int, packed: int) -> Cut:
    """Return Hopper's kernel for many rows."""
    return Cut(
        "tree_attention_sm90_wide.cu",
        WIDE_ROWS,
        num_threads=384,
        shared_bytes=WIDE_BYTES,
        arch_features="a",
        merges_inside=num_seqs * packed <= MOST_WIDE_ROWS_MERGED_INSIDE,
        reads_boxes=True,
    )


def box_rows(page_size: int) -> int:
    """Rows of a box that lie in one page, whatever the first: a power of two, a tile at most."""
    return min(page_size & -page_size, KEYS)


def narrow(num_seqs: int, packed: int) -> Cut:
    """Return Hopper's kernel for few rows: as few blocks of rows as fit, and of equal size."""
    rows = _equal_rows(packed, most=72)
    queries = rows * (VALUE_DIM + ROPE_DIM) * 2
    rope_stages = 1 if rows > KEYS else 2
    tiles = 2 * KEYS * VALUE_DIM * 2 + rope_stages * KEYS * ROPE_DIM * 2
    weights = rows // 8 * 1024
    decays_peaks_flag = (2 * rows * 4 + 4 + 7) // 8 * 8
    work = WORK_BYTES + PARTS_BYTES * min(MOST_ROWS_MERGED_INSIDE // rows, 32)
    shared_bytes = queries + tiles + weights + decays_peaks_flag + 23 * BARRIER_BYTES + work
    all_rows = num_seqs * -(-packed // rows) * rows
    is_few = all_rows <= MOST_ROWS_MERGED_INSIDE
    return Cut(
        "tree_attention_sm90.cu",
        rows,
        num_threads=512,
        shared_bytes=shared_bytes,
        arch_features="a",
        merges_inside=is_few,
        is_alone=num_seqs == 1,
    )


def of_bytes(num_seqs: int, packed: int) -> Cut:
    """Return Hopper's kernel for fp8 rows, cut as by `narrow`; as many tiles as fit."""
    rows = _equal_rows(packed, most=72)
    queries = rows * (VALUE_DIM + ROPE_DIM) * 2
    weights = 2 * rows // 8 * 1024
    decays_peaks_flags = 3 * rows * 4 + 2 * 4
    work = WORK_BYTES + PARTS_BYTES * min(MOST_ROWS_MERGED_INSIDE // rows, 32)
    shared_bytes = queries + weights + decays_peaks_flags + 6 * BARRIER_BYTES + work
    tile, barriers = KEYS * ROW_BYTES, 2 * 4 * BARRIER_BYTES
    room = MOST_SHARED_BYTES - shared_bytes - MOST_BYTE_TILES * barriers
    shared_bytes += room // tile * (tile + barriers)
    is_few = num_seqs * -(-packed // rows) * rows <= MOST_ROWS_MERGED_INSIDE
    return Cut(
        "tree_attention_sm90_fp8.cu",
        rows,
        num_threads=512,
        shared_bytes=shared_bytes,
        arch_features="a",
        merges_inside=is_few,
        is_alone=num_seqs == 1 and is_few,
        kernel="tree_attention_fp8",
    )


def portable(num_seqs: int, packed: int, arch: int) -> Cut:
    """Return the kernel for any architecture, which is the same on all."""
    del arch
    rows = _equal_rows(packed, most=40)
    steps = 5 * 16 * ((VALUE_DIM + ROPE_DIM) * 2 + 16)
    handed = 4 * 32 * rows
    peaks_decays_totals_tokens = (1 + 2 + 2 + 1) * rows * 4
    addresses = 4 * 32 * 8
    numbers = peaks_decays_totals_tokens + 4 * 4 + 14 * BARRIER_BYTES + addresses + 104
    shared_bytes = steps + handed + numbers
    is_few = num_seqs * -(-packed // rows) * rows <= MOST_ROWS_MERGED_INSIDE
    return Cut("tree_attention_mma.cu", rows, 256, shared_bytes, merges_inside=is_few)


def _equal_rows(packed: int, most: int) -> int:
    """Rows of as few blocks of at most `most` as hold the packed rows, and of equal size."""
    blocks = -(-packed // most)
    return -(-packed // (blocks * ROW_STEP)) * ROW_STEP
