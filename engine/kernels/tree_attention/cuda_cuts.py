"""Which CUDA C++ kernel takes a problem, and how it is cut into blocks of rows.

On Hopper few packed rows go to `csrc/tree_attention_sm90.cu`, many to
`csrc/tree_attention_sm90_wide.cu`; elsewhere all go to `csrc/tree_attention_mma.cu`, which needs
neither Hopper's matrix instructions nor more than 99 KB of shared memory. See there for why.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE_DIM, ROPE_DIM = 512, 64
KEYS = 64  # rows of a tile
ROW_STEP = 8  # packed rows in the N of the matrix instructions
BARRIER_BYTES = 8
WORK_BYTES = 80  # what a block finds of its share
HOPPER = 90
MOST_ROWS_MERGED_INSIDE = (
    576  # of all sequences; with more a merge of its own has more warps at work
)
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

    def arch_name(self, arch: int) -> str:
        """Return the architecture as the compiler calls it."""
        return f"sm_{arch}{self.arch_features}"


WIDE_CHUNKS = 9 + 2 * 8 + 1 + 2  # of 64 x 64: queries, two tiles, rope, weights of two warpgroups
WIDE = Cut(
    "tree_attention_sm90_wide.cu",
    rows=64,
    num_threads=384,
    shared_bytes=WIDE_CHUNKS * KEYS * 64 * 2 + 2 * (2 * 64 + 4) * 4 + 14 * BARRIER_BYTES,
    arch_features="a",
)


def fastest(num_seqs: int, packed: int, arch: int) -> Cut:
    """Return the kernel for sequences of so many packed rows on an architecture."""
    if arch != HOPPER:
        return portable(num_seqs, packed, arch)
    return WIDE if packed > MOST_NARROW_ROWS else narrow(num_seqs, packed)


def narrow(num_seqs: int, packed: int) -> Cut:
    """Return Hopper's kernel for few rows: as few blocks of rows as fit, and of equal size."""
    rows = _equal_rows(packed, most=72)
    queries = rows * (VALUE_DIM + ROPE_DIM) * 2
    rope_stages = 1 if rows > KEYS else 2
    tiles = 2 * KEYS * VALUE_DIM * 2 + rope_stages * KEYS * ROPE_DIM * 2
    weights = rows // 8 * 1024
    decays_peaks_flag = (2 * rows * 4 + 4 + 7) // 8 * 8
    shared_bytes = queries + tiles + weights + decays_peaks_flag + 23 * BARRIER_BYTES + WORK_BYTES
    all_rows = num_seqs * -(-packed // rows) * rows
    is_few = all_rows <= MOST_ROWS_MERGED_INSIDE
    return Cut("tree_attention_sm90.cu", rows, 512, shared_bytes, "a", merges_inside=is_few)


def portable(num_seqs: int, packed: int, arch: int) -> Cut:
    """Return the kernel for any architecture, which is the same on all."""
    del num_seqs, arch
    rows, keys, parts = _equal_rows(packed, most=40), KEYS // 2, 4
    steps = 2 * keys * ((VALUE_DIM + ROPE_DIM) * 2 + 16)
    sums = parts * rows * (keys + 4) * 4
    weights = rows * (keys * 2 + 16)
    shared_bytes = steps + sums + weights + rows * 4 + 2 * BARRIER_BYTES
    return Cut("tree_attention_mma.cu", rows, 256, shared_bytes)


def _equal_rows(packed: int, most: int) -> int:
    """Rows of as few blocks of at most `most` as hold the packed rows, and of equal size."""
    blocks = -(-packed // most)
    return -(-packed // (blocks * ROW_STEP)) * ROW_STEP
