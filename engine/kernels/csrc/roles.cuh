// What a kernel says in PTX whose warps have roles of their own: matrices in the numbers that pairs leave.
#pragma once

#include "barriers.cuh"
#include "mma.cuh"

// Two matrices, whose rows lanes 0 to 15 name.
__device__ __forceinline__ void load_two_matrices(u32 (&m)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(from)
               : "memory");
}

// One matrix, stored turned; lanes 0 to 7 name the places of its rows.
__device__ __forceinline__ void store_turned(u32 to, u32 only) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(only)
               : "memory");
}

// Four.
__device__ __forceinline__ void store_turned(u32 to, u32 first, u32 second, u32 third, u32 fourth) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(first), "r"(second), "r"(third), "r"(fourth)
               : "memory");
}
