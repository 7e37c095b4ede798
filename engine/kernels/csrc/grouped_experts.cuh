// What all kernels of grouped experts say of choices, and how the parts of a row become its result.
#pragma once

#include "ptx.cuh"

constexpr int kCombined = 4;  // dims of a thread

// The expert of a choice, -1 for none.
template <class Params>
__device__ __forceinline__ int expert_of(const Params& p, int row, int choice) {
  const i64 at = row * p.ids_row + choice * p.ids_choice;
  const i64 id = p.wide_ids ? static_cast<const i64*>(p.ids)[at]
                            : static_cast<const int*>(p.ids)[at];
  return id >= 0 && id < p.E ? static_cast<int>(id) : -1;
}

// A thread a row and four dims; parts of choices without an expert are whatever they are. The choices
// were there before the grid ahead let this one start.
template <class Params>
__device__ __forceinline__ void combine_parts(const Params& p) {
  constexpr int kAtOnce = 8;
  const int row = blockIdx.y, dim = (blockIdx.x * 128 + threadIdx.x) * kCombined;
  if (dim >= p.hidden) return;
  const float* parts = p.parts + static_cast<i64>(row) * p.K * p.hidden + dim;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < p.K; first += kAtOnce) {
    u32 those = 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k < p.K && expert_of(p, row, first + k) >= 0) those |= 1u << k;
    if (first == 0) grid_wait();
    float4 part[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      part[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (those >> k & 1)
        part[k] = *reinterpret_cast<const float4*>(parts + static_cast<i64>(first + k) * p.hidden);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      sum.x += part[k].x;
      sum.y += part[k].y;
      sum.z += part[k].z;
      sum.w += part[k].w;
    }
  }
  *reinterpret_cast<uint2*>(p.out + row * p.out_row + dim) =
      make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
}
