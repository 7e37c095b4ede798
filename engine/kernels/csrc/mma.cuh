// What a kernel says in PTX to multiply matrices warp by warp: 8 x 8 matrices between shared memory
// and registers, products of 16 x 8 x 16.
#pragma once

#include "ptx.cuh"

// Four matrices of 8 x 8; lane l names the place of row l % 8 of matrix l / 8. Of each a lane gets
// numbers 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

// The same, of the matrices turned: numbers of column l / 4.
__device__ __forceinline__ void load_turned(u32 (&m)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

// Two matrices, stored turned; lanes 0 to 15 name the places of their rows.
__device__ __forceinline__ void store_turned(u32 to, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
               "r"(first), "r"(second)
               : "memory");
}

// d += a b, 16 x 8 x 16, a by rows and b by columns. Of d a lane has columns 2 (l % 4) and the next of
// rows l / 4 and l / 4 + 8.
__device__ __forceinline__ void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                             u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
