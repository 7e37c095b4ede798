// How tree attention of many packed rows is cut over a grid.
//
// As in tree_attention_line.cuh the tiles of a sequence are taken chunk by chunk, a run a block of
// rows. Here whole chunks come first, each run one block of the grid's: a front. What is left of each
// sequence is the line that the blocks without a front share equally, few tiles a block where they have
// to change between runs, so that all end at about the same time. Where no length of a chunk lets that
// be, nothing is a front and a share is as long as a chunk.
//
// A chunk is at least as long as what all blocks of the grid have on average, and a share as what those without
// a front have, so that runs, chunks and shares are counted in numbers no larger than the grid or the blocks
// of a sequence: see `quotient`.
#pragma once

#include "tree_attention_share.cuh"

constexpr int kChange = 4;  // tiles that fit in the time a change between runs takes, and more

struct FrontSequence : Sequence {
  int fronts;  // whole chunks; `begin` and `order` are of what is left
  int front;   // first block of the grid that has one of them
};

// How the line is cut.
struct FrontLine {
  int chunk, share;  // tiles of a chunk, and of a block of the grid without a front
  int fronts, total;  // blocks of the grid with a front; tiles of the line that the others share
  bool is_padded;    // every run of it has a block for itself
  bool has_fronts;

  // All lanes of a warp together.
  __device__ __forceinline__ explicit FrontLine(const Params& p) {
    const int lane = threadIdx.x & 31;
    int tiles = 0, blocks = 0;
    total = 0;
#pragma unroll 1
    for (int n = lane; n < p.N; n += 32) {
      const int tree_size = length_at(p.tree_sizes, n, p.wide_tree);
      tiles = Line::tiles_of(length_at(p.context_lens, n, p.wide_context), tree_size);
      blocks = Line::blocks_of(p, tree_size);
      total += blocks * tiles;
    }
    total = __reduce_add_sync(~0u, total);
    fronts = 0;
    has_fronts = is_padded = false;
    share = chunk = max((total + p.num_blocks - 1) / p.num_blocks, 1);
    if (p.N > 32) return;
#pragma unroll 1
    for (int length = chunk; length <= chunk + kRunChange; ++length) {
      const int whole = quotient(tiles, length), rest = tiles - whole * length;
      const int all_fronts = __reduce_add_sync(~0u, blocks * whole);
      const int runs = __reduce_add_sync(~0u, rest ? blocks : 0), left = p.num_blocks - all_fronts;
      if (left < (runs > 0)) continue;
      const int all_rest = __reduce_add_sync(~0u, blocks * rest);
      const bool fits = runs <= left;
      const int part = fits ? length : quotient(all_rest + left - 1, left);
      const bool is_level = part + kChange * chunks_of(runs, max(left, 1)) <= length;
      if (!fits && (runs > 2 * p.num_blocks || !is_level)) continue;
      fronts = all_fronts;
      has_fronts = true;
      is_padded = fits;
      chunk = length;
      share = part;
      total = fits ? runs * length : all_rest;
      return;
    }
  }

  __device__ __forceinline__ int whole_of(int tiles) const { return has_fronts ? quotient(tiles, chunk) : 0; }
  __device__ __forceinline__ static int chunks_of(int tiles, int chunk) {
    return quotient(tiles + chunk - 1, chunk);
  }

  __device__ __forceinline__ int rest_of(const FrontSequence& sequence) const {
    return sequence.tiles - sequence.fronts * chunk;
  }

  // Where run `block` of chunk `index` of what is left begins, from the begin of its sequence on.
  __device__ __forceinline__ int begin_of(const FrontSequence& sequence, int index, int block) const {
    if (is_padded) return block * chunk;
    return index * chunk * sequence.blocks + block * min(chunk, rest_of(sequence) - index * chunk);
  }

  // All lanes together: the sequence that holds tile `position` of what is left, or front `front`, or
  // is sequence `wanted`; the others are negative.
  __device__ __forceinline__ FrontSequence find(const Params& p, int position, int front,
                                                int wanted) const {
    const int lane = threadIdx.x & 31;
    int base = 0, order_base = 0, front_base = 0;
#pragma unroll 1
    for (int first = 0; first < p.N; first += 32) {
      const int n = first + lane;
      int tree_size = 0, context_len = 0, tiles = 0, blocks = 0;
      if (n < p.N) {
        tree_size = length_at(p.tree_sizes, n, p.wide_tree);
        context_len = length_at(p.context_lens, n, p.wide_context);
        tiles = Line::tiles_of(context_len, tree_size);
        blocks = Line::blocks_of(p, tree_size);
      }
      const int whole = whole_of(tiles), rest = tiles - whole * chunk;
      const int own_runs = blocks * chunks_of(rest, chunk);
      const int own = is_padded ? own_runs * chunk : blocks * rest, own_fronts = blocks * whole;
      const int own_order = tiles > chunk ? own_runs : 0;
      int end = own, order_end = own_order, front_end = own_fronts;
      if (p.N > 1)
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(~0u, end, step);
          const int order_before = __shfl_up_sync(~0u, order_end, step);
          const int front_before = __shfl_up_sync(~0u, front_end, step);
          if (lane >= step) {
            end += before;
            order_end += order_before;
            front_end += front_before;
          }
        }
      end += base;
      order_end += order_base;
      front_end += front_base;
      const bool is_it = position >= 0 ? position >= end - own && position < end
                         : front >= 0  ? front >= front_end - own_fronts && front < front_end
                                       : n == wanted;
      const u32 found = __ballot_sync(~0u, is_it);
      if (found) {
        const int from = __ffs(found) - 1;
        FrontSequence sequence;
        sequence.index = first + from;
        sequence.context_len = uniform(__shfl_sync(~0u, context_len, from));
        sequence.tree_size = uniform(__shfl_sync(~0u, tree_size, from));
        sequence.tiles = uniform(__shfl_sync(~0u, tiles, from));
        sequence.blocks = uniform(__shfl_sync(~0u, blocks, from));
        sequence.begin = uniform(__shfl_sync(~0u, end - own, from));
        sequence.order = uniform(__shfl_sync(~0u, order_end - own_order, from));
        sequence.fronts = uniform(__shfl_sync(~0u, whole, from));
        sequence.front = uniform(__shfl_sync(~0u, front_end - own_fronts, from));
        return sequence;
      }
      base = __shfl_sync(~0u, end, 31);
      order_base = __shfl_sync(~0u, order_end, 31);
      front_base = __shfl_sync(~0u, front_end, 31);
    }
    return FrontSequence{};
  }

  // Slot of a partial result of block `grid_block` without a front, the first of its pieces or another,
  // part of run `run` of what is left of the sequence. A later piece lies with a later block, or is not
  // the first of its block, or has more runs before it. A front's is its block.
  __device__ __forceinline__ int slot(const FrontSequence& sequence, int run, int grid_block,
                                      bool is_first) const {
    return fronts + 2 * grid_block + !is_first + sequence.order + (sequence.tiles > chunk ? run : 0);
  }
};

// The pieces of this block, one after the other.
struct FrontRun {
  FrontLine line;
  int begin, position, end;
  bool is_front;  // the piece to come

  __device__ __forceinline__ explicit FrontRun(const Params& p) : line(p) {
    line.share = uniform(line.share);  // the compiler has to know: see `uniform`
    line.chunk = uniform(line.chunk);
    line.is_padded = uniform(line.is_padded);
    const int after = static_cast<int>(blockIdx.x) - line.fronts;
    begin = position = uniform(min(max(after, 0) * line.share, line.total));
    end = uniform(after < 0 ? begin : min(position + line.share, line.total));
    is_front = uniform(after < 0);
  }

  __device__ __forceinline__ bool next(const Params& p, Piece& piece) {
    if (!is_front && position >= end) return false;
    const int number = static_cast<int>(blockIdx.x);
    const FrontSequence sequence = line.find(p, is_front ? -1 : position, is_front ? number : -1, -1);
    piece.sequence = sequence;
    const int blocks = sequence.blocks, chunk = line.chunk, rest = line.rest_of(sequence);
    const bool is_alone = is_front || line.is_padded;  // in its block of the grid
    const int inside = is_front ? number - sequence.front : position - sequence.begin;
    const int index = is_front         ? quotient(inside, blocks)
                      : line.is_padded ? 0
                                       : quotient(inside, min(chunk, rest) * blocks);
    const int length = is_front ? chunk : min(chunk, rest - index * chunk);
    const int stride = is_front ? 1 : line.is_padded ? chunk : length;
    const int in_chunk = inside - index * blocks * (is_front ? 1 : chunk);
    const int block = quotient(in_chunk, stride), done = is_alone ? 0 : in_chunk - block * stride;
    const int first = (is_front ? index : sequence.fronts + index) * chunk;
    const int count = is_alone ? length : min(length - done, end - position);
    piece.row = uniform(block * BLOCK_ROWS);
    piece.first = uniform(first + done);
    piece.last = uniform(piece.first + count);
    piece.is_whole = count == sequence.tiles;
    piece.slot = is_front ? number
                          : line.slot(sequence, index * blocks + block, number - line.fronts,
                                      position == begin);
    position = uniform(is_alone ? end : position + count);
    is_front = false;
    return true;
  }
};

// Where the partial results of a block of rows lie: fronts, then the runs of what is left, each of which
// is cut where blocks of the grid meet.
struct FrontPlaces {
  const FrontLine& line;
  const FrontSequence sequence;
  int block, count, per_run;

  __device__ __forceinline__ FrontPlaces(const Params& p, const FrontLine& line, int n, int block)
      : line(line), sequence(line.find(p, -1, -1, n)), block(block) {
    const int rest = line.rest_of(sequence);
    per_run = line.is_padded ? 1 : (min(line.chunk, rest) + line.share - 2) / line.share + 1;
    count = sequence.fronts + per_run * FrontLine::chunks_of(rest, line.chunk);
  }
  __device__ __forceinline__ bool is_whole() const {
    if (sequence.tiles > line.chunk) return false;
    for (int place = 1; place < count; ++place)
      if (slot(place) >= 0) return false;
    return true;
  }

  // Negative where there is none.
  __device__ __forceinline__ i64 slot(int place) const {
    if (place < sequence.fronts) return sequence.front + place * sequence.blocks + block;
    const int index = quotient(place - sequence.fronts, per_run);
    const int part = place - sequence.fronts - index * per_run;
    const int length = min(line.chunk, line.rest_of(sequence) - index * line.chunk);
    const int begin = sequence.begin + line.begin_of(sequence, index, block);
    const int grid_block = quotient(begin, line.share) + part;
    if (part && grid_block * line.share >= begin + length) return -1;
    return line.slot(sequence, index * sequence.blocks + block, grid_block,
                     part || begin == grid_block * line.share);
  }
};
