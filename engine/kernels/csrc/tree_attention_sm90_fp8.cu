// Tree attention over fp8 latent rows, for sm_90a: rows of 656 bytes, as fp8_rows.py lays them out.
//
// As tree_attention_sm90.cu has it, S^T = K Q^T and O^T = V^T P^T with the packed rows in the N of the
// matrix instructions; the line, the merge and the softmax are the same. What differs is how a tile of 64
// cached rows comes to the matrix instructions, which multiply float16, in which a number in fp8 times a
// power of two is exact:
//
//   as keys    the score warps read bytes and turn them into float16 in registers, which are the first
//              operand of the instruction. A thread reads 16 bytes of a row where the instruction wants 4
//              times 4, so the dims of the queries are turned around to fit: within a chunk of 64, dim
//              16 c + 4 s + 2 q + e stands at 16 s + 8 q + 2 c + e.
//   as values  the copying warps turn the same bytes into a tile of float16 in shared memory, read M-major.
//
// Rotated dims are bfloat16, and multiplied as such. A scale and a product are rounded once each, where a
// scale is no power of two. NaN stays NaN. What is beyond 65504, a value, a scale or a query's number that
// meets values, is infinite.
//
// Grid: one block an SM, each with its share of the line (tree_attention_line.cuh); launched cooperatively
// where MERGE_INSIDE, see there.
//
// Warpgroups (128 threads each):
//   0 loads     bytes, 16 a thread and copy (cp.async), zeros for rows that are not live, and turns them
//               into values, kLag copies later
//   1 scores    as in tree_attention_sm90.cu
//   2, 3 values 256 value dims each, O^T in registers; the merge
//
// Shared memory: queries ROWS x 576 | values kValueStages x 64 x 512 | ring of kSlots x 8192 bytes |
// weights 64 x ROWS | scales 3 x 64 x 4 | decays, peaks | barriers | the share. A tile takes five slots of
// the ring: 128 bytes of each of its 64 rows four times, groups 0, 2, 1 and 3, so that both halves of the
// values have something to do, and its rotated dims. Slots of bytes are swizzled by bit 0 of the row, all
// else as in tree_attention_sm90.cu.
// Barriers, each with a full and an empty side: a slot, a group of the values, the weights; and one for the
// queries' place.
//
// Source of the format: deepseek-ai/FlashMLA README; of the exchange of dims for wider loads: NVIDIA/cutlass
// examples/55_hopper_mixed_dtype_gemm (bytes as the register operand).
//
// Compile-time: ROWS, PAGE_SIZE, HYBRID, MERGE_INSIDE, SHARED_BYTES as in tree_attention_sm90.cu. Strides of
// cached rows count pairs of bytes.

#ifndef ROWS
#define ROWS 72
#endif
#define BLOCK_ROWS ROWS

#include "tree_attention_copies.cuh"
#include "tree_attention_softmax.cuh"
#if MERGE_INSIDE
#include "tree_attention_merge_inside.cuh"
#else
#include "tree_attention_merge.cuh"
#endif

constexpr int kDimGroups = kValueDim / 128;    // that share a scale
constexpr int kParts = kDimGroups + 1;         // of a tile in the ring
constexpr int kSlots = 8;
constexpr int kLag = 6;                        // copies between that of a slot and its conversion
constexpr int kSlotBytes = kKeys * 128;
constexpr int kScaleStages = 3;                // tiles that eight slots touch
constexpr int kScaleBytes = kKeys * 16;
constexpr int kScalePlace = 512 / 2, kRopePlace = 528 / 2;  // in a row, in pairs of bytes
constexpr int kValueStages = ROWS > 24 ? 1 : 2;
constexpr int kQueryOffset = 0;
constexpr int kValueOffset = kQueryOffset + kChunks * kQueryChunkBytes;
constexpr int kSlotOffset = kValueOffset + kValueStages * kValueChunks * kChunkBytes;
constexpr int kWeightOffset = kSlotOffset + kSlots * kSlotBytes;
constexpr int kScaleOffset = kWeightOffset + kGroups * 1024;
constexpr int kDecayOffset = kScaleOffset + kScaleStages * kScaleBytes;
constexpr int kPeakOffset = kDecayOffset + ROWS * 4;
constexpr int kFlagOffset = kPeakOffset + ROWS * 4;
constexpr int kBarrierOffset = (kFlagOffset + 4 + 7) / 8 * 8;
constexpr int kNumBarriers = 35;
constexpr int kWorkOffset = kBarrierOffset + kNumBarriers * 8;
constexpr int kWorkBytes = 80;  // of a Work
constexpr int kSharedBytes = kWorkOffset + kWorkBytes;
static_assert(ROWS * kOutPitch <= kValueOffset, "rows on their way out, in place of the queries");
static_assert(kSharedBytes <= 232448, "shared memory of a block on sm_90");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

// ---- matrix instructions, 64 x ROWS x 16 ---------------------------------------------------------

#define J8(x) x("{%4,%5,%6,%7}", "%8", "%9")
#define J16(x) x("{%8,%9,%10,%11}", "%12", "%13")
#define J24(x) x("{%12,%13,%14,%15}", "%16", "%17")
#define J32(x) x("{%16,%17,%18,%19}", "%20", "%21")
#define J40(x) x("{%20,%21,%22,%23}", "%24", "%25")
#define J48(x) x("{%24,%25,%26,%27}", "%28", "%29")
#define J56(x) x("{%28,%29,%30,%31}", "%32", "%33")
#define J64(x) x("{%32,%33,%34,%35}", "%36", "%37")
#define J72(x) x("{%36,%37,%38,%39}", "%40", "%41")
#define BYTES_CALL(a, b, keep) CALL("f16", a, b, keep, ", 0")
#define ROPE_CALL(a, b, keep) CALL("bf16", a, b, keep, ", 0, 0")
#define VALUES_CALL(a, b, keep) CALL("f16", a, b, keep, ", 1, 1")

// d = a b + (keep ? d : 0), a in registers, b K-major.
__device__ __forceinline__ void multiply_bytes(float (&d)[kScores], const u32 (&a)[4], u64 b,
                                               int keep) {
  asm volatile(JOIN(J, ROWS)(BYTES_CALL)
               : JOIN(D, ROWS)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// d += a b, both operands K-major.
__device__ __forceinline__ void multiply_rope(float (&d)[kScores], u64 a, u64 b) {
  asm volatile(JOIN(I, ROWS)(ROPE_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(1));
}

// d = a b + (keep ? d : 0), a M-major and b N-major.
__device__ __forceinline__ void multiply_values(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(VALUES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

// ---- bytes ---------------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Four numbers in fp8, times a pair of scales: the first two and the others. The conversion reads either half of
// a register as it lies.
__device__ __forceinline__ void decode_four(u32 four, u32 scales, u32& first, u32& second) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 exact_low, exact_high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 exact_low, low;\n"
      "cvt.rn.f16x2.e4m3x2 exact_high, high;\n"
      "mul.rn.f16x2 %0, exact_low, %3;\n"
      "mul.rn.f16x2 %1, exact_high, %3;\n"
      "}"
      : "=r"(first), "=r"(second)
      : "r"(four), "r"(scales));
}

// Two numbers in bfloat16 as float16.
__device__ __forceinline__ u32 as_f16(u32 two) {
  return pack_f16(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}

__device__ __forceinline__ float shared_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ void store_4(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_16(u32 address, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

// The group of value dims that part `part` of a tile is.
__device__ __forceinline__ int group_of(int part) { return (part & 1) * 2 + (part >> 1); }

// ---- roles ---------------------------------------------------------------------------------------

// What one warp finds of the block's share, for all.
struct Work {
  Run run;
  Piece piece;  // the first one
  int has_piece;
};
static_assert(sizeof(Work) <= kWorkBytes, "in shared memory");

__device__ __forceinline__ Work& work_of(unsigned char* smem) {
  return *reinterpret_cast<Work*>(smem + kWorkOffset);
}

// The first piece, in registers of a warp.
__device__ __forceinline__ Piece first_piece(unsigned char* smem) {
  Piece piece = work_of(smem).piece;
  piece.sequence.index = uniform(piece.sequence.index);
  piece.sequence.context_len = uniform(piece.sequence.context_len);
  piece.sequence.tree_size = uniform(piece.sequence.tree_size);
  piece.row = uniform(piece.row);
  piece.first = uniform(piece.first);
  piece.last = uniform(piece.last);
  return piece;
}

// The next piece, once this block has had so many tiles of its share.
__device__ __forceinline__ bool next_piece(const Params& p, unsigned char* smem, u32 tiles,
                                           Piece& piece) {
  Run run = work_of(smem).run;
  run.position = run.line.is_padded ? run.end : run.begin + static_cast<int>(tiles);
  return run.next(p, piece);
}

struct Barriers {
  u32 base;

  __device__ __forceinline__ u32 full(u32 slot) const { return base + 8 * slot; }
  __device__ __forceinline__ u32 empty(u32 slot) const { return base + 64 + 8 * slot; }
  __device__ __forceinline__ u32 values_full(u32 stage, u32 group) const {
    return base + 128 + 8 * (kDimGroups * stage + group);
  }
  __device__ __forceinline__ u32 values_empty(u32 stage, u32 group) const {
    return base + 192 + 8 * (kDimGroups * stage + group);
  }
  __device__ __forceinline__ u32 weights_full() const { return base + 256; }
  __device__ __forceinline__ u32 weights_empty() const { return base + 264; }
  __device__ __forceinline__ u32 query_empty() const { return base + 272; }

  // Arrivals at barrier number `i`, in the order above: a slot and the weights are brought by 128 threads;
  // a lane of each warp says the rest, all threads of both halves that they leave the queries' place.
  __device__ __forceinline__ static u32 arrivals(int i) {
    if (i == 34) return 256;
    return i < 8 || i == 32 ? 128 : i < 16 || i == 33 ? 8 : 4;
  }
};

// Rows `first`, `first` + `kStep`, .. of a piece's queries, dims turned around, eight lanes a row.
template <int kStep>
__device__ __forceinline__ void load_turned_queries(const Params& p, const Piece& piece, u32 queries,
                                                    int first) {
  const int unit = threadIdx.x & 7;
  int token = (piece.row + first) / p.H, head = piece.row + first - token * p.H;
  const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + unit * 8;
#pragma unroll 1
  for (int row = first; row < ROWS; row += kStep) {
    const bool live = token < piece.sequence.tree_size;
    const bf16_bits* from = live ? base + token * p.q_token + head * p.q_head : p.q;
    const u32 to = queries + row * 128;
    copy_16(to + kValueChunks * kQueryChunkBytes + ((unit ^ (row & 7)) << 4), from + kValueDim,
            live ? 16u : 0u);
    uint4 eight[kValueChunks];
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk)
      eight[chunk] = live ? *reinterpret_cast<const uint4*>(from + chunk * 64) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      const u32 twos[4] = {as_f16(eight[chunk].x), as_f16(eight[chunk].y), as_f16(eight[chunk].z),
                           as_f16(eight[chunk].w)};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_4(to + chunk * kQueryChunkBytes + (((4 * (unit & 1) + i) ^ (row & 7)) << 4) +
                    4 * (unit >> 1),
                twos[i]);
    }
    for (head += kStep; head >= p.H; head -= p.H) ++token;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async_proxy();
}

// What lies in slot number `count` of all, turned into values; the rotated dims are none.
__device__ __forceinline__ void convert(u32 shared, const Barriers& barriers, u32 count) {
  const int thread = threadIdx.x & 127, key = thread >> 3, unit = thread & 7;
  const u32 slot = count % kSlots, tile = count / kParts, part = count - tile * kParts;
  if (part < kDimGroups) {
    const u32 group = group_of(part), stage = tile % kValueStages;
    const u32 from = shared + kSlotOffset + slot * kSlotBytes + key * 128 +
                     ((unit ^ ((key & 1) << 2)) << 4);
    const u32 scales = shared + kScaleOffset + tile % kScaleStages * kScaleBytes + key * 16 + group * 4;
    // Of 16 numbers the first 8 first, or where a row's second chunk is the last: no two share banks.
    const bool is_second = unit >> 2;
    const u32 chunk = shared + kValueOffset +
                      (stage * kValueChunks + 2 * group + is_second) * kChunkBytes + key * 128;
    const u32 place = 2 * (unit & 3) + is_second;
    const u32 first = chunk + ((place ^ (key & 7)) << 4), second = chunk + ((place ^ 1 ^ (key & 7)) << 4);
    barrier_wait(barriers.full(slot), (count / kSlots) & 1);
    barrier_wait(barriers.values_empty(stage, group), ((tile / kValueStages) & 1) ^ 1);
    uint4 bytes = shared_16(from);
    float scale = shared_float(scales);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 now = bytes;
      const u32 twice = pack_f16(scale, scale);
      if (i < 3) {  // what comes next is on its way while these are turned
        bytes = shared_16(from + (i + 1) * 2048);
        scale = shared_float(scales + (i + 1) * 256);
      }
      u32 a[4], b[4];
      decode_four(is_second ? now.z : now.x, twice, a[0], a[1]);
      decode_four(is_second ? now.w : now.y, twice, a[2], a[3]);
      decode_four(is_second ? now.x : now.z, twice, b[0], b[1]);
      decode_four(is_second ? now.y : now.w, twice, b[2], b[3]);
      store_16(first + i * 2048, a[0], a[1], a[2], a[3]);
      store_16(second + i * 2048, b[0], b[1], b[2], b[3]);
    }
    // No fence here: it would wait for this thread's copies. Those that read have one.
    __syncwarp();
    if ((thread & 31) == 0) barrier_arrive(barriers.values_full(stage, group));
  }
  if ((thread & 31) == 0) barrier_arrive(barriers.empty(slot));
}

__device__ __forceinline__ void load(const Params& p, unsigned char* smem, u32 shared,
                                     const Barriers& barriers) {
  Piece piece = first_piece(smem);
  const int thread = threadIdx.x & 127, key = thread >> 3, unit = thread & 7;
  const u32 inside_bytes = key * 128 + ((unit ^ ((key & 1) << 2)) << 4);
  u32 copied = 0;  // slots of all
  const auto next = [&](u32 tiles) { return next_piece(p, smem, tiles, piece); };
  load_tiles(p, piece, next, [&](const TileRows& rows, u32 count, u32 inside) {
#pragma unroll 1
    for (int part = 0; part < kParts; ++part, ++copied) {
      const u32 slot = copied % kSlots;
      if (copied >= kLag) convert(shared, barriers, copied - kLag);
      if (copied >= kSlots) barrier_wait(barriers.empty(slot), (copied / kSlots - 1) & 1);
      if (part == 0 && unit == 0) {
        const u32 scales = shared + kScaleOffset + count % kScaleStages * kScaleBytes + key * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy_16(scales + i * 256, rows.from[i] + kScalePlace, rows.live_bytes[i]);
      }
      const u32 to = shared + kSlotOffset + slot * kSlotBytes;
      if (part < kDimGroups)
        rows.copy(to + inside_bytes, group_of(part) * 64);
      else
        rows.copy(to + inside, kRopePlace);
      barrier_arrive_after_copies(barriers.full(slot));
    }
  });
#pragma unroll 1
  for (u32 count = copied > kLag ? copied - kLag : 0; count < copied; ++count)
    convert(shared, barriers, count);
}

// Set what a row may not see to -inf; `masks` [ROWS] is scratch. Element 4 g + 2 h + e: key
// 16 warp + lane / 4 + 8 h, row 8 g + 2 (lane % 4) + e of the block.
__device__ __forceinline__ void hide(const Params& p, const Piece& piece, int tile, u64* masks,
                                     float (&scores)[kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  if (thread < ROWS) masks[thread] = visible_keys(p, piece, tile, thread);
  warpgroup_barrier();
  const int key = warp * 16 + (lane >> 2);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const u64 mask = masks[8 * (c / 2) + 2 * (lane & 3) + c % 2] >> key;
    const int i = 4 * (c / 2) + c % 2;
    if (!(mask & 1)) scores[i] = -kInfinity;
    if (!(mask & 256)) scores[i + 2] = -kInfinity;
  }
}

// Rows have peaks from their first tile on; a thread keeps the totals of its own keys.
struct Softmax : Peaks {
  float total[kColumns];

  __device__ __forceinline__ void reset() {
    const int thread = threadIdx.x & 127;
    if (thread < ROWS) peaks[thread] = -kInfinity;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] = 0.0f;
  }
};

// Where the rows of a block go, null where there is none; scratch in place of the weights.
__device__ __forceinline__ bf16_bits** destinations(unsigned char* smem) {
  return reinterpret_cast<bf16_bits**>(smem + kWeightOffset);
}

// Totals of all warps through `exchange` [ROWS, 4]. Of a part, each row's peak and total; of an item that
// is whole the log-sum-exp of each row, what O^T is divided by (as a decay) and where it goes; the last
// two once `free` says that their places are.
__device__ __forceinline__ void finish(const Params& p, const Piece& piece, Softmax& softmax,
                                       float* exchange, bf16_bits** to, u32 free, u32 parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      softmax.total[c] += __shfl_xor_sync(~0u, softmax.total[c], step);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane < 4) exchange[4 * (8 * (c / 2) + 2 * lane + c % 2) + warp] = softmax.total[c];
  warpgroup_barrier();
  if (thread >= ROWS) return;
  const float4 totals = *reinterpret_cast<const float4*>(exchange + 4 * thread);
  const float total = totals.x + totals.y + (totals.z + totals.w);
  if (MERGE_INSIDE && !piece.is_whole) {
    reinterpret_cast<float2*>(p.partial_lse)[static_cast<i64>(piece.slot) * ROWS + thread] =
        make_float2(softmax.peaks[thread], total);
    barrier_wait(free, parity);  // no phase of the weights' barrier may pass unseen
    return;
  }
  const int packed = piece.row + thread, token = packed / p.H, head = packed - token * p.H;
  const bool seen = total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
  const float lse = seen ? (softmax.peaks[thread] + log2_fast(total)) * kLn2 : -kInfinity;
  const Place place(p, piece, packed, token, head);
  if (place.lse) *place.lse = lse;
  barrier_wait(free, parity);
  softmax.decays[thread] = seen ? 1.0f / total : 0.0f;
  to[thread] = place.out;
}

// Queue the product of a tile and the queries, part by part as they arrive.
__device__ __forceinline__ void start_scores(u32 shared, const Barriers& barriers, u32 tile_count,
                                             float (&scores)[kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, key = 16 * (thread >> 5) + (lane >> 2);
  const u32 inside = key * 128 + (((lane & 3) ^ ((key & 1) << 2)) << 4);
  const u32 scales = shared + kScaleOffset + tile_count % kScaleStages * kScaleBytes + key * 16;
  u32 count = tile_count * kParts;
  shared = opaque(shared);
  const u64 queries = descriptor(shared + kQueryOffset, 16, 1024, 1);
  u32 keys[4][4];
#pragma unroll 1
  for (int part = 0; part < kDimGroups; ++part, ++count) {
    const u32 slot = count % kSlots, group = group_of(part);
    const u32 from = shared + kSlotOffset + slot * kSlotBytes + inside;
    const u64 turned = queries + group * (2 * kQueryChunkBytes >> 4);
    barrier_wait(barriers.full(slot), (count / kSlots) & 1);
    const float one = shared_float(scales + group * 4), one_8 = shared_float(scales + 128 + group * 4);
    const u32 scale = pack_f16(one, one), scale_8 = pack_f16(one_8, one_8);
    uint4 row = shared_16(from), row_8 = shared_16(from + 1024);
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (int step = 0; step < 4; step += 2) {
        const u32 words[2] = {step ? row.z : row.x, step ? row.w : row.y};
        const u32 words_8[2] = {step ? row_8.z : row_8.x, step ? row_8.w : row_8.y};
        matrix_wait<1>();  // the last but one has left these registers
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          decode_four(words[i], scale, keys[step + i][0], keys[step + i][2]);
          decode_four(words_8[i], scale_8, keys[step + i][1], keys[step + i][3]);
        }
        if (chunk == 0 && step) row = shared_16(from ^ 64), row_8 = shared_16((from ^ 64) + 1024);
        matrix_begin();
#pragma unroll
        for (int i = step; i < step + 2; ++i)
          multiply_bytes(scores, keys[i], turned + chunk * (kQueryChunkBytes >> 4) + i * 2,
                         part + chunk + i > 0);
        matrix_commit();
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.empty(slot));
  }
  const u32 slot = count % kSlots;
  const u64 rope_keys = descriptor(shared + kSlotOffset + slot * kSlotBytes, 16, 1024, 1);
  const u64 rope_queries = queries + kValueChunks * (kQueryChunkBytes >> 4);
  barrier_wait(barriers.full(slot), (count / kSlots) & 1);
  fence_async_proxy();
  matrix_begin();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    multiply_rope(scores, rope_keys + step * 2, rope_queries + step * 2);
  matrix_commit();
  matrix_wait<0>();
  __syncwarp();
  if (lane == 0) barrier_arrive(barriers.empty(slot));
}

// Turn the scores of a tile into weights in shared memory, for the values to be added.
__device__ __forceinline__ void weigh_tile(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, const Piece& piece, int tile,
                                           u32 weight_count, Softmax& softmax,
                                           float (&scores)[kScores]) {
  const u32 parity = (weight_count & 1) ^ 1;
  const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys;
  // Scratch lies in place of the weights: the last ones must have been read.
  if (tile >= context_tiles || (tile + 1) * kKeys > piece.sequence.context_len) {
    barrier_wait(barriers.weights_empty(), parity);
    hide(p, piece, tile, reinterpret_cast<u64*>(smem + kWeightOffset), scores);
  }
  const bool is_raised = any_in_warpgroup(softmax.rises(scores, p.scale));
  if (is_raised) {
    barrier_wait(barriers.weights_empty(), parity);
    softmax.raise(scores, p.scale, reinterpret_cast<float*>(smem + kWeightOffset), softmax.total);
  }
  softmax.weigh(scores, p.scale);
  barrier_wait(barriers.weights_empty(), parity);
  store_weights<pack_f16>(shared + kWeightOffset, scores);
  if ((threadIdx.x & 127) == 0)
    *reinterpret_cast<int*>(smem + kFlagOffset) = is_raised && tile > piece.first;
  fence_async_proxy();
  barrier_arrive(barriers.weights_full());
  add_weights(scores, softmax.total);
}

// The queries of the first piece, by all warps that do not copy tiles.
__device__ __forceinline__ void first_queries(const Params& p, const Piece& piece, u32 shared) {
  load_turned_queries<48>(p, piece, shared + kQueryOffset,
                          (static_cast<int>(threadIdx.x) - 128) >> 3);
}

__device__ __forceinline__ void score(const Params& p, unsigned char* smem, u32 shared,
                                      const Barriers& barriers) {
  Piece piece = first_piece(smem);
  u32 tile_count = 0, piece_count = 0, weight_count = 0;
  Softmax softmax;
  softmax.peaks = reinterpret_cast<float*>(smem + kPeakOffset);
  softmax.decays = reinterpret_cast<float*>(smem + kDecayOffset);
  float scores[kScores];
  first_queries(p, piece, shared);
  asm volatile("barrier.cta.sync 4, 384;" ::: "memory");  // all of the queries are there
  while (true) {
    softmax.reset();
    warpgroup_barrier();
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count) {
      start_scores(shared, barriers, tile_count, scores);
      weigh_tile(p, smem, shared, barriers, piece, tile, weight_count, softmax, scores);
    }
    finish(p, piece, softmax, reinterpret_cast<float*>(smem + kQueryOffset), destinations(smem),
           barriers.weights_empty(), (weight_count & 1) ^ 1);
    barrier_arrive(barriers.weights_full());
    ++weight_count;
    if (!next_piece(p, smem, tile_count, piece)) return;
    barrier_wait(barriers.query_empty(), piece_count & 1);
    ++piece_count;
    load_turned_queries<16>(p, piece, shared + kQueryOffset, (threadIdx.x & 127) >> 3);
    warpgroup_barrier();
  }
}

#if MERGE_INSIDE

// Write the values as they lie in registers, not divided by the totals, as the vectors of a partial
// result: of two rows (group, lane % 4) and 2 blocks the 32 of each half of the value dims.
__device__ __forceinline__ void store_part(const Params& p, int slot, int half,
                                           const float (&values)[4][kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  uint4* to = reinterpret_cast<uint4*>(p.partial_out) + static_cast<i64>(slot) * kItemVectors +
              (lane & 3) * kPairVectors + 32 * half + 8 * warp + (lane >> 2);
#pragma unroll
  for (int group = 0; group < kGroups; ++group)
#pragma unroll
    for (int two = 0; two < 2; ++two)
      to[4 * group * kPairVectors + 64 * two] =
          part_vector(values[2 * two] + 4 * group, values[2 * two + 1] + 4 * group);
}

// Named barrier 5; in place of the values and of the ring.
using Merging = Merge<256, 5, kWeightOffset - kValueOffset>;

__device__ __forceinline__ Merging merging(const Params& p, unsigned char* smem) {
  Work& work = work_of(smem);
  return {p, work.run.line, *reinterpret_cast<Merging::Scratch*>(smem + kValueOffset),
          static_cast<int>(threadIdx.x) - 256};
}

#endif

__device__ __forceinline__ void add_values(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, int half) {
  const int lane = threadIdx.x & 31;
  const float* decay = reinterpret_cast<const float*>(smem + kDecayOffset);
  const volatile int* is_raised = reinterpret_cast<const volatile int*>(smem + kFlagOffset);
  const u64 weights = descriptor(shared + kWeightOffset, 128, 1024, 0);
  u32 tile_count = 0, weight_count = 0;
  float values[4][kScores];
  Piece piece = first_piece(smem);
  if (work_of(smem).has_piece) {
    first_queries(p, piece, shared);
    asm volatile("barrier.cta.arrive 4, 384;" ::: "memory");
  }
  if (uniform(work_of(smem).has_piece)) do {
#if MERGE_INSIDE
    const int slot = piece.is_whole ? -1 : piece.slot;
#else
    constexpr int slot = -1;  // of a part that is merged inside
#endif
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count) {
      const u32 stage = tile_count % kValueStages, parity = (tile_count / kValueStages) & 1;
      const u32 full = barriers.values_full(stage, 2 * half), empty = barriers.values_empty(stage, 2 * half);
      const u64 keys = descriptor(
          shared + kValueOffset + (stage * kValueChunks + 4 * half) * kChunkBytes, 16, 1024, 1);
      barrier_wait(barriers.weights_full(), weight_count & 1);
      if (*is_raised) scale_values(decay, values);
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block % 2 == 0) {
          barrier_wait(full + 8 * (block / 2), parity);
          fence_async_proxy();
          matrix_begin();
        }
#pragma unroll
        for (int part = 0; part < 4; ++part)
          multiply_values(values[block], keys + (block * kChunkBytes + part * 2048 >> 4),
                          weights + (part * 256 >> 4), part > 0 || tile > piece.first);
        matrix_commit();
      }
      matrix_wait<2>();
      if (lane == 0) barrier_arrive(empty);
      matrix_wait<0>();
      if (lane == 0) {
        barrier_arrive(empty + 8);
        barrier_arrive(barriers.weights_empty());
      }
    }
#if MERGE_INSIDE
    if (slot >= 0) store_part(p, slot, half, values);
#endif
    barrier_wait(barriers.weights_full(), weight_count & 1);
    ++weight_count;
    if (slot < 0) {
      scale_values(decay, values);
      store_values(smem + kQueryOffset, shared + kQueryOffset, destinations(smem), half,
                   values);
    }
    barrier_arrive(barriers.query_empty());
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.weights_empty());
  } while (next_piece(p, smem, tile_count, piece));
#if MERGE_INSIDE
  merging(p, smem).run();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    tree_attention_fp8(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const Barriers barriers{shared + kBarrierOffset};
  if (threadIdx.x >= 512 - 64) {
    const int index = threadIdx.x - (512 - 64);
    if (shared & 1023) __trap();  // the swizzle counts from addresses that are multiples of 1024
    if (index < kNumBarriers) barrier_init(barriers.base + 8 * index, Barriers::arrivals(index));
    barriers_are_ready();
  } else if (threadIdx.x < 32) {
    Run run(p);
    Piece piece;
    const bool has_piece = run.next(p, piece);
    if (threadIdx.x == 0) {
      work_of(smem).run = run;
      work_of(smem).piece = piece;
      work_of(smem).has_piece = has_piece;
    }
  }
  __syncthreads();
  grid_let_next_start();
  const int role = threadIdx.x >> 7;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (work_of(smem).has_piece) load(p, smem, shared, barriers);
  } else if (role == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    if (work_of(smem).has_piece) score(p, smem, shared, barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    add_values(p, smem, shared, barriers, role - 2);
  }
}
