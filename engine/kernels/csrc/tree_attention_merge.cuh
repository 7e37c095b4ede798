// The merge of partial results; see tree_attention_line.cuh.
#pragma once

#include "tree_attention_line.cuh"

constexpr int kMostPlaces = 512;  // partial results of a row: twice the grid
constexpr int kMostMergeWarps = 16;

__device__ __forceinline__ float bf16_at(const uint4& eight, int i) {
  const u32 both = i / 2 == 0 ? eight.x : i / 2 == 1 ? eight.y : i / 2 == 2 ? eight.z : eight.w;
  return __uint_as_float(i % 2 ? both & 0xFFFF0000u : both << 16);
}

// One block a packed row and 256 dims: partial results of the row weighted by exp(their lse - lse),
// divided over as many warps as there are. Rows of items that one block held whole are left alone;
// rows that no tile belongs to become 0.
extern "C" __global__ void __launch_bounds__(32 * kMostMergeWarps)
    merge(const __grid_constant__ Params p) {
  __shared__ int slots[kMostPlaces];
  __shared__ float weights[kMostPlaces], peaks[kMostMergeWarps], totals[kMostMergeWarps];
  extern __shared__ __align__(1024) unsigned char smem[];
  float(*sums)[256] = reinterpret_cast<float(*)[256]>(smem);  // of each warp that there is
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int packed_rows = p.T * p.H;
  const int n = blockIdx.x / packed_rows, packed = blockIdx.x - n * packed_rows;
  const int token = packed / p.H, head = packed - token * p.H, dim = blockIdx.y * 256;
  const Line line(p);
  const Sequence sequence = line.find(p, -1, n);
  bf16_bits* out = p.out + n * p.out_sequence + token * p.out_token + head * p.out_head + dim;
  float* lse = p.lse + n * p.lse_sequence + token * p.lse_token + head * p.lse_head;
  grid_wait();
  if (token >= sequence.tree_size) {
    if (warp == 0) reinterpret_cast<uint4*>(out)[lane] = make_uint4(0, 0, 0, 0);
    if (blockIdx.y == 0 && threadIdx.x == 0) *lse = -kInfinity;
    return;
  }
  const int block = packed / BLOCK_ROWS, row = packed - block * BLOCK_ROWS;

  // Two places a chunk: a run is as long as a share at most, so it is cut in two at most.
  const int chunks = (sequence.tiles + line.share - 1) / line.share, places = 2 * chunks;
  const auto slot_of = [&](int place) {
    const int chunk = place / 2, first = chunk * line.share;
    const int length = min(line.share, sequence.tiles - first);
    const int begin = sequence.begin + line.begin_of(sequence, chunk, block);
    const int cut = (begin / line.share + 1) * line.share;  // where the next block begins
    if (place % 2 && cut >= begin + length) return static_cast<i64>(-1);
    const int grid_block = begin / line.share;
    return static_cast<i64>(line.slot(sequence, chunk * sequence.blocks + block, grid_block + place % 2,
                                      place % 2 || begin == grid_block * line.share));
  };
  if (chunks == 1 && slot_of(1) < 0) return;

  const bf16_bits* from = p.partial_out + static_cast<i64>(row) * kValueDim + dim + lane * 8;
  float peak = -kInfinity;
  for (int place = threadIdx.x; place < places; place += blockDim.x) {
    const i64 slot = slot_of(place);
    slots[place] = static_cast<int>(slot);
    weights[place] = slot < 0 ? -kInfinity : p.partial_lse[slot * BLOCK_ROWS + row];
    peak = fmaxf(peak, weights[place]);
  }
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
  if (lane == 0) peaks[warp] = peak;
  __syncthreads();
  for (int other = 0; other < warps; ++other) peak = fmaxf(peak, peaks[other]);
  const float shift = peak == -kInfinity ? 0.0f : peak;
  float total_weight = 0.0f, sum[8] = {};
  const auto add = [&](int place) {
    const i64 slot = slots[place];
    const uint4 eight = *reinterpret_cast<const uint4*>(from + slot * BLOCK_ROWS * kValueDim);
    const float weight = exp2_fast((weights[place] - shift) / kLn2);
    total_weight += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += weight * bf16_at(eight, i);
  };
#pragma unroll 8
  for (int place = 2 * warp; place < places; place += 2 * warps) add(place);
  for (int place = 2 * warp + 1; place < places; place += 2 * warps)
    if (slots[place] >= 0) add(place);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[warp][lane * 8 + i] = sum[i];
  if (lane == 0) totals[warp] = total_weight;
  __syncthreads();
  float all = 0.0f;
  for (int other = 0; other < warps; ++other) all += totals[other];
  const float scale = all != 0.0f ? 1.0f / all : 0.0f;
  for (int two = threadIdx.x; two < 128; two += blockDim.x) {
    float low = 0.0f, high = 0.0f;
    for (int other = 0; other < warps; ++other) {
      low += sums[other][2 * two];
      high += sums[other][2 * two + 1];
    }
    reinterpret_cast<u32*>(out)[two] = pack_bf16(low * scale, high * scale);
  }
  if (blockIdx.y == 0 && threadIdx.x == 0)
    *lse = all != 0.0f ? peak + log2_fast(all) * kLn2 : -kInfinity;
}
