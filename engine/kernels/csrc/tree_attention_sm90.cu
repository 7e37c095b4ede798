// Tree attention over paged latent rows, for sm_90a: S^T = K Q^T, O^T = V^T P^T.
//
// Tree tokens and heads are packed into rows, and the rows stand in the N of the matrix
// instructions, which comes in steps of 8: 72 rows cost 72, where a kernel with the rows in M pays
// for 128. A tile is 64 consecutive cached rows, keys in the M of the first product and the K of
// the second; it lies in shared memory once, read as K-major keys and as M-major values.
//
// Grid: one block an SM, each with its share of the line (tree_attention_line.cuh). Where MERGE_INSIDE the
// launch is cooperative, since all blocks merge together what they have written
// (tree_attention_merge_few.cuh).
//
// Warpgroups (128 threads each):
//   0 loads     the block's share, for all; tiles, 16 bytes a thread and copy (cp.async), zeros for rows that
//               are not live; any page size, page ids asked one tile ahead
//   1 scores    the queries; 64 x ROWS scores of a tile, softmax, weights to shared memory
//   2, 3 values 256 value dims each, O^T in registers; the merge
// Most instructions are executed once a launch and have to be fetched first, the same by all SMs at the
// same time, which takes several times as long as to execute them. What lies ahead in a straight line comes
// while a warp waits; what it jumps to far away it waits for, 1 to 2 us. So loops stay loops, the machine
// code of the first copies lies at the begin of the kernel, and where there is one sequence (ONE) nothing is
// compiled for shares of several pieces, which takes half of the code and stood between all else.
//
// Shared memory: queries ROWS x 576 | values 2 x 64 x 512 | rope ROPE_STAGES x 64 x 64 |
// weights 64 x ROWS | decays, peaks | barriers | the share; queries, values and rope in chunks of 64 dims whose
// rows of 128 bytes are swizzled by 128, weights in 8 x 8 matrices. While an item that a block held
// whole ends, its rows lie in place of the queries on their way out; what is merged lies in place of the
// values; masks lie in place of decays and peaks while no row has a peak.
// Barriers, each with a full and an empty side: a pair of value chunks of a stage (chunk j of either
// half of the value dims), the rope chunk of a rope stage, the weights; of the queries an empty side alone.
// A tile is loaded and given back pair by pair, so that the next but one is on its way while half of it is in
// use; its rope is read first, since there is one place for it.
//
// While no score is farther than FAR from 0, weights are 2^score, and parts are added as they are: bfloat16
// and float32 have exponents enough. From the first other tile of a piece on a row's shift is its running
// maximum, raised only when a score exceeds it by RISE (weights stay below 2^RISE).
//
// Source of the ideas: DeepSeek FlashMLA docs/20250422-new-kernel-deep-dive.md (value from the key
// tile, split output), flashinfer include/flashinfer/attention/mla_hopper.cuh (page ids one tile
// ahead), FlashAttention-4 (rescaling only beyond a threshold), ThunderMLA (no host schedule).
//
// Compile-time: ROWS (8..72, a multiple of 8), PAGE_SIZE, HYBRID (tree rows beside the pages),
// MERGE_INSIDE (else a launch of its own merges: with many items a block's share of the merge is long),
// ONE (one sequence, merged inside),
// SHARED_BYTES (what the launch asks for, to be compared).

#ifndef ROWS
#define ROWS 72
#endif
#ifndef ONE
#define ONE 0
#endif
#define BLOCK_ROWS ROWS

#include "tree_attention_copies.cuh"
#include "tree_attention_softmax.cuh"
#include "tree_attention_work.cuh"
#if MERGE_INSIDE
#include "tree_attention_merge_few.cuh"
#else
#include "tree_attention_merge.cuh"
#endif

constexpr int kStages = 2;
constexpr int kPairs = kValueChunks / 2;       // chunk j of the first and of the second half
constexpr int kRopeStages = ROWS > 64 ? 1 : 2;  // 72 rows leave room for one
constexpr float kFar = 60.0f;                  // FAR, in powers of two

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
constexpr int kSharedBytes = kWorkOffset + kWorkBytes;
static_assert(ROWS * kOutPitch <= kValueOffset, "rows on their way out, in place of the queries");
static_assert(kSharedBytes <= 232448, "shared memory of a block on sm_90");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

// ---- matrix instructions, 64 x ROWS x 16 ---------------------------------------------------------

#define SCORES_CALL(a, b, keep) CALL("bf16", a, b, keep, ", 0, 0")
#define VALUES_CALL(a, b, keep) CALL("bf16", a, b, keep, ", 1, 1")

// d = a b + (keep ? d : 0), both operands K-major.
__device__ __forceinline__ void multiply_scores(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(SCORES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

// The same, a M-major and b N-major.
__device__ __forceinline__ void multiply_values(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(VALUES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

// A descriptor of an address that is the same in all lanes, in a form the compiler knows to be that.
__device__ __forceinline__ u64 uniform_descriptor(u32 address, u32 leading, u32 stride, u64 mode) {
  const u64 both = descriptor(address, leading, stride, mode);
  const u32 low = static_cast<u32>(uniform(static_cast<int>(static_cast<u32>(both))));
  return both >> 32 << 32 | low;
}

// ---- roles ---------------------------------------------------------------------------------------

struct Work {
  Piece piece;
  int has_piece, has_more;
  Run run;
  Parts parts[kMostSequences];
};
static_assert(sizeof(Work) <= kWorkBytes, "in shared memory");

__device__ __forceinline__ Work& work_of(unsigned char* smem) {
  return *reinterpret_cast<Work*>(smem + kWorkOffset);
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

// The row of a tile that a thread of the first warpgroup finds: lane l of either half of a warp row
// 4 warp + l % 4 + 16 (l / 4 % 4).
__device__ __forceinline__ int found_key() {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  return 4 * (thread >> 5) + (lane & 3) + 16 * ((lane >> 2) & 3);
}

// Copy rows `first`, `first` + 16, .. of a piece's queries, eight lanes a row.
__device__ __forceinline__ void start_queries(const Params& p, const Piece& piece, u32 queries) {
  const int unit = threadIdx.x & 7;
  const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + unit * 8;
#pragma unroll 1
  for (int row = (threadIdx.x & 127) >> 3; row < ROWS; row += 16) {
    const int token = quotient(piece.row + row, p.H), head = piece.row + row - token * p.H;
    const bool live = token < piece.sequence.tree_size;
    const bf16_bits* from = live ? base + token * p.q_token + head * p.q_head : p.q;
    const u32 to = queries + row * 128 + ((unit ^ (row & 7)) << 4);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      copy_16(to + chunk * kQueryChunkBytes, from + chunk * 64, live ? 16u : 0u);
  }
}

constexpr int kLeaving = ONE ? 512 : 384;  // threads that meet before the merge

// The tiles' places are nobody's any more: said by those that copy, heard before the merge.
__device__ __forceinline__ void all_copied() {
#if MERGE_INSIDE
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("barrier.cta.arrive 4, %0;" ::"n"(kLeaving) : "memory");
#endif
}

// Said by the score warps with ONE: peaks and totals are written, before the merge.
__device__ __forceinline__ void part_written() {
#if ONE
  asm volatile("barrier.cta.arrive 4, %0;" ::"n"(kLeaving) : "memory");
#endif
}

__device__ __forceinline__ void begin_work() {
  asm volatile("barrier.cta.sync 7, 384;" ::: "memory");
}

// The share is found and the barriers are there: the score warps hear of it at hardware barrier 9, those of
// values at 7, so that neither waits for the other.
__device__ __forceinline__ void let_scores_begin() {
  asm volatile("barrier.cta.arrive 9, 256;" ::: "memory");
}

__device__ __forceinline__ void let_values_begin() {
  asm volatile("barrier.cta.arrive 7, 384;" ::: "memory");
}

// Find the share, for all; load all tiles. A warp copies rows 4 warp + i + 16 part, i and part below 4, eight
// lanes a row; the lanes that have found them tell where they are.
__device__ __forceinline__ void load(const Params& p, unsigned char* smem, u32 shared,
                                     const Barriers& barriers) {
  const int thread = threadIdx.x & 127, lane = thread & 31, unit = thread & 7, key = thread >> 3;
  Piece piece;
  bool has_piece;
#if ONE
  const bool has_more = false;
  int share;
  find_only_run(p, piece, has_piece, share);
#else
  const bool has_more =
      !find_own_run(p, piece, has_piece, MERGE_INSIDE ? work_of(smem).parts : nullptr);
#endif
  if (has_more) {
    Run run(p);
    has_piece = run.next(p, piece);
    if (thread == 0) work_of(smem).run = run;
  }
  int page = 0;
  if (has_piece) page = Row(piece.sequence, piece.first, found_key()).page(p, piece.sequence);
  if (thread == 0) {
    work_of(smem).piece = piece;
    work_of(smem).has_piece = has_piece;
    work_of(smem).has_more = has_more;
  }
  asm volatile("barrier.cta.sync 6, 160;" ::: "memory");  // the barriers are there
  let_scores_begin();
#if ONE
  if (thread == 0) work_of(smem).parts[0] = only_parts(piece, share);
#endif
  let_values_begin();
  if (!has_piece) return all_copied();
  const u32 inside = key * 128 + ((unit ^ (key & 7)) << 4);
  u32 count = 0;
  while (true) {
    prefetch_pages(p, piece);
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++count) {
      const u64 own = reinterpret_cast<u64>(
          Row(piece.sequence, tile, found_key()).address(p, piece.sequence, page));
      if (tile + 1 < piece.last)
        page = Row(piece.sequence, tile + 1, found_key()).page(p, piece.sequence);
      TileRows rows;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const u64 row = __shfl_sync(~0u, own, (lane >> 3) + 4 * part);
        rows.live_bytes[part] = row ? 16 : 0;
        rows.from[part] = row ? reinterpret_cast<const bf16_bits*>(row) + unit * 8 : p.q;
      }
      const u32 stage = count % kStages, parity = ((count / kStages) & 1) ^ 1;
      u32 values = shared + kValueOffset + stage * kValueChunks * kChunkBytes + inside;
#pragma unroll 1
      for (int pair = 0; pair < kPairs; ++pair) {
        barrier_wait(barriers.pair_empty(stage, pair), parity);
#pragma unroll
        for (int chunk = 0; chunk < kValueChunks; chunk += kPairs)
          rows.copy(values + chunk * kChunkBytes, chunk * 64);
        barrier_arrive_after_copies(barriers.pair_full(stage, pair));
        if (pair == 0) {
          const u32 rope_stage = count % kRopeStages;
          barrier_wait(barriers.rope_empty(rope_stage), ((count / kRopeStages) & 1) ^ 1);
          rows.copy(shared + kRopeOffset + rope_stage * kChunkBytes + inside, kValueDim);
          barrier_arrive_after_copies(barriers.rope_full(rope_stage));
        }
        values += kChunkBytes;
#pragma unroll
        for (int part = 0; part < 4; ++part)
          rows.from[part] += 64;
      }
    }
    if (!next_piece(p, work_of(smem), count, piece)) return all_copied();
    page = Row(piece.sequence, piece.first, found_key()).page(p, piece.sequence);
  }
}

// What a row may not see of a tile. Thread i asks for the mask of row i before the tile is waited for, and
// nothing is made of it before `put`, so that nothing waits for it.
struct Cut {
  bool is_there;
  u32 low, high;  // mask of the row, 32 keys a word
  int left;       // keys of the tile that any row sees

  __device__ __forceinline__ Cut() {}
  __device__ __forceinline__ Cut(const Params& p, const Piece& piece, int tile) : low(~0u), high(~0u) {
    const int thread = threadIdx.x & 127;
    const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys;
    const bool is_tree = tile >= context_tiles;
    const int first = (is_tree ? tile - context_tiles : tile) * kKeys;
    left = (is_tree ? piece.sequence.tree_size : piece.sequence.context_len) - first;
    is_there = is_tree || left < kKeys;
    if (!is_tree || thread >= ROWS) return;
    const int token = quotient(piece.row + thread, p.H);
    if (token >= piece.sequence.tree_size) return;
    const int* words = p.ancestor_bits + piece.sequence.index * p.bits_sequence +
                       token * p.bits_token + first / 32;
    low = words[0];
    if (left > 32) high = words[1];
  }

  // Write what each row sees to `masks` [2, ROWS].
  __device__ __forceinline__ void put(u32* masks) const {
    const int thread = threadIdx.x & 127;
    if (thread >= ROWS) return;
    const u64 live = left >= kKeys ? ~0ull : (1ull << left) - 1;
    masks[thread] = low & static_cast<u32>(live);
    masks[ROWS + thread] = high & static_cast<u32>(live >> 32);
  }
};

// Set to -inf what `masks` [2, ROWS] do not have. Element 4 g + 2 h + e: key 16 warp + lane / 4 + 8 h, row
// 8 g + 2 (lane % 4) + e of the block.
__device__ __forceinline__ void hide(const u32* masks, float (&scores)[kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  const u32* own = masks + (warp >> 1) * ROWS + 2 * (lane & 3);
  const u32 first = 1u << (16 * (warp & 1) + (lane >> 2)), second = first << 8;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const uint2 words = *reinterpret_cast<const uint2*>(own + 8 * group);
    float* s = scores + 4 * group;
    if (!(words.x & first)) s[0] = -kInfinity;
    if (!(words.y & first)) s[1] = -kInfinity;
    if (!(words.x & second)) s[2] = -kInfinity;
    if (!(words.y & second)) s[3] = -kInfinity;
  }
}

// As long as no score of the block's rows is farther than FAR from 0, weights are 2^score: they neither
// grow nor vanish, and no row needs a peak. From the first other tile on rows have peaks. A thread keeps the
// totals of its own keys.
struct Softmax : Peaks {
  bool is_plain;  // no peaks so far
  float total[kColumns];

  __device__ __forceinline__ void reset() {
    is_plain = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] = 0.0f;
  }

  // Is a score, hidden ones too, farther than FAR from 0?
  __device__ __forceinline__ static bool is_far(const float (&scores)[kScores], float scale) {
    float farthest[4];
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      farthest[i % 4] = i < 4 ? fabsf(scores[i]) : fmaxf(farthest[i % 4], fabsf(scores[i]));
    return fmaxf(fmaxf(farthest[0], farthest[1]), fmaxf(farthest[2], farthest[3])) * scale > kFar;
  }

  // Peaks from here on: 0 of rows that have seen something.
  __device__ __forceinline__ void begin_peaks() {
    const int thread = threadIdx.x & 127, lane = thread & 31;
    is_plain = false;
    if (thread < ROWS) peaks[thread] = -kInfinity;
    warpgroup_barrier();
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (total[c] != 0.0f) peaks[8 * (c / 2) + 2 * (lane & 3) + c % 2] = 0.0f;
    warpgroup_barrier();
  }

  __device__ __forceinline__ static void weigh_plainly(float (&scores)[kScores], float scale) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = exp2_fast(scores[i] * scale);
  }
};

// Where the rows of a block go, null where there is none; scratch in place of the weights.
__device__ __forceinline__ bf16_bits** destinations(unsigned char* smem) {
  return reinterpret_cast<bf16_bits**>(smem + kWeightOffset);
}

// Totals of all threads through `exchange` [32, ROWS]. Of a part, each row's peak and total; of an item
// that is whole the log-sum-exp of each row, what O^T is divided by (as a decay) and where it goes; the
// last two once `free` says that their places are. With ONE there are parts only.
__device__ __forceinline__ void finish(const Params& p, const Piece& piece, const Softmax& softmax,
                                       float* exchange, bf16_bits** to, u32 free, u32 parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int group = 0; group < kGroups; ++group)
    *reinterpret_cast<float2*>(exchange + (8 * warp + (lane >> 2)) * ROWS + 8 * group +
                               2 * (lane & 3)) =
        make_float2(softmax.total[2 * group], softmax.total[2 * group + 1]);
  warpgroup_barrier();
  if (thread >= ROWS) return;
  float total = 0.0f;
#pragma unroll 8
  for (int i = 0; i < 32; ++i) total += exchange[i * ROWS + thread];
  const float peak = softmax.is_plain ? 0.0f : softmax.peaks[thread];
  if (ONE || (MERGE_INSIDE && !piece.is_whole)) {
    reinterpret_cast<float2*>(p.partial_lse)[static_cast<i64>(piece.slot) * ROWS + thread] =
        make_float2(peak, total);
    if (!ONE) barrier_wait(free, parity);  // no phase of the weights' barrier may pass unseen
    return;
  }
  const int packed = piece.row + thread, token = packed / p.H, head = packed - token * p.H;
  const bool seen = total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
  const float lse = seen ? (peak + log2_fast(total)) * kLn2 : -kInfinity;
  const Place place(p, piece, packed, token, head);
  if (place.lse) *place.lse = lse;
  barrier_wait(free, parity);
  softmax.decays[thread] = seen ? inverse(total) : 0.0f;
  to[thread] = place.out;
}

// Queue the product of a tile and the queries: rope, whose place is given back as soon as it is read, then
// the values' chunks pair by pair as they arrive.
__device__ __forceinline__ void start_scores(u32 shared, const Barriers& barriers, u32 tile_count,
                                             float (&scores)[kScores]) {
  const u32 stage = tile_count % kStages, rope_stage = tile_count % kRopeStages;
  const u64 keys =
      uniform_descriptor(shared + kValueOffset + stage * kValueChunks * kChunkBytes, 16, 1024, 1);
  const u64 queries = uniform_descriptor(shared + kQueryOffset, 16, 1024, 1);
  const u64 rope = kRopeStages == 1
                       ? uniform_descriptor(shared + kRopeOffset, 16, 1024, 1)
                       : uniform_descriptor(shared + kRopeOffset + rope_stage * kChunkBytes, 16, 1024, 1);
  barrier_wait(barriers.rope_full(rope_stage), (tile_count / kRopeStages) & 1);
  fence_async_proxy();
  matrix_begin();
#pragma unroll
  for (int part = 0; part < 4; ++part)
    multiply_scores(scores, rope + part * 2,
                    queries + kValueChunks * (kQueryChunkBytes >> 4) + part * 2, part > 0);
  matrix_commit();
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    barrier_wait(barriers.pair_full(stage, pair), (tile_count / kStages) & 1);
    fence_async_proxy();
    matrix_begin();
#pragma unroll
    for (int chunk = pair; chunk < kValueChunks; chunk += kPairs)
#pragma unroll
      for (int part = 0; part < 4; ++part)
        multiply_scores(scores, keys + chunk * (kChunkBytes >> 4) + part * 2,
                        queries + chunk * (kQueryChunkBytes >> 4) + part * 2, 1);
    matrix_commit();
    if (pair == 0) {
      matrix_wait<1>();
      if ((threadIdx.x & 31) == 0) barrier_arrive(barriers.rope_empty(rope_stage));
    }
  }
}

// Where masks lie while nothing has peaks: in place of decays and peaks.
__device__ __forceinline__ u32* early_masks(unsigned char* smem) {
  static_assert(kPeakOffset == kDecayOffset + ROWS * 4, "room for masks");
  return reinterpret_cast<u32*>(smem + kDecayOffset);
}

// A tile of which a row may not see all, or whose scores are far from 0, or that follows such one; scratch
// lies in place of the weights. True where its weights are found, false where all is plain.
__device__ __forceinline__ bool weigh_with_care(const Params& p, unsigned char* smem,
                                                const Cut& cut, Softmax& softmax,
                                                float (&scores)[kScores], bool& is_raised) {
  if (softmax.is_plain && any_in_warpgroup(Softmax::is_far(scores, p.scale))) softmax.begin_peaks();
  if (cut.is_there) {
    u32* masks = early_masks(smem);
    if (!softmax.is_plain) {
      masks = reinterpret_cast<u32*>(smem + kWeightOffset);
      cut.put(masks);
      warpgroup_barrier();
    }
    hide(masks, scores);
    warpgroup_barrier();
  }
  if (softmax.is_plain) return false;
  is_raised = any_in_warpgroup(softmax.rises(scores, p.scale));
  if (is_raised) softmax.raise(scores, p.scale, reinterpret_cast<float*>(smem + kWeightOffset), softmax.total);
  softmax.weigh(scores, p.scale);
  return true;
}

// The weights of a tile are there, and whether they are beside peaks that have risen.
__device__ __forceinline__ void weights_found(unsigned char* smem, u32 shared, const Barriers& barriers,
                                              const float (&weights)[kScores], bool is_raised) {
  store_weights<pack_bf16>(shared + kWeightOffset, weights);
  if ((threadIdx.x & 127) == 0) *reinterpret_cast<int*>(smem + kFlagOffset) = is_raised;
  fence_async_proxy();
  barrier_arrive(barriers.weights_full());
}

__device__ __forceinline__ void score(const Params& p, unsigned char* smem, u32 shared,
                                      const Barriers& barriers) {
  u32 tile_count = 0, piece_count = 0, weight_count = 0;
  Softmax softmax;
  softmax.peaks = reinterpret_cast<float*>(smem + kPeakOffset);
  softmax.decays = reinterpret_cast<float*>(smem + kDecayOffset);
  float scores[kScores];
  asm volatile("barrier.cta.sync 9, 256;" ::: "memory");
  if (!work_of(smem).has_piece) return part_written();
  Piece piece = first_piece(work_of(smem));
  while (true) {
    start_queries(p, piece, shared + kQueryOffset);
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async_proxy();
    warpgroup_barrier();
    softmax.reset();
    int tile = piece.first;
    // Left by a jump: with a condition in its place 40 bytes of registers are spilled.
#pragma unroll 1
    while (true) {
      Cut cut;
      // What is laid in a line: tiles whose weights are plain. What needs care lies behind.
#pragma unroll 1
      while (true) {
        cut = Cut(p, piece, tile);
        start_scores(shared, barriers, tile_count, scores);
        if (uniform(cut.is_there & softmax.is_plain)) cut.put(early_masks(smem));
        matrix_wait<0>();
        const bool needs_care = any_in_warpgroup(!softmax.is_plain | cut.is_there |
                                                 Softmax::is_far(scores, p.scale));
        barrier_wait(barriers.weights_empty(), (weight_count & 1) ^ 1);
        if (uniform(needs_care)) break;
        Softmax::weigh_plainly(scores, p.scale);
        weights_found(smem, shared, barriers, scores, false);
        add_weights(scores, softmax.total);
        ++tile_count;
        ++weight_count;
        if (++tile == piece.last) goto end;
      }
      bool is_raised = false;
      if (!weigh_with_care(p, smem, cut, softmax, scores, is_raised))
        Softmax::weigh_plainly(scores, p.scale);
      weights_found(smem, shared, barriers, scores, is_raised && tile > piece.first);
      add_weights(scores, softmax.total);
      ++tile_count;
      ++weight_count;
      if (++tile == piece.last) break;
    }
  end:
    finish(p, piece, softmax, reinterpret_cast<float*>(smem + kQueryOffset), destinations(smem),
           barriers.weights_empty(), (weight_count & 1) ^ 1);
    if (ONE) return part_written();
    barrier_arrive(barriers.weights_full());
    ++weight_count;
    if (!next_piece(p, work_of(smem), tile_count, piece)) return;
    barrier_wait(barriers.query_empty(), piece_count & 1);
    ++piece_count;
  }
}

#if MERGE_INSIDE

// Write the values of blocks 2 `two` and the next as they lie in registers, not divided by the totals, as
// the vectors of a partial result: of two rows (group, lane % 4) and 2 blocks the 32 of each half of the
// value dims.
__device__ __forceinline__ void store_part(const Params& p, int slot, int half, int two,
                                           const float (&values)[4][kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  uint4* to = reinterpret_cast<uint4*>(p.partial_out) + static_cast<i64>(slot) * kItemVectors +
              (lane & 3) * kPairVectors + 32 * half + 8 * warp + (lane >> 2);
#pragma unroll
  for (int group = 0; group < kGroups; ++group)
    to[4 * group * kPairVectors + 64 * two] =
        part_vector(values[2 * two] + 4 * group, values[2 * two + 1] + 4 * group);
}

// Named barrier 5; in place of the values.
using Merging = FewMerge<256, 5, kRopeOffset - kValueOffset>;

__device__ __forceinline__ Merging merging(const Params& p, unsigned char* smem) {
  Work& work = work_of(smem);
  return {p, !ONE && work.has_more ? &work.run.line : nullptr, work.parts,
          *reinterpret_cast<Merging::Scratch*>(smem + kValueOffset),
          static_cast<int>(threadIdx.x) - 256};
}

#endif

// Queue the values of a tile, added to those before it unless it is the first.
__device__ __forceinline__ void start_values(u32 shared, u32 stage, int half, bool is_first,
                                             float (&values)[4][kScores]) {
  const u64 keys = uniform_descriptor(
      shared + kValueOffset + (stage * kValueChunks + 4 * half) * kChunkBytes, 16, 1024, 1);
  const u64 weights = uniform_descriptor(shared + kWeightOffset, 128, 1024, 0);
  matrix_begin();
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
      multiply_values(values[block], keys + (block * kChunkBytes + part * 2048 >> 4),
                      weights + (part * 256 >> 4), part > 0 || !is_first);
    matrix_commit();
  }
}

#if ONE

// One piece, whose part is merged: what a block that has one tile runs through, up to the merge, is one line. The
// code that it steps over, for peaks that have risen, lies before a wait.
__device__ __forceinline__ void add_values(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, int half) {
  const int lane = threadIdx.x & 31;
  const float* decay = reinterpret_cast<const float*>(smem + kDecayOffset);
  const volatile int* is_raised = reinterpret_cast<const volatile int*>(smem + kFlagOffset);
  float values[4][kScores];
  begin_work();
  const Piece piece = first_piece(work_of(smem));
  if (uniform(work_of(smem).has_piece)) {
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile) {
      const u32 count = tile - piece.first, stage = count % kStages;
      if (count) {
        barrier_wait(barriers.weights_full(), count & 1);
        if (*is_raised) scale_values(decay, values);
      } else {
        barrier_wait(barriers.weights_full(), 0);
      }
      fence_async_proxy();
      start_values(shared, stage, half, count == 0, values);
      matrix_wait<3>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 0));
      matrix_wait<2>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 1));
      // The first half leaves while the second is added.
      if (tile + 1 == piece.last) store_part(p, piece.slot, half, 0, values);
      matrix_wait<1>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 2));
      matrix_wait<0>();
      if (lane == 0) {
        barrier_arrive(barriers.pair_empty(stage, 3));
        barrier_arrive(barriers.weights_empty());
      }
    }
    store_part(p, piece.slot, half, 1, values);
  }
  asm volatile("barrier.cta.sync 4, %0;" ::"n"(kLeaving) : "memory");
  merging(p, smem).run();
}

#else

__device__ __forceinline__ void add_values(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, int half) {
  const int lane = threadIdx.x & 31;
  const float* decay = reinterpret_cast<const float*>(smem + kDecayOffset);
  const volatile int* is_raised = reinterpret_cast<const volatile int*>(smem + kFlagOffset);
  u32 tile_count = 0, weight_count = 0;
  float values[4][kScores];
  begin_work();
  Piece piece = first_piece(work_of(smem));
  if (uniform(work_of(smem).has_piece)) do {
#if MERGE_INSIDE
    const int slot = piece.is_whole ? -1 : piece.slot;
#else
    constexpr int slot = -1;  // of a part that is merged inside
#endif
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count) {
      const u32 stage = tile_count % kStages;
      barrier_wait(barriers.weights_full(), weight_count & 1);
      fence_async_proxy();
      if (*is_raised) scale_values(decay, values);
      start_values(shared, stage, half, tile == piece.first, values);
      matrix_wait<3>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 0));
      matrix_wait<2>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 1));
#if MERGE_INSIDE
      // The first half leaves while the second is added.
      if (slot >= 0 && tile + 1 == piece.last) store_part(p, slot, half, 0, values);
#endif
      matrix_wait<1>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 2));
      matrix_wait<0>();
      if (lane == 0) {
        barrier_arrive(barriers.pair_empty(stage, 3));
        barrier_arrive(barriers.weights_empty());
      }
    }
#if MERGE_INSIDE
    if (slot >= 0) store_part(p, slot, half, 1, values);
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
  } while (next_piece(p, work_of(smem), tile_count, piece));
#if MERGE_INSIDE
  asm volatile("barrier.cta.sync 4, %0;" ::"n"(kLeaving) : "memory");
  merging(p, smem).run();
#endif
}

#endif

extern "C" __global__ void __launch_bounds__(512, 1)
    tree_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const Barriers barriers{shared + kBarrierOffset};
  grid_let_next_start();
  if (threadIdx.x >= 512 - 32) {
    if (shared & 1023) __trap();  // the swizzle counts from addresses that are multiples of 1024
    // One lane, in a straight line: of many, the hardware takes one after the other in a loop.
    if (threadIdx.x == 512 - 32) {
#pragma unroll
      for (int i = 0; i < kNumBarriers; ++i) barrier_init(barriers.base + 8 * i, Barriers::arrivals(i));
    }
    __syncwarp();
    barriers_are_ready();
    asm volatile("barrier.cta.arrive 6, 160;" ::: "memory");
  }
  const int role = threadIdx.x >> 7;
  // The compiler lays the last branch first, and that is where the first copies are.
  if (role >= 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    add_values(p, smem, shared, barriers, role - 2);
  } else if (role == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    score(p, smem, shared, barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    load(p, smem, shared, barriers);
  }
}
