// Tree attention over paged latent rows, for sm_90a: S^T = K Q^T, O^T = V^T P^T.
//
// Tree tokens and heads are packed into rows, and the rows stand in the N of the matrix
// instructions, which comes in steps of 8: 72 rows cost 72, where a kernel with the rows in M pays
// for 128. A tile is 64 consecutive cached rows, keys in the M of the first product and the K of
// the second; it lies in shared memory once, read as K-major keys and as M-major values.
//
// Grid: one block an SM, each with its share of the line (tree_attention_line.cuh). Where MERGE_INSIDE the
// launch is cooperative, since all blocks merge together what they have written
// (tree_attention_merge_inside.cuh).
//
// Warpgroups (128 threads each):
//   0 loads     tiles, 16 bytes a thread and copy (cp.async), zeros for rows that are not live; any
//               page size, page ids asked one tile ahead
//   1 scores    the queries of an item; 64 x ROWS scores of a tile, softmax, weights to shared memory
//   2, 3 values 256 value dims each, O^T in registers; the merge
// One warp finds the block's share for all; the first queries are loaded by all but the first warpgroup.
// Most instructions are executed once a launch and have to be fetched first, the same by all SMs at the
// same time, which takes several times as long as to execute them: so loops stay loops.
//
// Shared memory: queries ROWS x 576 | values 2 x 64 x 512 | rope ROPE_STAGES x 64 x 64 |
// weights 64 x ROWS | decays, peaks | barriers | the share; queries, values and rope in chunks of 64 dims whose
// rows of 128 bytes are swizzled by 128, weights in 8 x 8 matrices. While an item that a block held
// whole ends, its rows lie in place of the queries on their way out; what is merged lies in place of the
// values.
// Barriers, each with a full and an empty side: a pair of value chunks of a stage (chunk j of either
// half of the value dims), the rope chunk of a rope stage, the weights; and one for the queries'
// place. A tile is loaded and given back pair by pair, so that the next but one is on its way while
// half of it is in use.
//
// A row's shift is its running maximum, raised only when a score exceeds it by RISE (weights stay
// below 2^RISE): most tiles then need neither an exchange between warps nor a rescaling of O^T.
//
// Source of the ideas: DeepSeek FlashMLA docs/20250422-new-kernel-deep-dive.md (value from the key
// tile, split output), flashinfer include/flashinfer/attention/mla_hopper.cuh (page ids one tile
// ahead), FlashAttention-4 (rescaling only beyond a threshold), ThunderMLA (no host schedule).
//
// Compile-time: ROWS (8..72, a multiple of 8), PAGE_SIZE, HYBRID (tree rows beside the pages),
// MERGE_INSIDE (else a launch of its own merges: with many items a block's share of the merge is long),
// SHARED_BYTES (what the launch asks for, to be compared).

#ifndef ROWS
#define ROWS 72
#endif
#ifndef MERGE_INSIDE
#define MERGE_INSIDE 1
#endif
#define BLOCK_ROWS ROWS

#include "hopper.cuh"
#include "tree_attention_copies.cuh"
#include "tree_attention_line.cuh"
#if MERGE_INSIDE
#include "tree_attention_merge_inside.cuh"
#else
#include "tree_attention_merge.cuh"
#endif

constexpr int kRowDim = 576;
constexpr int kChunks = kRowDim / 64;          // chunks of 64 dims; the last one is rope
constexpr int kValueChunks = kValueDim / 64;
constexpr int kQueryChunkBytes = ROWS * 128;
constexpr int kStages = 2;
constexpr int kPairs = kValueChunks / 2;       // chunk j of the first and of the second half
constexpr int kRopeStages = ROWS > 64 ? 1 : 2;  // 72 rows leave room for one
constexpr int kGroups = ROWS / 8;              // groups of 8 rows (columns of the accumulators)
constexpr int kScores = ROWS / 2;              // accumulator registers of 64 x ROWS a thread
constexpr int kColumns = ROWS / 4;             // columns a thread holds scores of
constexpr float kRise = 8.0f;                  // RISE, in powers of two

constexpr int kOutPitch = kValueDim * 2 + 16;   // bytes of a row on its way out; no two share banks

constexpr int kQueryOffset = 0;
constexpr int kValueOffset = kQueryOffset + kChunks * kQueryChunkBytes;
constexpr int kRopeOffset = kValueOffset + kStages * kValueChunks * kChunkBytes;
constexpr int kWeightOffset = kRopeOffset + kRopeStages * kChunkBytes;
constexpr int kDecayOffset = kWeightOffset + kGroups * 1024;
constexpr int kPeakOffset = kDecayOffset + ROWS * 4;
constexpr int kFlagOffset = kPeakOffset + ROWS * 4;
constexpr int kBarrierOffset = (kFlagOffset + 4 + 7) / 8 * 8;
constexpr int kNumBarriers = 23;
constexpr int kWorkOffset = kBarrierOffset + kNumBarriers * 8;
constexpr int kWorkBytes = 80;  // of a Work
constexpr int kSharedBytes = kWorkOffset + kWorkBytes;
static_assert(ROWS % 8 == 0 && ROWS >= 8 && ROWS <= 72, "rows of a block: 8..72 in steps of 8");
static_assert(ROWS * kOutPitch <= kValueOffset, "rows on their way out, in place of the queries");
static_assert(kSharedBytes <= 232448, "shared memory of a block on sm_90");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

// True in every thread of the warpgroup iff `mine` is in one of them; also a barrier among them.
__device__ __forceinline__ bool any_in_warpgroup(bool mine) {
  int result;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred any, 1, 128, mine;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}"
      : "=r"(result)
      : "r"(static_cast<int>(mine))
      : "memory");
  return result != 0;
}

__device__ __forceinline__ void warpgroup_barrier() {
  asm volatile("barrier.cta.sync 1, 128;" ::: "memory");
}

// ---- matrix instructions, 64 x ROWS x 16 ---------------------------------------------------------

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
#define SHAPE "wgmma.mma_async.sync.aligned.m64n" TEXT(ROWS) "k16.f32.bf16.bf16 {"
#define SCORES_CALL(a, b, keep)                                                                  \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n" SHAPE JOIN(L, ROWS) "}, " a ", " b      \
  ", keep, 1, 1, 0, 0;\n}"
#define VALUES_CALL(a, b, keep)                                                                  \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n" SHAPE JOIN(L, ROWS) "}, " a ", " b      \
  ", keep, 1, 1, 1, 1;\n}"

// d = a b + (keep ? d : 0), both operands K-major.
__device__ __forceinline__ void multiply_scores(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(SCORES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

// The same, a M-major and b N-major.
__device__ __forceinline__ void multiply_values(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(VALUES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

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

  __device__ __forceinline__ u32 pair_full(u32 stage, u32 pair) const {
    return base + 8 * (kPairs * stage + pair);
  }
  __device__ __forceinline__ u32 pair_empty(u32 stage, u32 pair) const {
    return base + 8 * (kPairs * (kStages + stage) + pair);
  }
  __device__ __forceinline__ u32 rope_full(u32 stage) const { return base + 128 + 8 * stage; }
  __device__ __forceinline__ u32 rope_empty(u32 stage) const { return base + 144 + 8 * stage; }
  __device__ __forceinline__ u32 weights_full() const { return base + 160; }
  __device__ __forceinline__ u32 weights_empty() const { return base + 168; }
  __device__ __forceinline__ u32 query_empty() const { return base + 176; }

  // Arrivals at barrier number `i`, in the order above: 128 threads bring something, a lane of each warp
  // gives it back, all threads of both halves leave the queries' place.
  __device__ __forceinline__ static u32 arrivals(int i) {
    if (i == 22) return 256;
    return i < 8 || i == 16 || i == 17 || i == 20 ? 128 : i == 18 || i == 19 ? 4 : 8;
  }
};

__device__ __forceinline__ void load(const Params& p, unsigned char* smem, u32 shared,
                                     const Barriers& barriers) {
  Piece piece = first_piece(smem);
  const auto next = [&](u32 tiles) { return next_piece(p, smem, tiles, piece); };
  load_tiles(p, piece, next, [&](const TileRows& rows, u32 count, u32 inside) {
    const u32 stage = count % kStages, parity = ((count / kStages) & 1) ^ 1;
    const u32 values = shared + kValueOffset + stage * kValueChunks * kChunkBytes + inside;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      barrier_wait(barriers.pair_empty(stage, pair), parity);
#pragma unroll
      for (int chunk = pair; chunk < kValueChunks; chunk += kPairs)
        rows.copy(values + chunk * kChunkBytes, chunk * 64);
      barrier_arrive_after_copies(barriers.pair_full(stage, pair));
    }
    const u32 rope_stage = count % kRopeStages;
    barrier_wait(barriers.rope_empty(rope_stage), ((count / kRopeStages) & 1) ^ 1);
    rows.copy(shared + kRopeOffset + rope_stage * kChunkBytes + inside, kValueDim);
    barrier_arrive_after_copies(barriers.rope_full(rope_stage));
  });
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

__device__ __forceinline__ void store_weights(u32 to_weights, const float (&weights)[kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 to = to_weights + (2 * warp + ((lane >> 3) & 1)) * 128 + (lane & 7) * 16;
#pragma unroll
  for (int group = 0; group + 1 < kGroups; group += 2) {
    const float* w = weights + 4 * group;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to + (group + (lane >> 4)) * 1024),
                 "r"(pack_bf16(w[0], w[1])), "r"(pack_bf16(w[2], w[3])),
                 "r"(pack_bf16(w[4], w[5])), "r"(pack_bf16(w[6], w[7]))
                 : "memory");
  }
  if (kGroups % 2) {
    const float* w = weights + 4 * (kGroups - 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                     to + (kGroups - 1) * 1024),
                 "r"(pack_bf16(w[0], w[1])), "r"(pack_bf16(w[2], w[3]))
                 : "memory");
  }
}

// Running softmax. The peaks of the rows lie in shared memory, where all warps find the same; a
// thread keeps the totals of its own keys, for the rows (columns of S^T) it holds scores of.
struct Softmax {
  float* peaks;   // [ROWS]
  float* decays;  // [ROWS] what O^T and the totals are multiplied by where the peaks have risen
  float total[kColumns];

  __device__ __forceinline__ void reset() {
    const int thread = threadIdx.x & 127;
    if (thread < ROWS) peaks[thread] = -kInfinity;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] = 0.0f;
  }

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

  __device__ __forceinline__ void add(const float (&weights)[kScores]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = 4 * (c / 2) + c % 2;
      total[c] += weights[i] + weights[i + 2];
    }
  }

  // Agree on new peaks with the other warps through `exchange` [ROWS, 4].
  __device__ __forceinline__ void raise(const float (&scores)[kScores], float scale,
                                        float* exchange) {
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
      const float raised =
          fmaxf(fmaxf(fmaxf(others.x, others.y), fmaxf(others.z, others.w)), old);
      decays[thread] = raised == -kInfinity ? 1.0f : exp2_fast(old - raised);
      peaks[thread] = raised;
    }
    warpgroup_barrier();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] *= decays[8 * (c / 2) + 2 * (lane & 3) + c % 2];
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

// Queue the product of a tile and the queries, pair by pair as they arrive.
__device__ __forceinline__ void start_scores(u32 shared, const Barriers& barriers, u32 tile_count,
                                             float (&scores)[kScores]) {
  const u32 stage = tile_count % kStages, rope_stage = tile_count % kRopeStages;
  shared = opaque(shared);
  u64 queries = descriptor(shared + kQueryOffset, 16, 1024, 1);
  u64 keys = descriptor(shared + kValueOffset + stage * kValueChunks * kChunkBytes, 16, 1024, 1);
  const u64 rope_keys = descriptor(shared + kRopeOffset + rope_stage * kChunkBytes, 16, 1024, 1);
  const u64 rope_queries = queries + kValueChunks * (kQueryChunkBytes >> 4);
#pragma unroll 1
  for (int pair = 0; pair < kPairs; ++pair) {
    barrier_wait(barriers.pair_full(stage, pair), (tile_count / kStages) & 1);
    fence_async_proxy();
    matrix_begin();
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; chunk += kPairs)
#pragma unroll
      for (int part = 0; part < 4; ++part)
        multiply_scores(scores, keys + chunk * (kChunkBytes >> 4) + part * 2,
                        queries + chunk * (kQueryChunkBytes >> 4) + part * 2,
                        pair + chunk + part > 0);
    keys += kChunkBytes >> 4;
    queries += kQueryChunkBytes >> 4;
  }
  barrier_wait(barriers.rope_full(rope_stage), (tile_count / kRopeStages) & 1);
  fence_async_proxy();
  matrix_begin();
#pragma unroll
  for (int part = 0; part < 4; ++part)
    multiply_scores(scores, rope_keys + part * 2, rope_queries + part * 2, 1);
  matrix_commit();
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
    softmax.raise(scores, p.scale, reinterpret_cast<float*>(smem + kWeightOffset));
  }
  softmax.weigh(scores, p.scale);
  barrier_wait(barriers.weights_empty(), parity);
  store_weights(shared + kWeightOffset, scores);
  if ((threadIdx.x & 127) == 0)
    *reinterpret_cast<int*>(smem + kFlagOffset) = is_raised && tile > piece.first;
  fence_async_proxy();
  barrier_arrive(barriers.weights_full());
  softmax.add(scores);
}

// The queries of the first piece, by all warps that do not copy tiles.
__device__ __forceinline__ void first_queries(const Params& p, const Piece& piece, u32 shared) {
  load_queries<kChunks, kQueryChunkBytes, 48>(p, piece, shared + kQueryOffset,
                                              (static_cast<int>(threadIdx.x) - 128) >> 3, ROWS);
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
      matrix_wait<0>();
      __syncwarp();
      if ((threadIdx.x & 31) == 0) barrier_arrive(barriers.rope_empty(tile_count % kRopeStages));
      weigh_tile(p, smem, shared, barriers, piece, tile, weight_count, softmax, scores);
    }
    finish(p, piece, softmax, reinterpret_cast<float*>(smem + kQueryOffset), destinations(smem),
           barriers.weights_empty(), (weight_count & 1) ^ 1);
    barrier_arrive(barriers.weights_full());
    ++weight_count;
    if (!next_piece(p, smem, tile_count, piece)) return;
    barrier_wait(barriers.query_empty(), piece_count & 1);
    ++piece_count;
    load_queries<kChunks, kQueryChunkBytes, 16>(p, piece, shared + kQueryOffset,
                                                (threadIdx.x & 127) >> 3, ROWS);
    warpgroup_barrier();
  }
}

// Round the values to bfloat16, turn them to [row, dim] in place of the queries and write the rows
// out. Element (block, 4 g + 2 h + e): value dim 256 half + 64 block + 16 warp + lane / 4 + 8 h,
// row 8 g + 2 (lane % 4) + e.
__device__ __forceinline__ void store_values(unsigned char* smem, u32 shared, int half,
                                             const float (&values)[4][kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  // Lane l names row l % 8 of matrix l / 8: matrices (group, h = 0), (group, 1), (group + 1, 0), ..
  const int dim = 256 * half + 16 * warp + 8 * ((lane >> 3) & 1);
  const u32 to = shared + kQueryOffset + (lane & 7) * kOutPitch + dim * 2;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int group = 0; group + 1 < kGroups; group += 2) {
      const float* v = values[block] + 4 * group;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::
                       "r"(to + (group + (lane >> 4)) * 8 * kOutPitch + block * 128),
                   "r"(pack_bf16(v[0], v[1])), "r"(pack_bf16(v[2], v[3])),
                   "r"(pack_bf16(v[4], v[5])), "r"(pack_bf16(v[6], v[7]))
                   : "memory");
    }
    if (kGroups % 2) {
      const float* v = values[block] + 4 * (kGroups - 1);
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                       to + (kGroups - 1) * 8 * kOutPitch + block * 128),
                   "r"(pack_bf16(v[0], v[1])), "r"(pack_bf16(v[2], v[3]))
                   : "memory");
    }
  }
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + half) : "memory");
  const unsigned char* from = smem + kQueryOffset + 512 * half + lane * 16;
#pragma unroll 6
  for (int row = warp; row < ROWS; row += 4) {
    bf16_bits* destination = destinations(smem)[row];
    const uint4 eight = *reinterpret_cast<const uint4*>(from + row * kOutPitch);
    if (destination) *reinterpret_cast<uint4*>(destination + 256 * half + lane * 8) = eight;
  }
}

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
    for (int two = 0; two < 2; ++two) {
      const float* v = values[2 * two] + 4 * group;
      const float* w = values[2 * two + 1] + 4 * group;
      to[4 * group * kPairVectors + 64 * two] =
          make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(w[0], w[1]),
                     pack_bf16(w[2], w[3]));
    }
}

// Named barrier 5; in place of the values.
using Merging = Merge<256, 5, kRopeOffset - kValueOffset>;

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
      const u32 stage = tile_count % kStages;
      const u64 keys = descriptor(
          shared + kValueOffset + (stage * kValueChunks + 4 * half) * kChunkBytes, 16, 1024, 1);
      barrier_wait(barriers.weights_full(), weight_count & 1);
      fence_async_proxy();
      if (*is_raised) scale_values(decay, values);
      matrix_begin();
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int part = 0; part < 4; ++part)
          multiply_values(values[block], keys + (block * kChunkBytes + part * 2048 >> 4),
                          weights + (part * 256 >> 4), part > 0 || tile > piece.first);
        matrix_commit();
      }
      matrix_wait<3>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 0));
      matrix_wait<2>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 1));
      matrix_wait<1>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 2));
      matrix_wait<0>();
      if (lane == 0) {
        barrier_arrive(barriers.pair_empty(stage, 3));
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
      store_values(smem, shared, half, values);
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
    tree_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const Barriers barriers{shared + kBarrierOffset};
  if (threadIdx.x >= 512 - 32) {
    const int lane = threadIdx.x & 31;
    if (shared & 1023) __trap();  // the swizzle counts from addresses that are multiples of 1024
    if (lane < kNumBarriers) barrier_init(barriers.base + 8 * lane, Barriers::arrivals(lane));
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
