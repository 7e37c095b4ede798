// The merge of partial results of a line with fronts (tree_attention_fronts.cuh): half a row a warp, or both
// halves, one after the other, where a block's share has more of them than it has warps. A warp weighs
// the parts by exp(their lse - lse) in a fixed order. Rows that one block of the grid held whole are
// left alone; rows that no tile belongs to become 0.
//
// At the end of the launch that has written them, or as a launch of its own where all sequences have
// so many rows that a block's share would take several turns.
#pragma once

#include "tree_attention_fronts.cuh"
#include "tree_attention_merge_inside.cuh"

constexpr int kHalfRow = kValueDim / 2;

// From L2: other blocks have written it.
__device__ __forceinline__ uint4 load_far(const bf16_bits* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ float load_far(const float* from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}

// What a warp keeps of the parts of its row.
struct RowParts {
  int slots[kMostParts];
  float weights[kMostParts];
};

// One half of a row of the results. First `find` where its parts lie, then, once they are there,
// `merge` them.
struct HalfRow {
  const Params& p;
  int n, token, head, row, half;
  FrontPlaces places;

  __device__ __forceinline__ HalfRow(const Params& p, const FrontLine& line, int number)
      : p(p),
        n(number / 2 / (p.T * p.H)),
        token((number / 2 - n * p.T * p.H) / p.H),
        head(number / 2 - (n * p.T + token) * p.H),
        row((token * p.H + head) % BLOCK_ROWS),
        half(number % 2),
        places(p, line, n, (token * p.H + head) / BLOCK_ROWS) {}

  __device__ __forceinline__ void write(int half, const uint4& eight, float lse) const {
    const int lane = threadIdx.x & 31;
    bf16_bits* out = p.out + n * p.out_sequence + token * p.out_token + head * p.out_head;
    reinterpret_cast<uint4*>(out + half * kHalfRow)[lane] = eight;
    if (half == 0 && lane == 0)
      p.lse[n * p.lse_sequence + token * p.lse_token + head * p.lse_head] = lse;
  }

  // This half, and the other one where `halves` is 2.
  __device__ __forceinline__ void merge(RowParts& parts, int halves) const {
    const int lane = threadIdx.x & 31;
    if (token >= places.sequence.tree_size) {
#pragma unroll 1
      for (int now = half; now < half + halves; ++now) write(now, make_uint4(0, 0, 0, 0), -kInfinity);
      return;
    }
    if (places.is_whole()) return;
    float peak = -kInfinity, total = 0.0f;
#pragma unroll 1
    for (int place = lane; place < places.count; place += 32) {
      const i64 slot = places.slot(place);
      const float lse = slot < 0 ? -kInfinity : load_far(p.partial_lse + slot * BLOCK_ROWS + row);
      parts.slots[place] = static_cast<int>(slot < 0 ? places.slot(0) : slot);  // its weight is 0
      parts.weights[place] = lse;
      peak = fmaxf(peak, lse);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
    const float shift = peak == -kInfinity ? 0.0f : peak;
#pragma unroll 1
    for (int place = lane; place < places.count; place += 32) {
      const float weight = exp2_fast((parts.weights[place] - shift) / kLn2);
      parts.weights[place] = weight;
      total += weight;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    __syncwarp();
    const float by = total != 0.0f ? 1.0f / total : 0.0f;  // NaN is seen
#pragma unroll 1
    for (int now = half; now < half + halves; ++now) {
      const bf16_bits* from = p.partial_out + row * kValueDim + now * kHalfRow + lane * 8;
      float sum[8] = {};
#pragma unroll 8
      for (int place = 0; place < places.count; ++place) {
        const uint4 eight = load_far(from + static_cast<i64>(parts.slots[place]) * BLOCK_ROWS * kValueDim);
        const float weight = parts.weights[place];
        const u32 twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[2 * i] += weight * __uint_as_float(twos[i] << 16);
          sum[2 * i + 1] += weight * __uint_as_float(twos[i] & 0xFFFF0000u);
        }
      }
      write(now, make_uint4(pack_bf16(sum[0] * by, sum[1] * by), pack_bf16(sum[2] * by, sum[3] * by),
                            pack_bf16(sum[4] * by, sum[5] * by), pack_bf16(sum[6] * by, sum[7] * by)),
            total != 0.0f ? peak + log2_fast(total) * kLn2 : -kInfinity);
    }
    __syncwarp();
  }
};

// By `kWarps` warps of each block of a cooperative launch, thread 0 the first of them, which share the
// named barrier `kBarrier`. All blocks wait for each other, then each merges its share of the rows.
template <int kWarps, int kBarrier>
__device__ __forceinline__ void merge_share(const Params& p, const FrontLine& line, RowParts* parts,
                                            int thread) {
  const auto meet = [] {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(kBarrier), "n"(32 * kWarps) : "memory");
  };
  const int rows = p.N * p.T * p.H, share = (rows + gridDim.x - 1) / gridDim.x, warp = thread >> 5;
  const int end = 2 * min(static_cast<int>(blockIdx.x + 1) * share, rows);
  const int halves = 2 * share > kWarps ? 2 : 1;  // of a warp in a turn
  GridBarrier grid;
  meet();
  if (thread == 0) grid.arrive();
#pragma unroll 1
  for (int turn = 0; turn < 2 * share; turn += halves * kWarps) {
    const int number = 2 * static_cast<int>(blockIdx.x) * share + turn + halves * warp;
    const HalfRow half_row(p, line, min(number, 2 * rows - 1));
    if (turn == 0) {
      if (thread == 0) grid.wait();
      meet();
    }
    if (number < end) half_row.merge(parts[warp], halves);
  }
}

#if !MERGE_INSIDE
constexpr int kMergeWarps = 4;  // of a block

extern "C" __global__ void __launch_bounds__(32 * kMergeWarps)
    merge(const __grid_constant__ Params p) {
  __shared__ RowParts parts[kMergeWarps];
  const int warp = threadIdx.x >> 5, number = blockIdx.x * kMergeWarps + warp;
  const FrontLine line(p);
  const HalfRow half_row(p, line, min(number, 2 * p.N * p.T * p.H - 1));
  grid_wait();
  if (number < 2 * p.N * p.T * p.H) half_row.merge(parts[warp], 1);
}
#endif
