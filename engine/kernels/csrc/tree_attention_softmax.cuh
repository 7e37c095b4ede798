// The running softmax of a warpgroup that holds scores of 64 x ROWS as tree_attention_columns.cuh says, and
// how its threads agree. See tree_attention_sm90.cu for when peaks are raised.
//
// Compile-time: ROWS, WEIGHT_ROOM (powers of two between a row's highest score and the peak that it raises:
// float16 has room above 1, which small weights then have less need of).
#pragma once

#include "tree_attention_columns.cuh"

#ifndef WEIGHT_ROOM
#define WEIGHT_ROOM 0
#endif

constexpr float kRise = 8.0f + WEIGHT_ROOM;  // RISE, in powers of two

// True in every thread of the warpgroup iff `mine` is in one of them; also a barrier among them.
__device__ __forceinline__ bool any_in_warpgroup(bool mine) { return any_at_barrier<1, 128>(mine); }

__device__ __forceinline__ void warpgroup_barrier() {
  asm volatile("barrier.cta.sync 1, 128;" ::: "memory");
}

// The peaks of a block's rows, in shared memory, where all warps find the same.
struct Peaks {
  float* peaks;   // [ROWS]
  float* decays;  // [ROWS] what O^T and the totals are multiplied by where the peaks have risen

  // Is a score too far above its row's peak?
  __device__ __forceinline__ bool rises(const float (&scores)[kScores], float scale) const {
    const int first = 2 * (threadIdx.x & 3);
    bool any = false;
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const float2 peak = *reinterpret_cast<const float2*>(peaks + 4 * c + first);
      const float* s = scores + 2 * c;
      // -inf + 8: the first score of a row rises.
      any |= fmaxf(s[0] * scale, s[2] * scale) > peak.x + kRise;
      any |= fmaxf(s[1] * scale, s[3] * scale) > peak.y + kRise;
    }
    return any;
  }

  // Turn the scores of a tile into weights.
  __device__ __forceinline__ void weigh(float (&scores)[kScores], float scale) const {
    const int first = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const float2 peak = *reinterpret_cast<const float2*>(peaks + 4 * c + first);
      // A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
      const float shift[2] = {peak.x == -kInfinity ? 0.0f : peak.x,
                              peak.y == -kInfinity ? 0.0f : peak.y};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[2 * c + i] = exp2_fast(fmaf(scores[2 * c + i], scale, -shift[i % 2]));
    }
  }

  // Agree on new peaks with the other warps through `exchange` [ROWS, 4], and follow with the totals.
  __device__ __forceinline__ void raise(const float (&scores)[kScores], float scale,
                                        float* exchange, float (&total)[kColumns]) const {
    const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
    float highest[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = 4 * (c / 2) + c % 2;
      highest[c] = fmaxf(scores[i] * scale, scores[i + 2] * scale);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        highest[c] = fmaxf(highest[c], __shfl_xor_sync(~0u, highest[c], step));
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (lane < 4) exchange[4 * (8 * (c / 2) + 2 * lane + c % 2) + warp] = highest[c];
    warpgroup_barrier();
    if (thread < ROWS) {
      const float4 others = *reinterpret_cast<const float4*>(exchange + 4 * thread);
      const float old = peaks[thread];
      const float top = fmaxf(fmaxf(others.x, others.y), fmaxf(others.z, others.w));
      const float raised = fmaxf(top - WEIGHT_ROOM, old);
      decays[thread] = raised == -kInfinity ? 1.0f : exp2_fast(old - raised);
      peaks[thread] = raised;
    }
    warpgroup_barrier();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] *= decays[8 * (c / 2) + 2 * (lane & 3) + c % 2];
  }
};

// A thread keeps totals of its own keys, for the rows (columns of S^T) it holds scores of.
__device__ __forceinline__ void add_weights(const float (&weights)[kScores], float (&total)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int i = 4 * (c / 2) + c % 2;
    total[c] += weights[i] + weights[i + 2];
  }
}
