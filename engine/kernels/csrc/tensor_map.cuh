// What a Hopper kernel says in PTX of copies that a tensor map describes: boxes of rows of 128 bytes.
#pragma once

#include "barriers.cuh"

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Bring the map near.
__device__ __forceinline__ void expect_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Arrive, and let the barrier wait for so many bytes of copies.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Start to copy the box whose first word is `word` of row `row` of matrix `matrix`.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int word, int row, int matrix,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(word), "r"(row), "r"(matrix), "r"(barrier)
      : "memory");
}

// Bring such a box to L2.
__device__ __forceinline__ void expect_box(const TensorMap& map, int word, int row, int matrix) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(word), "r"(row), "r"(matrix)
               : "memory");
}
