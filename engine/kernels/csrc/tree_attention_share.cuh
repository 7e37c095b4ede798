// How a block of the kernel for few rows finds its share of the line (tree_attention_line.cuh) where every
// run has a block of the grid for itself: each of the warps that load alike, from one load of the lengths, with few
// instructions, since a launch waits for those that it executes once.
#pragma once

#include "tree_attention_line.cuh"

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// a / b of numbers that are not negative, where the quotient is less than 2^20; `by` is about 1 / b.
__device__ __forceinline__ int quotient(int a, int b, float by) {
  int q = __float2int_rz(__int2float_rn(a) * by);
  const int rest = a - q * b;
  if (rest < 0) --q;
  if (rest >= b) ++q;
  return q;
}

__device__ __forceinline__ int quotient(int a, int b) { return quotient(a, b, inverse(__int2float_rn(b))); }

// Where the parts of a sequence lie: run `run` of the line with block `run` of the grid.
struct Parts {
  short first, chunks;
  int tree_size;
};

// The piece of this block where there is one sequence, of no more items than blocks of the grid: every run
// then has a block for itself. `share` is the tiles of a run.
__device__ __forceinline__ void find_only_run(const Params& p, Piece& piece, bool& has_piece, int& share) {
  const int tree_size = length_at(p.tree_sizes, 0, p.wide_tree);
  const int context_len = length_at(p.context_lens, 0, p.wide_context);
  const int own = blockIdx.x;
  int most = p.num_blocks, chunk = own;
  float by = inverse(__int2float_rn(most));  // while the lengths come
  const int tiles = Line::tiles_of(context_len, tree_size), blocks = Line::blocks_of(p, tree_size);
  piece.row = 0;
  if (blocks > 1) {
    most = quotient(most, blocks);
    by = inverse(__int2float_rn(most));
    chunk = quotient(own, blocks);
    piece.row = (own - chunk * blocks) * BLOCK_ROWS;
  }
  share = quotient(tiles + most - 1, most, by);
  piece.sequence.index = 0;
  piece.sequence.context_len = context_len;
  piece.sequence.tree_size = tree_size;
  piece.sequence.tiles = tiles;
  piece.first = chunk * share;
  piece.last = min(piece.first + share, tiles);
  piece.is_whole = share >= tiles;
  piece.slot = own;
  has_piece = piece.first < tiles;
}

// Where the parts of that sequence lie.
__device__ __forceinline__ Parts only_parts(const Piece& piece, int share) {
  const int chunks = quotient(piece.sequence.tiles + share - 1, share);
  return {0, static_cast<short>(chunks), piece.sequence.tree_size};
}

// The piece of this block, if it has one. False if the line is to be cut otherwise. The first warp writes
// `all`, of every sequence, where it is given.
__device__ __forceinline__ bool find_own_run(const Params& p, Piece& piece, bool& has_piece,
                                             Parts* all) {
  if (p.N > 32) return false;
  const bool is_one = p.N == 1;  // then all lanes hold the same
  const int lane = threadIdx.x & 31, n = is_one ? 0 : lane;
  int context_len = 0, tree_size = 0, tiles = 0, blocks = 0, chunks, runs;
  if (n < p.N) {
    tree_size = length_at(p.tree_sizes, n, p.wide_tree);
    context_len = length_at(p.context_lens, n, p.wide_context);
    tiles = Line::tiles_of(context_len, tree_size);
    blocks = Line::blocks_of(p, tree_size);
  }
  const auto sum = [&](int x) { return is_one ? x : static_cast<int>(__reduce_add_sync(~0u, x)); };
  int share = max(quotient(sum(blocks * tiles) + p.num_blocks - 1, p.num_blocks), 1);
  const int most = share + kRunChange;
#pragma unroll 1
  while (true) {
    chunks = quotient(tiles + share - 1, share);
    runs = blocks * chunks;
    if (sum(runs) <= p.num_blocks) break;
    if (++share > most) return false;
  }
  int end = runs, inside = blockIdx.x;
  piece.sequence.index = 0;
  if (!is_one) {
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += before;
    }
  }
  if (all && threadIdx.x < p.N)
    all[lane] = {static_cast<short>(end - runs), static_cast<short>(chunks), tree_size};
  if (is_one) {
    has_piece = inside < runs;
  } else {
    const u32 found = __ballot_sync(~0u, inside < end);
    has_piece = found != 0;
    const int from = found ? __ffs(found) - 1 : 0;
    inside -= __shfl_sync(~0u, end - runs, from);
    piece.sequence.index = from;
    context_len = __shfl_sync(~0u, context_len, from);
    tree_size = __shfl_sync(~0u, tree_size, from);
    tiles = __shfl_sync(~0u, tiles, from);
    blocks = __shfl_sync(~0u, blocks, from);
  }
  if (!has_piece) return true;
  piece.sequence.context_len = context_len;
  piece.sequence.tree_size = tree_size;
  const int chunk = blocks == 1 ? inside : quotient(inside, blocks);
  piece.row = (inside - chunk * blocks) * BLOCK_ROWS;
  piece.first = uniform(chunk * share);
  piece.last = uniform(min(piece.first + share, tiles));
  piece.is_whole = piece.first == 0 && piece.last == tiles;
  piece.slot = blockIdx.x;
  return true;
}
