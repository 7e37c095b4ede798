// How tree attention is cut over a grid, and where its rows lie. Shared by the kernels that read the
// rows and by the merge.
//
// The tiles of all (sequence, block of rows) items are laid in one line and cut into equal shares, one
// a block of the grid; a block finds its share from the lengths on the device, so nothing depends on a
// length known to the host and a captured graph can be replayed at any lengths. The tiles of a sequence
// are cut into chunks as long as a share, and the line runs chunk by chunk: the runs of one chunk, one a
// block of rows, are worked on at the same time, and what the first reads from memory the others find in
// L2. An item that one block holds whole is written at once (but by kernels for one sequence, whose items are
// parts always); the parts of the others are partial results in bfloat16, which a merge weighs in float32 and
// in a fixed order: tree_attention_merge.cuh, a launch of its own, or tree_attention_merge_inside.cuh, which
// says how its partial results lie.
//
// Compile-time: BLOCK_ROWS, PAGE_SIZE, HYBRID (tree rows beside the pages), MERGE_INSIDE (else a launch of
// its own merges).
#pragma once

#include "ptx.cuh"

#ifndef PAGE_SIZE
#define PAGE_SIZE 1
#endif
#ifndef HYBRID
#define HYBRID 0
#endif
#ifndef MERGE_INSIDE
#define MERGE_INSIDE 1
#endif

constexpr int kValueDim = 512;
constexpr int kRopeDim = 64;
constexpr int kKeys = 64;  // cached rows of a tile
constexpr int kRunChange = 7;  // tiles that fit in the time two changes between runs take

struct Params {
  const bf16_bits* q;          // [N, T, H, 576]
  const bf16_bits* kv_pages;   // [P, L, 576]
  const bf16_bits* tree_kv;    // [N, T, 576] where HYBRID, else null
  const int* page_table;       // [N, max_pages]
  const void* context_lens;    // [N] int32, or int64 where wide_context
  const void* tree_sizes;      // [N] int32, or int64 where wide_tree
  const int* ancestor_bits;    // [N, T, W]
  bf16_bits* out;              // [N, T, H, 512]
  float* lse;                  // [N, T, H]
  bf16_bits* partial_out;      // [slots, BLOCK_ROWS, 512]
  float* partial_lse;          // [slots, BLOCK_ROWS]
  i64 q_sequence, q_token, q_head, page, page_row, table_sequence, bits_sequence, bits_token;
  i64 tree_sequence, tree_row, out_sequence, out_token, out_head;
  i64 lse_sequence, lse_token, lse_head;
  int N, T, H, num_blocks;     // num_blocks: grid of the attention kernel
  int wide_context, wide_tree;
  float scale;                 // softmax_scale * log2(e)
};

__device__ __forceinline__ int length_at(const void* lengths, int index, int is_wide) {
  return static_cast<const int*>(lengths)[static_cast<i64>(index) << is_wide];  // the low half
}

// One sequence. Counts fit an int: 2^31 tiles, whichever blocks copy them, are 158 TB of rows.
struct Sequence {
  int index, context_len, tree_size;
  int tiles, blocks;  // tiles of an item, items
  int begin;          // of its first tile on the line
  int order;          // runs before it of items that have several
};

// How the line is cut.
struct Line {
  int total, share;  // tiles; tiles of a block of the grid and of a chunk
  bool is_padded;    // every run has a block of the grid for itself, the shorter ones too

  // All lanes of a warp together.
  __device__ __forceinline__ explicit Line(const Params& p) {
    const int lane = threadIdx.x & 31;
    int tiles = 0, blocks = 0;
    total = 0;
#pragma unroll 1
    for (int n = lane; n < p.N; n += 32) {
      const int tree_size = length_at(p.tree_sizes, n, p.wide_tree);
      tiles = tiles_of(length_at(p.context_lens, n, p.wide_context), tree_size);
      blocks = blocks_of(p, tree_size);
      total += blocks * tiles;
    }
    total = __reduce_add_sync(~0u, total);
    share = max((total + p.num_blocks - 1) / p.num_blocks, 1);
    is_padded = false;
    if (p.N > 32) return;
    // A block that goes from one run to another pays for it: one run each, if that is not much longer.
    const auto runs_at = [&](int length) {
      return static_cast<int>(
          __reduce_add_sync(~0u, blocks * ((tiles + length - 1) / length)));
    };
    int length = share, runs;
#pragma unroll 1
    while ((runs = runs_at(length)) > p.num_blocks)
      if (++length > share + kRunChange) return;
    share = length;
    is_padded = true;
    total = runs * share;
  }

  // Tiles of the line that a sequence takes.
  __device__ __forceinline__ int length_of(int tiles, int blocks) const {
    return blocks * (is_padded ? (tiles + share - 1) / share * share : tiles);
  }

  // Where run `block` of a chunk begins, from the begin of its sequence on.
  __device__ __forceinline__ int begin_of(const Sequence& sequence, int chunk, int block) const {
    const int first = chunk * share, length = min(share, sequence.tiles - first);
    return first * sequence.blocks + block * (is_padded ? share : length);
  }

  __device__ __forceinline__ static int blocks_of(const Params& p, int tree_size) {
    return (tree_size * p.H + BLOCK_ROWS - 1) / BLOCK_ROWS;
  }

  __device__ __forceinline__ static int tiles_of(int context_len, int tree_size) {
    return (context_len + kKeys - 1) / kKeys + (tree_size + kKeys - 1) / kKeys;
  }

  // All lanes together: the sequence that holds tile `position`, or sequence `wanted` where position
  // is negative.
  __device__ __forceinline__ Sequence find(const Params& p, int position, int wanted) const {
    const int lane = threadIdx.x & 31;
    int base = 0, order_base = 0;
#pragma unroll 1
    for (int first = 0; first < p.N; first += 32) {
      const int n = first + lane;
      int tree_size = 0, context_len = 0, tiles = 0, blocks = 0;
      if (n < p.N) {
        tree_size = length_at(p.tree_sizes, n, p.wide_tree);
        context_len = length_at(p.context_lens, n, p.wide_context);
        tiles = tiles_of(context_len, tree_size);
        blocks = blocks_of(p, tree_size);
      }
      const int own = length_of(tiles, blocks);
      const int own_runs = tiles > share && !is_padded ? blocks * ((tiles + share - 1) / share) : 0;
      int end = own, order_end = own_runs;
      if (p.N > 1)
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(~0u, end, step);
          const int order_before = __shfl_up_sync(~0u, order_end, step);
          if (lane >= step) {
            end += before;
            order_end += order_before;
          }
        }
      end += base;
      order_end += order_base;
      const bool is_it = position < 0 ? n == wanted : position >= end - own && position < end;
      const u32 found = __ballot_sync(~0u, is_it);
      if (found) {
        const int from = __ffs(found) - 1;
        Sequence sequence;
        sequence.index = first + from;
        sequence.context_len = uniform(__shfl_sync(~0u, context_len, from));
        sequence.tree_size = uniform(__shfl_sync(~0u, tree_size, from));
        sequence.tiles = uniform(__shfl_sync(~0u, tiles, from));
        sequence.blocks = uniform(__shfl_sync(~0u, blocks, from));
        sequence.begin = uniform(__shfl_sync(~0u, end - own, from));
        sequence.order = uniform(__shfl_sync(~0u, order_end - own_runs, from));
        return sequence;
      }
      base = __shfl_sync(~0u, end, 31);
      order_base = __shfl_sync(~0u, order_end, 31);
    }
    return Sequence{0, 0, 0, 0, 0, 0, 0};
  }

  // Slot of a partial result: of block `grid_block`, the first of its pieces or another, part of run
  // `run` of the sequence. A later piece lies with a later block, or is not the first of its block, or
  // has more runs before it.
  __device__ __forceinline__ int slot(const Sequence& sequence, int run, int grid_block,
                                      bool is_first) const {
    if (is_padded) return grid_block;
    return 2 * grid_block + !is_first + sequence.order + (sequence.tiles > share ? run : 0);
  }
};

// What one block does of one item: tiles [first, last) for rows [row, row + BLOCK_ROWS).
struct Piece {
  Sequence sequence;
  int row, first, last;
  bool is_whole;
  int slot;  // of the partial result where it is not whole
};

// The pieces of this block, one after the other.
struct Run {
  Line line;
  int begin, position, end;

  __device__ __forceinline__ explicit Run(const Params& p) : line(p) {
    begin = position = min(static_cast<int>(blockIdx.x) * line.share, line.total);
    end = min(position + line.share, line.total);
  }

  __device__ __forceinline__ bool next(const Params& p, Piece& piece) {
    if (position >= end) return false;
    piece.sequence = line.find(p, position, -1);
    const int tiles = piece.sequence.tiles, blocks = piece.sequence.blocks;
    const int inside = position - piece.sequence.begin;
    int chunk, block, done = 0, length = line.share;
    if (line.is_padded) {
      chunk = inside / line.share / blocks;
      block = inside / line.share - chunk * blocks;
    } else {
      // A share may be many times a sequence, and times its blocks beyond an int.
      chunk = inside / (min(line.share, tiles) * blocks);
      length = min(line.share, tiles - chunk * line.share);
      block = (inside - chunk * line.share * blocks) / length;
      done = inside - line.begin_of(piece.sequence, chunk, block);
    }
    const int first = chunk * line.share;
    piece.row = uniform(block * BLOCK_ROWS);
    piece.first = uniform(first + done);
    piece.last = uniform(min(min(first + length, tiles), piece.first + end - position));
    piece.is_whole = piece.first == 0 && piece.last == tiles;
    piece.slot = line.slot(piece.sequence, chunk * blocks + block, blockIdx.x, position == begin);
    position = line.is_padded ? end : position + piece.last - piece.first;
    return true;
  }
};

// ---- rows --------------------------------------------------------------------------------------

// One row of a tile. Which page holds it is asked one tile ahead of the copy, since the answer takes
// about as long as a tile does.
struct Row {
  int position;  // in the pages, or column of the tree where HYBRID; -1 where there is no row
  bool is_beside;

  __device__ __forceinline__ Row(const Sequence& sequence, int tile, int key) {
    const int context_tiles = (sequence.context_len + kKeys - 1) / kKeys;
    position = tile * kKeys + key;
    is_beside = false;
    if (tile < context_tiles) {
      if (position >= sequence.context_len) position = -1;
      return;
    }
    const int column = position - context_tiles * kKeys;
    is_beside = HYBRID;
    position = column < sequence.tree_size ? column + (HYBRID ? 0 : sequence.context_len) : -1;
  }

  __device__ __forceinline__ int page(const Params& p, const Sequence& sequence) const {
    if (position < 0 || is_beside) return 0;
    return p.page_table[sequence.index * p.table_sequence + position / PAGE_SIZE];
  }

  // Null where there is no row.
  __device__ __forceinline__ const bf16_bits* address(const Params& p, const Sequence& sequence,
                                                      int page) const {
    if (position < 0) return nullptr;
    if (is_beside) return p.tree_kv + sequence.index * p.tree_sequence + position * p.tree_row;
    return p.kv_pages + page * p.page + (position % PAGE_SIZE) * p.page_row;
  }
};

// Bring the page ids of a piece near, a line of 32 ids a thread; later ones come as they come.
__device__ __forceinline__ void prefetch_pages(const Params& p, const Piece& piece) {
  const int thread = threadIdx.x & 127;
  const int* ids = p.page_table + piece.sequence.index * p.table_sequence;
  const int first = piece.first * kKeys / PAGE_SIZE + 32 * thread;
  const int end = min(piece.last * kKeys, piece.sequence.context_len) / PAGE_SIZE;
  if (first < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(ids + first));
}

// Keys of a tile that a row sees, a bit each.
__device__ __forceinline__ u64 visible_keys(const Params& p, const Piece& piece, int tile, int row) {
  const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys;
  const bool is_tree = tile >= context_tiles;
  const int first = (is_tree ? tile - context_tiles : tile) * kKeys;
  const int left = (is_tree ? piece.sequence.tree_size : piece.sequence.context_len) - first;
  const u64 live = left >= kKeys ? ~0ull : (1ull << left) - 1;
  const int token = (piece.row + row) / p.H;
  if (!is_tree || token >= piece.sequence.tree_size) return live;
  const int* words = p.ancestor_bits + piece.sequence.index * p.bits_sequence +
                     token * p.bits_token + first / 32;
  u64 bits = static_cast<u32>(words[0]);
  if (left > 32) bits |= static_cast<u64>(static_cast<u32>(words[1])) << 32;
  return bits & live;
}

// Where the result of packed row `packed` of a piece and its log-sum-exp go; null where nowhere.
struct Place {
  bf16_bits* out = nullptr;
  float* lse = nullptr;

  __device__ __forceinline__ Place(const Params& p, const Piece& piece, int packed, int token,
                                   int head) {
    if (!piece.is_whole) {
      const i64 slot_row = static_cast<i64>(piece.slot) * BLOCK_ROWS + packed - piece.row;
      lse = p.partial_lse + slot_row;
      out = p.partial_out + slot_row * kValueDim;
    } else if (token < p.T) {
      const i64 n = piece.sequence.index;
      lse = p.lse + n * p.lse_sequence + token * p.lse_token + head * p.lse_head;
      out = p.out + n * p.out_sequence + token * p.out_token + head * p.out_head;
    }
  }
};
