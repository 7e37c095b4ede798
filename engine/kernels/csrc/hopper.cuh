// What a Hopper kernel alone says in PTX: matrix descriptors and groups.
#pragma once

#include "barriers.cuh"

// Matrix descriptors. Offsets in bytes; `mode` 1 is the 128-byte swizzle, 0 none.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride, u64 mode) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | mode << 62;
}

__device__ __forceinline__ void matrix_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void matrix_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most `kPending` of the committed groups are under way.
template <int kPending>
__device__ __forceinline__ void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
