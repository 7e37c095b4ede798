// Tree attention over paged latent rows in 99 KB of shared memory, for any architecture from sm_90 on:
// S^T = K Q^T, O^T = V^T P^T through mma.sync.
//
// As in tree_attention_sm90.cu the packed rows (tokens x heads) stand in the N of the matrix
// instructions, which comes in steps of 8. Queries of 72 rows would fill shared memory by themselves,
// so a block has at most 40 rows and their queries in registers: a warp holds half of the dims of all
// rows. 72 rows are two blocks, whose tiles are read from memory once and from L2 once more.
//
// Grid: one block an SM, each with its share of the line (tree_attention_line.cuh). Where MERGE_INSIDE
// the launch is cooperative, since all blocks merge together what they have written
// (tree_attention_merge_inside.cuh). A step is a quarter of a tile of the line, 16 cached rows, which lie
// in shared memory once, as keys and as values.
//
// Warps 0 to 3 score, two of them a step: pair `step % 2`, so that two steps are scored at a time.
//   scores  dims 288 (warp % 2) and on, all keys; each warp hands its partner the sums of half of the
//           rows and keeps the others
//   weights the peaks come from the step before, of the other pair; weights to shared memory
// Warps 4 to 7 add values, one step at a time.
//   values  dims 64 b + 16 (warp - 4) and on, for all b; O^T in registers
//   copies  rows 4 (warp - 4) and on of the step four ahead, 16 bytes a lane, zeros for rows that are not
//           live, any page size, page ids asked 8 steps ahead
//
// Barriers:
//   full    of a stage: its rows are there
//   weighed of a pair: weights, peaks, decays of its step are there
//   read    of a pair: its weights and decays have been read, the values of the step before added
//   asked   queries are in shared memory; queries: in the registers of all that take them
//   handed  of a pair: its warps have handed each other their sums
//   end     the steps of a piece are done
// All lanes arrive, where one behind __syncwarp would do, and at a hardware barrier all warps meet, never
// some of them: compute-sanitizer sees an order only so.
//
// Shared memory: 5 steps of 16 x 576, rows padded | of each pair what its warps hand each other, and its
// weights [ROWS, 16] in place of it | peaks | decays and totals of each pair | tokens of the rows | flags |
// barriers | addresses of rows to copy | the block's share. While an item begins, its queries lie in place
// of the last steps; while it ends, its rows lie in place of the steps on their way out, what they are
// divided by in place of decays and where they go in place of weights.
//
// A row's shift is its running maximum, raised only when a score exceeds it by RISE.
//
// Source of the ideas: flashinfer csrc/xqa/mla_sm120.cu (queries in registers, tiles of 32 rows), DeepSeek
// FlashMLA docs/20250422-new-kernel-deep-dive.md (value from the key tile), FlashAttention-4 (rescaling
// only beyond a threshold, warps of scores beside warps of values).
//
// Compile-time: ROWS (8..40, a multiple of 8), PAGE_SIZE, HYBRID (tree rows beside the pages),
// MERGE_INSIDE, SHARED_BYTES (what the launch asks for, to be compared).

#ifndef ROWS
#define ROWS 40
#endif
#define BLOCK_ROWS ROWS

#include "roles.cuh"
#include "tree_attention_line.cuh"
#if MERGE_INSIDE
#include "tree_attention_merge_inside.cuh"
#else
#include "tree_attention_merge.cuh"
#endif

constexpr int kThreads = 256, kScoreWarps = 4, kScoreThreads = 128, kValueThreads = 128;
constexpr int kStepKeys = 16, kTileSteps = kKeys / kStepKeys;
constexpr int kRowBytes = (kValueDim + kRopeDim) * 2;
constexpr int kRowPitch = kRowBytes + 16;  // eight rows lie in banks of their own
constexpr int kStageBytes = kStepKeys * kRowPitch;
constexpr int kStages = 5, kAhead = kStages - 1;
constexpr int kParts = 2;                             // that the dims of a score are cut in
constexpr int kProducts = kRowBytes / (32 * kParts);  // of 16 dims, of a part
constexpr int kGroups = ROWS / 8;                     // groups of 8 rows
constexpr int kChains = kGroups >= 5 ? 1 : kGroups >= 3 ? 2 : kGroups == 2 ? 3 : 6;
constexpr int kBlocks = kValueDim / 64;    // of 16 value dims, of a warp
constexpr int kHandedBytes = 256 * kGroups;  // by a warp of scores to its partner; weights of a step
constexpr int kOutPitch = 128 * 2 + 16;      // bytes of a warp's dims of a row on its way out
constexpr float kRise = 8.0f;                // RISE, in powers of two
#define UNLIKELY(x) __builtin_expect(static_cast<bool>(x), 0)  // whose code stands apart

constexpr int kHandedOffset = kStages * kStageBytes;
constexpr int kPeakOffset = kHandedOffset + 4 * kHandedBytes;
constexpr int kDecayOffset = kPeakOffset + ROWS * 4;
constexpr int kTotalOffset = kDecayOffset + 2 * ROWS * 4;
constexpr int kTokenOffset = kTotalOffset + 2 * ROWS * 4;
constexpr int kFlagOffset = kTokenOffset + ROWS * 4;
constexpr int kBarrierOffset = kFlagOffset + 4 * 4;
constexpr int kAddressOffset = kBarrierOffset + (kStages + 9) * 8;
constexpr int kWorkOffset = kAddressOffset + 4 * 32 * 8;
constexpr int kSharedBytes = kWorkOffset + 104;
constexpr int kQueryOffset = kHandedOffset - ROWS * kRowPitch;  // while an item begins, in place of steps
constexpr int kPlaceOffset = kHandedOffset;  // while an item ends, in place of weights
static_assert(ROWS % 8 == 0 && ROWS >= 8 && ROWS <= 40, "rows of a block: 8..40 in steps of 8");
static_assert(4 * ROWS * kOutPitch <= kHandedOffset, "rows on their way out, in place of the steps");
static_assert(ROWS * 8 <= 4 * kHandedBytes, "where rows go, in place of the weights");
static_assert(kSharedBytes <= 101376, "shared memory of a block on sm_120");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif


__device__ __forceinline__ u32 full_barrier(u32 shared, int stage) {
  return shared + kBarrierOffset + 8 * stage;
}

__device__ __forceinline__ u32 weighed_barrier(u32 shared, int pair) {
  return shared + kBarrierOffset + 8 * (kStages + pair);
}

__device__ __forceinline__ u32 read_barrier(u32 shared, int pair) {
  return shared + kBarrierOffset + 8 * (kStages + 2 + pair);
}

__device__ __forceinline__ u32 query_barrier(u32 shared) {
  return shared + kBarrierOffset + 8 * (kStages + 4);
}

__device__ __forceinline__ u32 end_barrier(u32 shared) {
  return shared + kBarrierOffset + 8 * (kStages + 5);
}

__device__ __forceinline__ u32 asked_barrier(u32 shared) {
  return shared + kBarrierOffset + 8 * (kStages + 6);
}

__device__ __forceinline__ u32 handed_barrier(u32 shared, int pair) {
  return shared + kBarrierOffset + 8 * (kStages + 7 + pair);
}

// All threads of a block, whose warps come from different places.
__device__ __forceinline__ void meet(u32 barrier, u32 parity) {
  barrier_arrive(barrier);
  barrier_wait(barrier, parity);
}

// The steps of a piece, those that have rows: first the committed rows', then the tree's.
struct Steps {
  int context_first, num_context, tree_first, num;  // first rows; steps
  int tree_tile;                                    // the first of the tree
  int plain;                                        // steps of which all rows see all rows

  __device__ __forceinline__ explicit Steps(const Piece& piece) {
    const Sequence& sequence = piece.sequence;
    tree_tile = (sequence.context_len + kKeys - 1) / kKeys;
    const auto steps = [](int rows, int tiles) {
      return min((rows + kStepKeys - 1) / kStepKeys, kTileSteps * tiles);
    };
    context_first = piece.first * kKeys;
    num_context = max(steps(sequence.context_len, piece.last) - kTileSteps * piece.first, 0);
    plain = min(num_context, sequence.context_len / kStepKeys - kTileSteps * piece.first);
    const int first_tile = max(piece.first - tree_tile, 0);
    tree_first = first_tile * kKeys;
    num = num_context +
          max(steps(sequence.tree_size, max(piece.last - tree_tile, 0)) - kTileSteps * first_tile, 0);
  }

  // Column of the tree of a step's first row.
  __device__ __forceinline__ int column(int step) const {
    return tree_first + kStepKeys * (step - num_context);
  }

  __device__ __forceinline__ Row row(const Sequence& sequence, int step, int key) const {
    const int first = step < num_context ? context_first + kStepKeys * step
                                         : tree_tile * kKeys + column(step);
    return Row(sequence, (first + key) / kKeys, (first + key) % kKeys);
  }
};

// What a block has found of its share of the line, by one warp for all.
struct Work {
  Run run;
  Piece piece;
  Steps steps;
  bool has_piece;
};
static_assert(kWorkOffset + sizeof(Work) <= kSharedBytes, "a place of its own");

__device__ __forceinline__ Work& work_of(unsigned char* smem) {
  return *reinterpret_cast<Work*>(smem + kWorkOffset);
}

// The first warp: the next piece.
__device__ __forceinline__ void find(const Params& p, Work& work) {
  Run run = work.run;
  Piece piece;
  const bool has_piece = run.next(p, piece);
  __syncwarp();
  if (threadIdx.x != 0) return;
  work.run = run;
  if (has_piece) {
    work.piece = piece;
    work.steps = Steps(piece);
  }
  work.has_piece = has_piece;
}

// Copies of the steps of a piece, four rows a warp, eight lanes a row. Lanes 4 k to 4 k + 3 find those of
// step 8 block + k, and ask for the pages of eight steps at once, eight steps ahead.
struct Copies {
  const Params& p;
  const Sequence sequence;
  const Steps steps;
  unsigned char* smem;
  u32 shared;
  int next_page;  // of this lane's row in the next block of steps

  __device__ __forceinline__ int first_key() const { return threadIdx.x / 32 % 4 * 4; }

  // Where the rows of a warp's eight steps lie.
  __device__ __forceinline__ u64* addresses() const {
    return reinterpret_cast<u64*>(smem + kAddressOffset) + threadIdx.x / 32 % 4 * 32;
  }

  __device__ __forceinline__ int page_in(int first_step) const {
    const int lane = threadIdx.x & 31, step = first_step + (lane >> 2);
    return step < steps.num ? steps.row(sequence, step, first_key() + (lane & 3)).page(p, sequence) : 0;
  }

  __device__ __forceinline__ void find(int first_step) {
    const int lane = threadIdx.x & 31, step = first_step + (lane >> 2);
    const Row row = steps.row(sequence, step, first_key() + (lane & 3));
    __syncwarp();  // the last ones have been read
    addresses()[lane] = reinterpret_cast<u64>(row.address(p, sequence, next_page));
    __syncwarp();
    next_page = page_in(first_step + 8);
  }

  // Copy a step, one after the other, to a stage that nobody reads any more.
  __device__ __forceinline__ void start(int step, u32 stage) {
    if (UNLIKELY(step % 8 == 0)) find(step);
    const int lane = threadIdx.x & 31, unit = lane & 7;
    const u64 row = addresses()[4 * (step % 8) + (lane >> 3)];
    const bf16_bits* from = row ? reinterpret_cast<const bf16_bits*>(row) + unit * 8 : p.q;
    const u32 to = shared + stage * kStageBytes + (first_key() + (lane >> 3)) * kRowPitch + unit * 16;
#pragma unroll
    for (int chunk = 0; chunk < kRowBytes / 128; ++chunk)
      copy_16(to + chunk * 128, from + chunk * 64, row ? 16u : 0u);
    barrier_arrive_after_copies(full_barrier(shared, stage));
  }
};

// The queries of a warp's dims as the products take them, zeros for rows of no token.
struct Queries {
  u32 of[kProducts][kGroups][2];

  // All warps of scores bring them to shared memory, in place of stages that nothing is copied to before
  // they say so.
  __device__ __forceinline__ void load(const Params& p, const Piece& piece, int part, u32 shared,
                                       u32 parity) {
    const int lane = threadIdx.x & 31, unit = threadIdx.x & 7;
    const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + unit * 8;
#pragma unroll
    for (int row = threadIdx.x / 8; row < ROWS; row += kScoreThreads / 8) {
      const int packed = piece.row + row, token = packed / p.H;
      const bool live = token < piece.sequence.tree_size;
      const bf16_bits* from =
          live ? base + token * p.q_token + (packed - token * p.H) * p.q_head : p.q;
      const u32 to = shared + kQueryOffset + row * kRowPitch + unit * 16;
#pragma unroll
      for (int chunk = 0; chunk < kRowBytes / 128; ++chunk)
        copy_16(to + chunk * 128, from + chunk * 64, live ? 16u : 0u);
    }
    barrier_arrive_after_copies(asked_barrier(shared));
    barrier_wait(asked_barrier(shared), parity);
    const u32 from = shared + kQueryOffset + ((lane & 7) + 8 * (lane >> 4)) * kRowPitch +
                     part * kProducts * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int group = 0; group + 1 < kGroups; group += 2) {
        u32 m[4];
        load_matrices(m, from + group * 8 * kRowPitch + i * 32);
        of[i][group][0] = m[0];
        of[i][group][1] = m[1];
        of[i][group + 1][0] = m[2];
        of[i][group + 1][1] = m[3];
      }
      if (kGroups % 2)
        load_two_matrices(of[i][kGroups - 1],
                          from + (kGroups - 1 - (lane >> 4)) * 8 * kRowPitch + i * 32);
    }
    barrier_arrive(query_barrier(shared));
  }
};

// What a warp of scores does, `part` of pair `pair`. Of a step's scores it keeps those of rows of its
// parity: lane l has rows 8 group + 2 (l % 4) + part and keys 2 (l / 4) and the next.
struct Scorer {
  const Params& p;
  const Piece& piece;
  const Steps& steps;
  unsigned char* smem;
  u32 shared;
  int pair, part;
  float total[kGroups];  // of its keys

  __device__ __forceinline__ unsigned char* handed() const {
    return smem + kHandedOffset + pair * 2 * kHandedBytes;
  }

  // The first of this lane's rows among numbers of rows.
  __device__ __forceinline__ float* own_row(int offset) const {
    return reinterpret_cast<float*>(smem + offset) + 2 * (threadIdx.x & 3) + part;
  }

  // Sums of a warp's dims, all keys and rows. The first eight rows of a matrix are one of each two keys
  // that a lane keeps, so that no two lie in the same banks: 0, 2, 4, 6, 9, 11, 13, 15.
  __device__ __forceinline__ void multiply(u32 keys, const Queries& queries,
                                           float (&sums)[kGroups][4]) const {
    const int lane = threadIdx.x & 31;
    const int key = 2 * (lane & 7) + ((lane >> 2 ^ lane >> 3) & 1);
    keys += key * kRowPitch + part * kProducts * 32 + (lane >> 4) * 16;
    float chains[kChains][kGroups][4] = {};
    u32 a[3][4];
    load_matrices(a[0], keys);
    load_matrices(a[1], keys + 32);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      if (i + 2 < kProducts) load_matrices(a[(i + 2) % 3], keys + (i + 2) * 32);
      const u32(&now)[4] = a[i % 3];
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        multiply_add(chains[i % kChains][group], now[0], now[1], now[2], now[3],
                     queries.of[i][group][0], queries.of[i][group][1]);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[group][e] = chains[0][group][e];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) sums[group][e] += chains[chain][group][e];
      }
  }

  // Hand the partner the sums of its rows, and keep the others' with what it has handed.
  __device__ __forceinline__ void exchange(const float (&sums)[kGroups][4], float2 (&scores)[kGroups],
                                           u32 parity) const {
    float2* mine = reinterpret_cast<float2*>(handed() + part * kHandedBytes) + (threadIdx.x & 31);
    const float2* theirs =
        reinterpret_cast<const float2*>(handed() + (part ^ 1) * kHandedBytes) + (threadIdx.x & 31);
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      mine[32 * group] = part ? make_float2(sums[group][0], sums[group][2])
                              : make_float2(sums[group][1], sums[group][3]);
    barrier_arrive(handed_barrier(shared, pair));
    barrier_wait(handed_barrier(shared, pair), parity);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float2 more = theirs[32 * group];
      scores[group] = make_float2(((part ? sums[group][1] : sums[group][0]) + more.x) * p.scale,
                                  ((part ? sums[group][3] : sums[group][2]) + more.y) * p.scale);
    }
  }

  // Of lane l the first score is of key 2 (l / 4) where l < 16, of the next where not.
  __device__ __forceinline__ int key(int which) const {
    const int lane = threadIdx.x & 31;
    return 2 * (lane >> 2) + (which ^ lane >> 4);
  }

  // Hide what rows do not see.
  __device__ __forceinline__ void hide(int step, float2 (&scores)[kGroups]) const {
    const Sequence& sequence = piece.sequence;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const bool is_tree = step >= steps.num_context;
      const int row = (is_tree ? steps.column(step) : steps.context_first + kStepKeys * step) + key(which);
      const bool is_there = row < (is_tree ? sequence.tree_size : sequence.context_len);
      const int* words = p.ancestor_bits + sequence.index * p.bits_sequence + row / 32;
      const int* tokens = reinterpret_cast<const int*>(own_row(kTokenOffset));
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int token = tokens[8 * group];
        u32 bits = ~0u;
        if (is_tree && is_there && token >= 0) bits = words[token * p.bits_token];
        if (!is_there || !(bits >> (row % 32) & 1)) (which ? scores[group].y : scores[group].x) = -kInfinity;
      }
    }
  }

  __device__ __forceinline__ volatile int* flag(int which) const {
    return reinterpret_cast<volatile int*>(smem + kFlagOffset) + 2 * which + part;
  }

  // The step of the other pair has raised peaks.
  __device__ __forceinline__ void follow() {
    const float* decays = own_row(kDecayOffset + (pair ^ 1) * ROWS * 4);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) total[group] *= decays[8 * group];
  }

  // Raise the peaks to the highest scores.
  __device__ __forceinline__ void raise(const float2 (&scores)[kGroups], float (&peak)[kGroups]) {
    float* peaks = own_row(kPeakOffset);
    float* decays = own_row(kDecayOffset + pair * ROWS * 4);
    __syncwarp();  // all lanes have read the peaks
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float raised = fmaxf(fmaxf(scores[group].x, scores[group].y), peak[group]);
#pragma unroll
      for (int other = 4; other < 32; other *= 2)
        raised = fmaxf(raised, __shfl_xor_sync(~0u, raised, other));
      const float decay = raised == -kInfinity ? 1.0f : exp2_fast(peak[group] - raised);
      total[group] *= decay;
      peak[group] = raised;
      if ((threadIdx.x & 31) < 4) {
        decays[8 * group] = decay;
        peaks[8 * group] = raised;
      }
    }
  }

  // Turn scores into weights for the warps of values: [row, key] of 16 keys, in place of what the partner
  // has handed. In odd rows the two halves of the keys lie in the place of each other.
  __device__ __forceinline__ void weigh(float2 (&scores)[kGroups]) {
    const int lane = threadIdx.x & 31;
    const float* peaks = own_row(kPeakOffset);
    float peak[kGroups];
    bool rises = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      peak[group] = peaks[8 * group];
      // -inf + 8: the first score of a row rises.
      rises |= scores[group].x > peak[group] + kRise;
      rises |= scores[group].y > peak[group] + kRise;
    }
    const bool is_raised = __any_sync(~0u, rises);
    if (UNLIKELY(is_raised)) raise(scores, peak);
    __syncwarp();  // all lanes have what was handed where weights go
    u32* to = reinterpret_cast<u32*>(handed() + (part ^ 1) * kHandedBytes) + 8 * (lane & 3) +
              ((lane >> 2) ^ (part << 2));
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      // A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
      const float shift = peak[group] == -kInfinity ? 0.0f : peak[group];
      const float first = exp2_fast(scores[group].x - shift);
      const float second = exp2_fast(scores[group].y - shift);
      total[group] += first + second;
      to[32 * group] = lane < 16 ? pack_bf16(first, second) : pack_bf16(second, first);
    }
    if (lane == 0) *flag(pair) = is_raised;
    barrier_arrive(weighed_barrier(shared, pair));
  }

  // All steps of the piece, of which `before` came before in all.
  __device__ __forceinline__ void run(const Queries& queries, u32 before) {
    const int num = steps.num, plain = steps.plain;
    int step = (before ^ pair) & 1;
    u32 count = before + step, stage = count % kStages, parity = count / kStages & 1;
#pragma unroll 1
    for (; step < num; step += 2, count += 2) {
      barrier_wait(full_barrier(shared, stage), parity);
      float sums[kGroups][4];
      multiply(shared + stage * kStageBytes, queries, sums);
      stage += 2;
      if (stage >= kStages) {
        stage -= kStages;
        parity ^= 1;
      }
      // The last weights of the pair have been read, the other pair's step is weighed.
      barrier_wait(read_barrier(shared, pair), (count / 2 & 1) ^ 1);
      if (step > 0) barrier_wait(weighed_barrier(shared, pair ^ 1), (count - 1) / 2 & 1);
      float2 scores[kGroups];
      exchange(sums, scores, count / 2 & 1);
      if (UNLIKELY(step >= plain)) hide(step, scores);
      if (UNLIKELY(step > 0 && *flag(pair ^ 1))) follow();
      weigh(scores);
    }
    if (step == num) {  // the last step was the other pair's
      barrier_wait(weighed_barrier(shared, pair ^ 1), (count - 1) / 2 & 1);
      if (*flag(pair ^ 1)) follow();
    }
  }

  __device__ __forceinline__ void store_totals() const {
    float* to = own_row(kTotalOffset + pair * ROWS * 4);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float sum = total[group];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if ((threadIdx.x & 31) < 4) to[8 * group] = sum;
    }
  }
};

// O^T of a warp's dims. Element (block, group, 2 h + e): dim 64 block + 16 (warp % 4) + lane / 4 + 8 h,
// row 8 group + 2 (lane % 4) + e.
struct Values {
  float of[kBlocks][kGroups][4];

  // Even rows, odd rows, by factors where told.
  __device__ __forceinline__ void scale(const unsigned char* factors, int evens, int odds) {
    const float* by = reinterpret_cast<const float*>(factors) + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float two[2] = {evens ? by[8 * group] : 1.0f, odds ? by[8 * group + 1] : 1.0f};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e) of[block][group][e] *= two[e % 2];
    }
  }

  // Add the values of a step once it is weighed.
  __device__ __forceinline__ void add(u32 shared, unsigned char* smem, u32 values, int pair,
                                      u32 parity) {
    const int lane = threadIdx.x & 31;
    values += ((lane & 7) + 8 * (lane >> 4)) * kRowPitch + ((threadIdx.x >> 5) & 3) * 32 +
              ((lane >> 3) & 1) * 16;
    u32 a[3][4], b[kGroups][2];
    load_turned(a[0], values);
    load_turned(a[1], values + 128);
    barrier_wait(weighed_barrier(shared, pair), parity);
    const volatile int* flags = reinterpret_cast<const volatile int*>(smem + kFlagOffset) + 2 * pair;
    const int evens = flags[0], odds = flags[1];
    load_weights(b, shared + kHandedOffset + pair * 2 * kHandedBytes);
    if (UNLIKELY(evens | odds)) scale(smem + kDecayOffset + pair * ROWS * 4, evens, odds);
    barrier_arrive(read_barrier(shared, pair));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block + 2 < kBlocks) load_turned(a[(block + 2) % 3], values + (block + 2) * 128);
      const u32(&now)[4] = a[block % 3];
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        multiply_add(of[block][group], now[0], now[1], now[2], now[3], b[group][0], b[group][1]);
    }
  }

  __device__ __forceinline__ static void load_weights(u32 (&b)[kGroups][2], u32 from) {
    const int lane = threadIdx.x & 31, row = (lane & 7) + 8 * (lane >> 4), unit = lane >> 3 & 1;
    from += (row & 1 ? 0 : kHandedBytes) + (row >> 1) * 32 + ((unit ^ (row & 1)) << 4);
#pragma unroll
    for (int group = 0; group + 1 < kGroups; group += 2) {
      u32 m[4];
      load_matrices(m, from + group * 128);
      b[group][0] = m[0];
      b[group][1] = m[1];
      b[group + 1][0] = m[2];
      b[group + 1][1] = m[3];
    }
    if (kGroups % 2) load_two_matrices(b[kGroups - 1], from + (kGroups - 1 - (lane >> 4)) * 128);
  }

#if MERGE_INSIDE
  // Write them as they lie in registers, not divided by the totals, as the vectors of a partial result.
  __device__ __forceinline__ void store_part(const Params& p, int slot) const {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    uint4* to = reinterpret_cast<uint4*>(p.partial_out) + static_cast<i64>(slot) * kItemVectors +
                (lane & 3) * kPairVectors + 8 * warp + (lane >> 2);
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int two = 0; two < 2; ++two)
          to[4 * group * kPairVectors + 64 * two + 32 * half] =
              part_vector(of[4 * half + 2 * two][group], of[4 * half + 2 * two + 1][group]);
  }
#endif

  // Round to bfloat16, turn to [row, dim] in a place of the warp's own and write the rows out.
  __device__ __forceinline__ void store(u32 shared, unsigned char* smem) const {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
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
#pragma unroll 4
    for (int part = 0; part < ROWS / 2; ++part) {
      const int row = 2 * part + (lane >> 4), unit = lane & 15;
      const uint4 eight = shared_16(own + row * kOutPitch + unit * 16);
      bf16_bits* place = const_cast<bf16_bits*>(places[row]);
      if (place)
        *reinterpret_cast<uint4*>(place + unit / 2 * 64 + warp * 16 + unit % 2 * 8) = eight;
    }
  }
};

// Before a piece: no row has a peak, and which token each is of, -1 for none.
__device__ __forceinline__ void begin(const Params& p, const Piece& piece, unsigned char* smem) {
  const int row = threadIdx.x, token = (piece.row + row) / p.H;
  if (row >= ROWS) return;
  reinterpret_cast<float*>(smem + kPeakOffset)[row] = -kInfinity;
  reinterpret_cast<int*>(smem + kTokenOffset)[row] = token < piece.sequence.tree_size ? token : -1;
}

// After it: of a part that is merged inside, each row's peak and total; else its log-sum-exp, what its
// values are divided by and where they go.
__device__ __forceinline__ void finish(const Params& p, const Piece& piece, unsigned char* smem,
                                       bool is_part) {
  const int row = threadIdx.x;
  if (row >= ROWS) return;
  const float* totals = reinterpret_cast<const float*>(smem + kTotalOffset) + row;
  const float peak = reinterpret_cast<const float*>(smem + kPeakOffset)[row];
  const float total = totals[0] + totals[ROWS];
  if (is_part) {
    reinterpret_cast<float2*>(p.partial_lse)[static_cast<i64>(piece.slot) * ROWS + row] =
        make_float2(peak, total);
    return;
  }
  const int packed = piece.row + row, token = packed / p.H, head = packed - token * p.H;
  const bool seen = total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
  const Place place(p, piece, packed, token, head);
  if (place.lse) *place.lse = seen ? (peak + log2_fast(total)) * kLn2 : -kInfinity;
  reinterpret_cast<float*>(smem + kDecayOffset)[row] = seen ? 1.0f / total : 0.0f;
  reinterpret_cast<bf16_bits**>(smem + kPlaceOffset)[row] = place.out;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tree_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(full_barrier(shared, stage), kValueThreads);
    for (int pair = 0; pair < 2; ++pair) {
      barrier_init(weighed_barrier(shared, pair), 64);
      barrier_init(read_barrier(shared, pair), kValueThreads);
      barrier_init(handed_barrier(shared, pair), 64);
    }
    barrier_init(asked_barrier(shared), kScoreThreads);
    barrier_init(query_barrier(shared), kScoreThreads);
    barrier_init(end_barrier(shared), kThreads);
    barriers_are_ready();
  }
  grid_let_next_start();
  Work& work = work_of(smem);
  const Piece& piece = work.piece;
  const Steps& steps = work.steps;
  if (warp == 0) {
    const Run run(p);
    if (threadIdx.x == 0) work.run = run;
    __syncwarp();
  }
  u32 before = 0, pieces = 0;  // steps of the pieces before; pieces
#pragma unroll 1
  while (true) {
    if (warp == 0) find(p, work);
    __syncthreads();
    if (!work.has_piece) break;
    const bool is_part = MERGE_INSIDE && !piece.is_whole;
    begin(p, piece, smem);
    if (warp >= kScoreWarps) {
      prefetch_pages(p, piece);
    }
    __syncthreads();  // the barriers are there, the last rows have gone out
    if (warp < kScoreWarps) {
      Queries queries;
      queries.load(p, piece, warp & 1, shared, pieces & 1);
      Scorer scorer{p, piece, steps, smem, shared, warp >> 1, warp & 1, {}};
      scorer.run(queries, before);
      scorer.store_totals();
      meet(end_barrier(shared), 0);
      finish(p, piece, smem, is_part);
      meet(end_barrier(shared), 1);
    } else {
      Copies copies{p, piece.sequence, steps, smem, shared, 0};
      copies.next_page = copies.page_in(0);
      const int num = steps.num;
      u32 count = before, stage = before % kStages, parity = before / kStages & 1;
      bool is_free = false;  // of queries
#pragma unroll 1
      for (int step = 0; step < kAhead; ++step) {
        const u32 to = (before + step) % kStages;
        if (!is_free && (to >= kQueryOffset / kStageBytes || step + 1 == kAhead)) {
          barrier_wait(query_barrier(shared), pieces & 1);
          is_free = true;
        }
        if (step < num) copies.start(step, to);
      }
      Values values;
#pragma unroll
      for (int i = 0; i < kBlocks * kGroups * 4; ++i)
        values.of[i / (kGroups * 4)][i / 4 % kGroups][i % 4] = 0.0f;
#pragma unroll 1
      for (int step = 0; step < num; ++step, ++count) {
        barrier_wait(full_barrier(shared, stage), parity);
        values.add(shared, smem, shared + stage * kStageBytes, count & 1, count / 2 & 1);
        if (step + kAhead < num) {
          // All have begun this step, so that nobody reads the one before any more.
          barrier_wait(read_barrier(shared, count & 1), count / 2 & 1);
          copies.start(step + kAhead, stage == 0 ? kStages - 1 : stage - 1);
        }
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
#if MERGE_INSIDE
      if (is_part) values.store_part(p, piece.slot);
#endif
      meet(end_barrier(shared), 0);
      meet(end_barrier(shared), 1);
      if (!is_part) {
        values.scale(smem + kDecayOffset, 1, 1);
        values.store(shared, smem);
      }
    }
    before += steps.num;
    ++pieces;
    __syncthreads();
  }
#if MERGE_INSIDE
  using Merging = Merge<kThreads, /*kBarrier=*/1, kHandedOffset>;
  Merging{p, work.run.line, *reinterpret_cast<Merging::Scratch*>(smem), static_cast<int>(threadIdx.x)}.run();
#endif
}
