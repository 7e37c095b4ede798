// What both kernels that read the rows of tree attention bring to shared memory and take from it; see
// tree_attention_line.cuh. Chunks of 64 dims, rows of 128 bytes swizzled by 128.
#pragma once

#include "hopper.cuh"
#include "tree_attention_line.cuh"

constexpr int kChunkBytes = kKeys * 128;

// Rows `first`, `first` + `kStep`, .. below `end` of a piece's queries, eight lanes a row.
template <int kNumChunks, int kStride, int kStep>
__device__ __forceinline__ void load_queries(const Params& p, const Piece& piece, u32 queries,
                                             int first, int end) {
  const int unit = threadIdx.x & 7;
  int token = (piece.row + first) / p.H, head = piece.row + first - token * p.H;
  const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + unit * 8;
#pragma unroll 1
  for (int row = first; row < end; row += kStep) {
    const bool live = token < piece.sequence.tree_size;
    const bf16_bits* from = live ? base + token * p.q_token + head * p.q_head : p.q;
    const u32 to = queries + row * 128 + ((unit ^ (row & 7)) << 4);
#pragma unroll
    for (int chunk = 0; chunk < kNumChunks; ++chunk)
      copy_16(to + chunk * kStride, from + chunk * 64, live ? 16u : 0u);
    for (head += kStep; head >= p.H; head -= p.H) ++token;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async_proxy();
}

// The rows of a tile as a thread copies them: 16 bytes of four.
struct TileRows {
  const bf16_bits* from[4];
  u32 live_bytes[4];

  // One chunk, from dim `dim` on.
  __device__ __forceinline__ void copy(u32 to, int dim) const {
#pragma unroll
    for (int part = 0; part < 4; ++part)
      copy_16(to + part * 2048, from[part] + dim, live_bytes[part]);
  }
};

// Give `copy` every tile of a block's pieces, numbered, and where in a chunk the thread's first copy
// goes. A warp copies rows 4 warp + i + 16 part, i and part below 4, eight lanes a row. Lane l of either
// half finds row 4 warp + l % 4 + 16 (l / 4 % 4); the others ask it.
template <class Next, class Copy>
__device__ __forceinline__ void load_tiles(const Params& p, Piece& piece, const Next& next,
                                           const Copy& copy) {
  const int thread = threadIdx.x & 127, lane = thread & 31, unit = thread & 7, key = thread >> 3;
  const int own_key = 4 * (thread >> 5) + (lane & 3) + 16 * ((lane >> 2) & 3);
  const u32 inside = key * 128 + ((unit ^ (key & 7)) << 4);
  u32 count = 0;
  do {
    prefetch_pages(p, piece);
    int page = Row(piece.sequence, piece.first, own_key).page(p, piece.sequence);
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++count) {
      const u64 own = reinterpret_cast<u64>(
          Row(piece.sequence, tile, own_key).address(p, piece.sequence, page));
      if (tile + 1 < piece.last)
        page = Row(piece.sequence, tile + 1, own_key).page(p, piece.sequence);
      TileRows rows;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const u64 row = __shfl_sync(~0u, own, (lane >> 3) + 4 * part);
        rows.live_bytes[part] = row ? 16 : 0;
        rows.from[part] = row ? reinterpret_cast<const bf16_bits*>(row) + unit * 8 : p.q;
      }
      copy(rows, count, inside);
    }
  } while (next(count));
}
