// How the kernels for sm_90a hold their packed rows in the N of the matrix instructions: S^T = K Q^T,
// O^T = V^T P^T; see tree_attention_sm90.cu. Of a product of 64 x ROWS a thread has element 4 g + 2 h + e:
// key (of scores) or value dim (of values) 16 warp + lane / 4 + 8 h, row 8 g + 2 (lane % 4) + e of the block.
//
// Compile-time: ROWS.
#pragma once

#include "hopper.cuh"
#include "tree_attention_line.cuh"

constexpr int kRowDim = 576;
constexpr int kChunks = kRowDim / 64;          // chunks of 64 dims; the last one is rope
constexpr int kValueChunks = kValueDim / 64;
constexpr int kQueryChunkBytes = ROWS * 128;
constexpr int kGroups = ROWS / 8;              // groups of 8 rows (columns of the accumulators)
constexpr int kScores = ROWS / 2;              // accumulator registers of 64 x ROWS a thread
constexpr int kColumns = ROWS / 4;             // columns a thread holds scores of
constexpr int kOutPitch = kValueDim * 2 + 16;   // bytes of a row on its way out; no two share banks
static_assert(ROWS % 8 == 0 && ROWS >= 8 && ROWS <= 72, "rows of a block: 8..72 in steps of 8");

// ---- matrix instructions, 64 x ROWS x 16 ---------------------------------------------------------

// By the number of columns: L, the accumulators in the text; D, as operands; I(x), x of the three operands
// that follow them, two matrices in shared memory and whether to keep what is there.
#define L8 "%0,%1,%2,%3"
#define L16 L8 ",%4,%5,%6,%7"
#define L24 L16 ",%8,%9,%10,%11"
#define L32 L24 ",%12,%13,%14,%15"
#define L40 L32 ",%16,%17,%18,%19"
#define L48 L40 ",%20,%21,%22,%23"
#define L56 L48 ",%24,%25,%26,%27"
#define L64 L56 ",%28,%29,%30,%31"
#define L72 L64 ",%32,%33,%34,%35"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8 D4(0)
#define D16 D8, D4(4)
#define D24 D16, D4(8)
#define D32 D24, D4(12)
#define D40 D32, D4(16)
#define D48 D40, D4(20)
#define D56 D48, D4(24)
#define D64 D56, D4(28)
#define D72 D64, D4(32)
#define I8(x) x("%4", "%5", "%6")
#define I16(x) x("%8", "%9", "%10")
#define I24(x) x("%12", "%13", "%14")
#define I32(x) x("%16", "%17", "%18")
#define I40(x) x("%20", "%21", "%22")
#define I48(x) x("%24", "%25", "%26")
#define I56(x) x("%28", "%29", "%30")
#define I64(x) x("%32", "%33", "%34")
#define I72(x) x("%36", "%37", "%38")
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

// d = a b + (keep ? d : 0) of numbers of a type; `more`: which way operands in shared memory lie, 0 for
// K-major.
#define SHAPE(type) "wgmma.mma_async.sync.aligned.m64n" TEXT(ROWS) "k16.f32." type "." type " {"
#define CALL(type, a, b, keep, more) \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n" SHAPE(type) JOIN(L, ROWS) "}, " a ", " b \
  ", keep, 1, 1" more ";\n}"

// ---- what becomes of the accumulators ------------------------------------------------------------

// Weights of a tile to shared memory, 64 x ROWS in 8 x 8 matrices, packed as numbers of 16 bits.
template <u32 (*kPack)(float, float)>
__device__ __forceinline__ void store_weights(u32 to_weights, const float (&weights)[kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 to = to_weights + (2 * warp + ((lane >> 3) & 1)) * 128 + (lane & 7) * 16;
#pragma unroll
  for (int group = 0; group + 1 < kGroups; group += 2) {
    const float* w = weights + 4 * group;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to + (group + (lane >> 4)) * 1024),
                 "r"(kPack(w[0], w[1])), "r"(kPack(w[2], w[3])),
                 "r"(kPack(w[4], w[5])), "r"(kPack(w[6], w[7]))
                 : "memory");
  }
  if (kGroups % 2) {
    const float* w = weights + 4 * (kGroups - 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                     to + (kGroups - 1) * 1024),
                 "r"(kPack(w[0], w[1])), "r"(kPack(w[2], w[3]))
                 : "memory");
  }
}

// Multiply each row of a half of O^T by its `decay` [ROWS].
__device__ __forceinline__ void scale_values(const float* decay, float (&values)[4][kScores]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float by = decay[8 * (c / 2) + 2 * (lane & 3) + c % 2];
    const int i = 4 * (c / 2) + c % 2;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      values[block][i] *= by;
      values[block][i + 2] *= by;
    }
  }
}

// Round a half of O^T to bfloat16, turn it to [row, dim] at `place`, which is `shared_place`, and write the
// rows out, each where `to` [ROWS] says; null: nowhere. Of block `block` the value dims are those from
// 256 half + 64 block on.
__device__ __forceinline__ void store_values(const unsigned char* place, u32 shared_place,
                                             bf16_bits* const* to, int half,
                                             const float (&values)[4][kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  // Lane l names row l % 8 of matrix l / 8: matrices (group, h = 0), (group, 1), (group + 1, 0), ..
  const int dim = 256 * half + 16 * warp + 8 * ((lane >> 3) & 1);
  const u32 turned = shared_place + (lane & 7) * kOutPitch + dim * 2;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int group = 0; group + 1 < kGroups; group += 2) {
      const float* v = values[block] + 4 * group;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::
                       "r"(turned + (group + (lane >> 4)) * 8 * kOutPitch + block * 128),
                   "r"(pack_bf16(v[0], v[1])), "r"(pack_bf16(v[2], v[3])),
                   "r"(pack_bf16(v[4], v[5])), "r"(pack_bf16(v[6], v[7]))
                   : "memory");
    }
    if (kGroups % 2) {
      const float* v = values[block] + 4 * (kGroups - 1);
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                       turned + (kGroups - 1) * 8 * kOutPitch + block * 128),
                   "r"(pack_bf16(v[0], v[1])), "r"(pack_bf16(v[2], v[3]))
                   : "memory");
    }
  }
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + half) : "memory");
  const unsigned char* from = place + 512 * half + lane * 16;
#pragma unroll 6
  for (int row = warp; row < ROWS; row += 4) {
    bf16_bits* destination = to[row];
    const uint4 eight = *reinterpret_cast<const uint4*>(from + row * kOutPitch);
    if (destination) *reinterpret_cast<uint4*>(destination + 256 * half + lane * 8) = eight;
  }
}
