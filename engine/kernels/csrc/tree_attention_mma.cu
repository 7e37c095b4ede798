// Tree attention over paged latent rows in 99 KB of shared memory, for any architecture from sm_90 on:
// S^T = K Q^T, O^T = V^T P^T through mma.sync.
//
// As in tree_attention_sm90.cu the packed rows (tokens x heads) stand in the N of the matrix
// instructions, which comes in steps of 8. Queries of 72 rows would fill shared memory by themselves,
// so a block has at most 40 rows and their queries in registers: a warp holds a quarter of the dims of
// all rows, which no two warps of the same keys share. 72 rows are two blocks, whose tiles are read
// from memory once and from L2 once more.
//
// Grid: one block an SM, each with its share of the line (tree_attention_line.cuh). A step is half a
// tile of the line, 32 cached rows, which lie in shared memory once, as keys and as values.
//
// Of a step, by 8 warps that all do the same, three barriers between:
//   copies  warp w: rows 4 w and on of the next step, a row by one copy that arrives on a barrier
//           (cp.async.bulk); zeros for rows that are not live, any page size, page ids asked 8 steps
//           ahead
//   scores  warp w: keys 16 (w / 4) and on, dims 144 (w % 4) and on; sums of a quarter of the dims to
//           shared memory
//   weights warp w: rows ROWS / 8 w and on, a lane a key: the four sums added, softmax, weights to
//           shared memory
//   values  warp w: dims 64 w and on, O^T in registers
//
// Shared memory: 2 steps of 32 x 576, sums 4 x ROWS x 32 and weights ROWS x 32, rows padded | decays |
// barriers. While an item ends, its rows lie in place of the steps on their way out, and what they are
// divided by and where they go in place of the sums.
//
// A row's shift is its running maximum, raised only when a score exceeds it by RISE.
//
// Source of the ideas: flashinfer csrc/xqa/mla_sm120.cu (queries in registers, tiles of 32 rows), DeepSeek
// FlashMLA docs/20250422-new-kernel-deep-dive.md (value from the key tile), FlashAttention-4 (rescaling
// only beyond a threshold).
//
// Compile-time: ROWS (8..40, a multiple of 8), PAGE_SIZE, HYBRID (tree rows beside the pages),
// SHARED_BYTES (what the launch asks for, to be compared).

#ifndef ROWS
#define ROWS 40
#endif
#define BLOCK_ROWS ROWS

#include "barriers.cuh"
#include "mma.cuh"
#include "tree_attention_line.cuh"
#include "tree_attention_merge.cuh"

constexpr int kWarps = 8;
constexpr int kStepKeys = kKeys / 2;
constexpr int kRowBytes = (kValueDim + kRopeDim) * 2;
constexpr int kRowPitch = kRowBytes + 16;  // eight rows lie in banks of their own
constexpr int kStageBytes = kStepKeys * kRowPitch;
constexpr int kStages = 2;
constexpr int kParts = 4;                            // that the dims of a score are cut in
constexpr int kProducts = kRowBytes / (32 * kParts);  // of 16 dims, of a part
constexpr int kGroups = ROWS / 8;                // groups of 8 rows; rows a warp weighs
constexpr int kBlocks = 4;                       // of 16 value dims, of a warp
constexpr int kSumPitch = kStepKeys + 4;         // floats of a row of sums; no two of a store share banks
constexpr int kWeightPitch = kStepKeys * 2 + 16;  // bytes of a row of weights; as of rows
constexpr int kOutPitch = 64 * 2 + 16;           // bytes of a row of 64 dims on its way out
constexpr float kRise = 8.0f;                    // RISE, in powers of two

constexpr int kSumOffset = kStages * kStageBytes;
constexpr int kWeightOffset = kSumOffset + kParts * ROWS * kSumPitch * 4;
constexpr int kDecayOffset = kWeightOffset + ROWS * kWeightPitch;
constexpr int kBarrierOffset = kDecayOffset + ROWS * 4;
constexpr int kSharedBytes = kBarrierOffset + kStages * 8;
constexpr int kDivisorOffset = kSumOffset;  // while an item ends, in place of the sums
constexpr int kPlaceOffset = kDivisorOffset + ROWS * 4;
static_assert(ROWS % 8 == 0 && ROWS >= 8 && ROWS <= 40, "rows of a block: 8..40 in steps of 8");
static_assert(kWarps * 64 == kValueDim, "64 value dims a warp");
static_assert(kWarps * ROWS * kOutPitch <= kSumOffset, "rows on their way out, in place of the steps");
static_assert(kSharedBytes <= 101376, "shared memory of a block on sm_120");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

// The step after `step` that has rows: the second half of a tile may have none.
__device__ __forceinline__ int step_after(const Sequence& sequence, int step) {
  const int context_tiles = (sequence.context_len + kKeys - 1) / kKeys, tile = step / 2;
  const int rows = tile < context_tiles ? sequence.context_len - tile * kKeys
                                        : sequence.tree_size - (tile - context_tiles) * kKeys;
  return step + (step % 2 == 0 && rows <= kStepKeys ? 2 : 1);
}

// Copies of the steps of a piece, a row each, four rows a warp. Lanes 4 k to 4 k + 3 copy step
// 8 block + k of the piece's sequence, and ask for the pages of eight steps at once, eight steps ahead.
struct Copies {
  const Params& p;
  const Piece& piece;
  unsigned char* smem;
  u32 shared;
  int page, next_page;  // of this lane's row in this block of steps and in the next

  __device__ __forceinline__ Row row(int step) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return Row(piece.sequence, step / 2, step % 2 * kStepKeys + 4 * warp + (lane & 3));
  }

  // The page of this lane's row of a block of steps, if there is one.
  __device__ __forceinline__ int page_in(int block) const {
    const int step = 8 * block + ((threadIdx.x & 31) >> 2);
    return step < 2 * piece.last ? row(step).page(p, piece.sequence) : 0;
  }

  __device__ __forceinline__ void begin(int step) {
    page = page_in(step / 8);
    next_page = page_in(step / 8 + 1);
  }

  // Copy a step that comes after `last` to a stage that nobody reads any more.
  __device__ __forceinline__ void start(int last, int step, u32 stage) {
    if (step / 8 != last / 8) {
      page = next_page;
      next_page = page_in(step / 8 + 1);
    }
    const int lane = threadIdx.x & 31, first = 4 * (step % 8);
    const u32 own = 4 * (threadIdx.x >> 5) + (lane & 3), barrier = shared + kBarrierOffset + 8 * stage;
    const bf16_bits* from = row(step).address(p, piece.sequence, page);
    const bool is_own = lane / 4 == step % 8;
    const u32 dead = __ballot_sync(~0u, is_own && !from) >> first;
    if (is_own && from)
      arrive_with_copy(barrier, shared + stage * kStageBytes + own * kRowPitch, from, kRowBytes);
    if (!dead) return;
    for (int i = lane; i < 4 * (kRowBytes / 16); i += 32) {
      const int k = i / (kRowBytes / 16), unit = i - k * (kRowBytes / 16);
      if (dead >> k & 1)
        reinterpret_cast<uint4*>(smem + stage * kStageBytes +
                                 (own - (lane & 3) + k) * kRowPitch)[unit] = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    __syncwarp();
    if (is_own && !from) barrier_arrive(barrier);
  }
};

// The queries of a warp's dims as the products take them, zeros for rows of no token.
struct Queries {
  u32 of[kProducts][kGroups][2];

  __device__ __forceinline__ void load(const Params& p, const Piece& piece) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) % kParts * (kProducts * 16);
    const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + first + 2 * (lane & 3);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int packed = piece.row + 8 * group + (lane >> 2), token = packed / p.H;
      const bool live = token < piece.sequence.tree_size;
      const bf16_bits* from = base + token * p.q_token + (packed - token * p.H) * p.q_head;
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          of[i][group][half] =
              live ? *reinterpret_cast<const u32*>(from + 16 * i + 8 * half) : 0;
    }
  }
};

// The sums of a warp's quarter of the dims, 16 keys and all rows.
__device__ __forceinline__ void add_scores(unsigned char* smem, u32 keys, const Queries& queries) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % kParts;
  const int first = warp / kParts * 16;
  keys += (first + (lane & 15)) * kRowPitch + part * kProducts * 32 + (lane >> 4) * 16;
  float sums[kGroups][4] = {};
  u32 a[2][4];
  load_matrices(a[0], keys);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    if (i + 1 < kProducts) load_matrices(a[(i + 1) % 2], keys + (i + 1) * 32);
    const u32(&now)[4] = a[i % 2];
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      multiply_add(sums[group], now[0], now[1], now[2], now[3], queries.of[i][group][0],
                   queries.of[i][group][1]);
  }
  float* to = reinterpret_cast<float*>(smem + kSumOffset) +
              (part * ROWS + 2 * (lane & 3)) * kSumPitch + first + (lane >> 2);
#pragma unroll
  for (int group = 0; group < kGroups; ++group)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      to[(8 * group + e % 2) * kSumPitch + e / 2 * 8] = sums[group][e];
}

// Running softmax of a warp's rows. All lanes know the peaks; a lane keeps the totals of its keys.
struct Softmax {
  float peak[kGroups], total[kGroups];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      peak[r] = -kInfinity;
      total[r] = 0.0f;
    }
  }

  // Turn the sums of a step into weights; true where peaks have risen, by what decays say.
  __device__ __forceinline__ bool weigh(const Params& p, const Piece& piece, int step,
                                        unsigned char* smem) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * kGroups;
    const float* sums = reinterpret_cast<const float*>(smem + kSumOffset) + first * kSumPitch + lane;
    float scores[kGroups];
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      float part[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) part[i] = sums[(i * ROWS + r) * kSumPitch];
      scores[r] = (part[0] + part[1] + (part[2] + part[3])) * p.scale;
    }
    const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys, tile = step / 2;
    if (tile >= context_tiles || (tile + 1) * kKeys > piece.sequence.context_len) {
#pragma unroll
      for (int r = 0; r < kGroups; ++r) {
        const u64 seen = visible_keys(p, piece, tile, first + r) >> (step % 2 * kStepKeys);
        if (!(seen >> lane & 1)) scores[r] = -kInfinity;
      }
    }
    const bool is_raised = raise(scores, reinterpret_cast<float*>(smem + kDecayOffset) + first);
    bf16_bits* weights =
        reinterpret_cast<bf16_bits*>(smem + kWeightOffset + first * kWeightPitch) + lane;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      // A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
      const float weight = exp2_fast(scores[r] - (peak[r] == -kInfinity ? 0.0f : peak[r]));
      weights[r * (kWeightPitch / 2)] = static_cast<bf16_bits>(pack_bf16(weight, 0.0f));
      total[r] += weight;
    }
    return is_raised;
  }

  // Raise the peaks where a score is too far above one: true then. Decays are 1 where none rises.
  __device__ __forceinline__ bool raise(const float (&scores)[kGroups], float* decays) {
    bool rises = false;
#pragma unroll
    for (int r = 0; r < kGroups; ++r)  // -inf + 8: the first score of a row rises
      rises |= scores[r] > peak[r] + kRise;
    const bool is_raised = __any_sync(~0u, rises);
    float decay[kGroups];
#pragma unroll
    for (int r = 0; r < kGroups; ++r) decay[r] = 1.0f;
    if (is_raised) {
      float raised[kGroups];
#pragma unroll
      for (int r = 0; r < kGroups; ++r) raised[r] = fmaxf(scores[r], peak[r]);
#pragma unroll
      for (int other = 16; other > 0; other /= 2)
#pragma unroll
        for (int r = 0; r < kGroups; ++r)
          raised[r] = fmaxf(raised[r], __shfl_xor_sync(~0u, raised[r], other));
#pragma unroll
      for (int r = 0; r < kGroups; ++r) {
        if (raised[r] != -kInfinity) decay[r] = exp2_fast(peak[r] - raised[r]);
        peak[r] = raised[r];
        total[r] *= decay[r];
      }
    }
    if ((threadIdx.x & 31) == 0)
#pragma unroll
      for (int r = 0; r < kGroups; ++r) decays[r] = decay[r];
    return is_raised;
  }

  // The log-sum-exp of each row, what its values are divided by and where they go.
  __device__ __forceinline__ void finish(const Params& p, const Piece& piece, unsigned char* smem) {
    const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * kGroups + lane;
    float own_total = 0.0f, own_peak = 0.0f;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2)
        total[r] += __shfl_xor_sync(~0u, total[r], other);
      if (lane == r) {
        own_total = total[r];
        own_peak = peak[r];
      }
    }
    if (lane >= kGroups) return;
    const int packed = piece.row + row, token = packed / p.H, head = packed - token * p.H;
    const bool seen = own_total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
    const Place place(p, piece, packed, token, head);
    if (place.lse) *place.lse = seen ? (own_peak + log2_fast(own_total)) * kLn2 : -kInfinity;
    reinterpret_cast<float*>(smem + kDivisorOffset)[row] = seen ? 1.0f / own_total : 0.0f;
    reinterpret_cast<bf16_bits**>(smem + kPlaceOffset)[row] = place.out;
  }
};

// O^T of a warp's dims. Element (block, group, 2 h + e): dim 16 block + lane / 4 + 8 h of the warp's,
// row 8 group + 2 (lane % 4) + e.
struct Values {
  float of[kBlocks][kGroups][4];

  __device__ __forceinline__ void scale(const unsigned char* factors) {
    const float* by = reinterpret_cast<const float*>(factors) + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float2 two = *reinterpret_cast<const float2*>(by + 8 * group);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e) of[block][group][e] *= e % 2 ? two.y : two.x;
    }
  }

  // Add the values of a step, weighted.
  __device__ __forceinline__ void add(u32 values, u32 weights) {
    constexpr int kCount = kBlocks * kStepKeys / 16;  // products of 16 dims and 16 keys
    const int lane = threadIdx.x & 31;
    values += ((lane & 7) + 8 * (lane >> 4)) * kRowPitch + (threadIdx.x >> 5) * 128 +
              ((lane >> 3) & 1) * 16;
    weights += (lane & 7) * kWeightPitch + (lane >> 3) * 16;
    u32 a[2][4], b[kGroups][4];
    load_turned(a[0], values);
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      load_matrices(b[group], weights + group * 8 * kWeightPitch);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int block = i / 2, part = i % 2;
      if (i + 1 < kCount)
        load_turned(a[(i + 1) % 2], values + (i + 1) % 2 * 16 * kRowPitch + (i + 1) / 2 * 32);
      const u32(&now)[4] = a[i % 2];
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        multiply_add(of[block][group], now[0], now[1], now[2], now[3], b[group][2 * part],
                     b[group][2 * part + 1]);
    }
  }

  // Round to bfloat16, turn to [row, dim] in a place of the warp's own and write the rows out.
  __device__ __forceinline__ void store(u32 shared, unsigned char* smem) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 own = shared + warp * ROWS * kOutPitch;
    const u32 to = own + (lane & 7) * kOutPitch + ((lane >> 3) & 1) * 16;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* v = of[block][group];
        store_turned(to + group * 8 * kOutPitch + block * 32, pack_bf16(v[0], v[1]),
                     pack_bf16(v[2], v[3]));
      }
    __syncwarp();
    const bf16_bits* const* places =
        reinterpret_cast<const bf16_bits* const*>(smem + kPlaceOffset);
#pragma unroll
    for (int part = 0; part < ROWS / 4; ++part) {
      const int row = 4 * part + (lane >> 3), unit = lane & 7;
      const uint4 eight = shared_16(own + row * kOutPitch + unit * 16);
      bf16_bits* place = const_cast<bf16_bits*>(places[row]);
      if (place) *reinterpret_cast<uint4*>(place + warp * 64 + unit * 8) = eight;
    }
  }
};

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1)
    tree_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(shared + kBarrierOffset + 8 * stage, kStepKeys);
    barriers_are_ready();
  }
  grid_let_next_start();
  u32 count = 0;  // steps so far
  Run run(p);
  Piece piece;
  Queries queries;
  Softmax softmax;
  Values values;
  while (run.next(p, piece)) {
    prefetch_pages(p, piece);
    Copies copies{p, piece, smem, shared, 0, 0};
    int step = 2 * piece.first;
    copies.begin(step);
    fence_async_proxy();
    __syncthreads();  // the barriers are there, the last rows have gone out
    copies.start(step, step, count % kStages);
    queries.load(p, piece);
    softmax.reset();
#pragma unroll
    for (int i = 0; i < kBlocks * kGroups * 4; ++i)
      values.of[i / (kGroups * 4)][i / 4 % kGroups][i % 4] = 0.0f;
#pragma unroll 1
    for (; step < 2 * piece.last; ++count) {
      const u32 stage = count % kStages, rows = shared + stage * kStageBytes;
      const int next = step_after(piece.sequence, step);
      __syncthreads();  // the step before has been read
      if (next < 2 * piece.last) copies.start(step, next, stage ^ 1);
      barrier_wait(shared + kBarrierOffset + 8 * stage, count / kStages & 1);
      add_scores(smem, rows, queries);
      __syncthreads();
      const bool is_raised = __syncthreads_or(softmax.weigh(p, piece, step, smem));
      if (is_raised) values.scale(smem + kDecayOffset);
      values.add(rows, shared + kWeightOffset);
      step = next;
    }
    softmax.finish(p, piece, smem);
    __syncthreads();
    values.scale(smem + kDivisorOffset);
    values.store(shared, smem);
  }
}
