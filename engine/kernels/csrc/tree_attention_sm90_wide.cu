// Tree attention over paged latent rows for many packed rows, for sm_90a: S = Q K^T, O = P V.
//
// A block has 64 packed rows (tokens x heads), which stand in the M of the matrix instructions: the
// value dims stand in N, 256 at once, so that a product of weights and values reads each value from
// shared memory once, not once for every 64 dims as in tree_attention_sm90.cu.
//
// Grid: one block an SM, each with its share of the line (tree_attention_fronts.cuh). Where MERGE_INSIDE
// the launch is cooperative and its blocks merge what they wrote; else a second launch does
// (tree_attention_merge_rows.cuh).
//
// Warpgroups (128 threads each):
//   0 loads   the block's share, for all; tiles: where a page holds boxes of 8 rows or more, one thread a
//             box, by the tensor map of the pages, 64 dims of as many rows as lie together; the blocks of a
//             sequence, which are at the same tile, each bring a part of the next one to L2. Tiles that are
//             not full, and all with shorter pages: 16 bytes a thread and copy (cp.async), zeros for rows
//             that are not live. Page ids are asked one tile ahead.
//   1, 2      take turns: one computes the scores of a tile and its softmax while the other has the
//             tensor cores. Each adds the values of every tile in half of the dims, 64 x 256 in
//             registers. Weights stay in the registers of the warpgroup that found them and go to the
//             other through shared memory. The rope of the queries stands in registers.
//
// Shared memory: queries 64 x 512 | values 2 x 64 x 512 | rope 2 x 64 x 64 | weights 2 x 64 x 64 | what
// a tile changed, twice | barriers | the share. All in chunks of 64 dims (keys) whose rows of 128 bytes are
// swizzled by 128.
// Barriers, each with a full and an empty side: half of the value dims of a stage, its rope, the
// weights of either warpgroup. A half is loaded anew as soon as its warpgroup has added it.
//
// A row's shift is its running maximum, raised only when a score exceeds it by RISE. Tiles are
// weighed in order, each with the maxima that the last one left; a warpgroup that raises some says
// by how much, and the other scales what it has before it adds the tile.
//
// Source of the ideas: DeepSeek FlashMLA docs/20250422-new-kernel-deep-dive.md (two warpgroups in
// turn, half of the output each, value from the key tile), FlashAttention-4 (rescaling only beyond a
// threshold), ThunderMLA (no host schedule).
//
// Compile-time: PAGE_SIZE, HYBRID (tree rows beside the pages), MERGE_INSIDE, SHARED_BYTES (what the
// launch asks for, to be compared).

#define BLOCK_ROWS 64

#include "hopper.cuh"
#include "tensor_map.cuh"
#include "tree_attention_copies.cuh"
#include "tree_attention_fronts.cuh"
#include "tree_attention_merge_rows.cuh"

constexpr int kHalfDims = kValueDim / 2;      // of a warpgroup
constexpr int kHalfChunks = kHalfDims / 64;
constexpr int kQueryChunks = kValueDim / 64;  // in shared memory; the rope's stand in registers
constexpr int kChunks = kQueryChunks + 1;
constexpr int kStages = 2;
constexpr int kPagePower = PAGE_SIZE & -PAGE_SIZE;  // rows that lie in one page, whatever the first
constexpr int kBoxRows = kPagePower < kKeys ? kPagePower : kKeys;
constexpr int kBoxes = kKeys / kBoxRows;
constexpr bool kHasBoxes = kBoxRows >= 8;  // fewer rows a box take longer to start than a tile has
constexpr int kScores = kKeys / 2;            // accumulator registers of 64 x 64 a thread
constexpr int kValues = kHalfDims / 2;        // of 64 x 256
constexpr float kRise = 8.0f;                 // RISE, in powers of two

constexpr int kQueryOffset = 0;
constexpr int kValueOffset = kQueryOffset + kQueryChunks * kChunkBytes;
constexpr int kRopeOffset = kValueOffset + kStages * 2 * kHalfChunks * kChunkBytes;
constexpr int kWeightOffset = kRopeOffset + kStages * kChunkBytes;
constexpr int kChangeOffset = kWeightOffset + 2 * kChunkBytes;
constexpr int kBarrierOffset = kChangeOffset + 2 * (2 * 64 + 4) * 4;
constexpr int kNumBarriers = 6 * kStages + 4;
constexpr int kWorkOffset = kBarrierOffset + kNumBarriers * 8;
constexpr int kSharedBytes = kWorkOffset + 88;  // of a Work
static_assert(kSharedBytes <= 232448, "shared memory of a block on sm_90");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

struct WideParams {
  Params p;
  TensorMap rows;  // [P, L, 576], in words of two; boxes of 64 dims and kBoxRows rows
};

enum NamedBarrier { kComputing = 1, kScored, kCopying, kReady };

template <int kThreads>
__device__ __forceinline__ void named_barrier(int name) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int name) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

// ---- matrix instructions ---------------------------------------------------------------------------

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D32(i) D16(i), D16(i + 16)
#define D128 D32(0), D32(32), D32(64), D32(96)
#define L32                                                                                       \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"    \
  "%25,%26,%27,%28,%29,%30,%31"
#define L128                                                                                      \
  L32                                                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,"  \
  "%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100," \
  "%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,"    \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = a b + (keep ? d : 0), 64 x 64 x 16, both operands K-major in shared memory.
__device__ __forceinline__ void multiply_scores(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" L32 "}, %32, %33, keep, 1, 1, 0, 0;\n}"
      : D32(0)
      : "l"(a), "l"(b), "r"(keep));
}

// d += a b, 64 x 256 x 16, a K-major and b N-major in shared memory.
__device__ __forceinline__ void multiply_values(float (&d)[kValues], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" L128
               "}, %128, %129, 1, 1, 1, 0, 1;"
               : D128
               : "l"(a), "l"(b));
}

// The same with a in registers.
__device__ __forceinline__ void multiply_scores(float (&d)[kScores], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" L32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : D32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply_values(float (&d)[kValues], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" L128
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
               : D128
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// What is in flight until here may not be touched before.
template <int kCount>
__device__ __forceinline__ void matrix_results(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- roles -----------------------------------------------------------------------------------------

// What the loading warps find for all: the share of this block.
struct Work {
  FrontRun run;  // behind the first piece
  Piece piece;   // the first one
  int has_piece;
};
static_assert(kWorkOffset + sizeof(Work) <= kSharedBytes, "in shared memory");

__device__ __forceinline__ Work& work_of(unsigned char* smem) {
  return *reinterpret_cast<Work*>(smem + kWorkOffset);
}

// The compiler has to know that all lanes have the same: see `uniform`.
__device__ __forceinline__ Piece first_piece(unsigned char* smem) {
  Piece piece = work_of(smem).piece;
  Sequence& sequence = piece.sequence;
  int* const numbers[] = {&sequence.index,  &sequence.context_len, &sequence.tree_size,
                          &sequence.tiles,  &sequence.blocks,      &piece.row,
                          &piece.first,     &piece.last,           &piece.slot};
#pragma unroll
  for (int* number : numbers) *number = uniform(*number);
  piece.is_whole = uniform(piece.is_whole);
  return piece;
}

// What is left of the share from `position` on.
__device__ __forceinline__ FrontRun later_pieces(unsigned char* smem, int position) {
  FrontRun run = work_of(smem).run;
  int* const numbers[] = {&run.line.chunk, &run.line.share, &run.line.fronts,
                          &run.line.total, &run.begin,      &run.end};
#pragma unroll
  for (int* number : numbers) *number = uniform(*number);
  run.line.is_padded = uniform(run.line.is_padded);
  run.line.has_fronts = uniform(run.line.has_fronts);
  run.position = position;
  run.is_front = false;
  return run;
}

// Parts of a stage, which are brought and given back on their own: two halves of the values, the rope.
constexpr int kParts = 3;
__device__ __forceinline__ constexpr int chunks_of(int part) { return part < 2 ? kHalfChunks : 1; }
__device__ __forceinline__ u32 place_of(u32 stage, u32 part) {
  return part < 2 ? kValueOffset + (stage * 2 + part) * kHalfChunks * kChunkBytes
                  : kRopeOffset + stage * kChunkBytes;
}

struct Barriers {
  u32 base;

  // Parts of a stage: two halves of the values, the rope. They come chunk by chunk.
  __device__ __forceinline__ u32 full(u32 stage, u32 part) const {
    return base + 8 * (kParts * stage + part);
  }
  __device__ __forceinline__ u32 empty(u32 stage, u32 part) const {
    return base + 8 * (kParts * (kStages + stage) + part);
  }
  __device__ __forceinline__ u32 weights_full(u32 group) const {
    return base + 8 * (2 * kParts * kStages + group);
  }
  __device__ __forceinline__ u32 weights_empty(u32 group) const { return weights_full(group + 2); }
};

// What the first warpgroup does where pages are long enough for boxes: bring the tiles.
struct Loader {
  const WideParams& w;
  const Params& p;
  u32 shared;
  Barriers barriers;

  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ static int warp() { return threadIdx.x >> 5; }
  __device__ __forceinline__ static bool is_full(const Piece& piece, int tile) {
    return (tile + 1) * kKeys <= piece.sequence.context_len;
  }

  // Page of the box that this thread brings of a full tile.
  __device__ __forceinline__ int page(const Piece& piece, int tile) const {
    if (threadIdx.x >= kBoxes || !is_full(piece, tile)) return 0;
    const int position = tile * kKeys + lane() * kBoxRows;
    return p.page_table[piece.sequence.index * p.table_sequence + position / PAGE_SIZE];
  }
  __device__ __forceinline__ static int row_in_page(int tile) {
    return (tile * kKeys + lane() * kBoxRows) % PAGE_SIZE;
  }

  // A full tile, in boxes, by the first warp.
  __device__ __forceinline__ void bring(int tile, u32 count, int page) const {
    const u32 stage = count % kStages, parity = ((count / kStages) & 1) ^ 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      barrier_wait(barriers.empty(stage, part), parity);
      const u32 full = barriers.full(stage, part);
      if (lane() == 0) arrive_expecting(full, chunks_of(part) * kChunkBytes);
      __syncwarp();
      if (lane() < kBoxes) {
        const u32 to = shared + place_of(stage, part) + lane() * kBoxRows * 128;
#pragma unroll
        for (int chunk = 0; chunk < chunks_of(part); ++chunk)
          copy_box(to + chunk * kChunkBytes, w.rows, part * kHalfDims / 2 + chunk * 32,
                   row_in_page(tile), page, full);
      }
      __syncwarp();
    }
  }

  // Any other tile, 16 bytes a copy, zeros for rows that are not live; 16 rows a warp. Three warps do
  // nothing else and meet the first one here.
  __device__ __forceinline__ void copy(const Piece& piece, int tile, u32 count) const {
    const u32 stage = count % kStages, parity = ((count / kStages) & 1) ^ 1;
    const Row row(piece.sequence, tile, 16 * warp() + (lane() & 15));
    const u64 own =
        reinterpret_cast<u64>(row.address(p, piece.sequence, row.page(p, piece.sequence)));
    const int unit = lane() & 7;
    if (warp() == 0)
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) barrier_wait(barriers.empty(stage, part), parity);
    named_barrier<128>(kCopying);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll 1
      for (int i = 0; i < 16; i += 4) {
        const int key = 16 * warp() + i + (lane() >> 3);
        const u64 found = __shfl_sync(~0u, own, i + (lane() >> 3));
        const bf16_bits* from = found ? reinterpret_cast<const bf16_bits*>(found) + unit * 8 : p.q;
        const u32 to = shared + place_of(stage, part) + key * 128 + ((unit ^ (key & 7)) << 4);
#pragma unroll
        for (int chunk = 0; chunk < chunks_of(part); ++chunk)
          copy_16(to + chunk * kChunkBytes, from + part * kHalfDims + chunk * 64, found ? 16 : 0);
      }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async_proxy();
    named_barrier<128>(kCopying);
    if (threadIdx.x < kParts) barrier_arrive(barriers.full(stage, threadIdx.x));
  }

  // `next`: the page of the first tile.
  __device__ __forceinline__ void run(FrontRun& run, Piece& piece, int next) const {
    u32 count = 0;
    while (true) {
      const int end = min(piece.last, max(piece.first, piece.sequence.context_len / kKeys));
      if (warp() == 0) {
#pragma unroll 1
        for (int tile = piece.first; tile < end; ++tile) {
          const int now = next;
          next = tile + 1 < end ? page(piece, tile + 1) : 0;
          // The first tiles have room, and are copied at once.
          if (tile + 1 < end && count + tile + 1 - piece.first >= kStages && lane() < kBoxes)
#pragma unroll 1
            for (int chunk = piece.row / BLOCK_ROWS; chunk < kChunks; chunk += piece.sequence.blocks)
              expect_box(w.rows, chunk * 32, row_in_page(tile + 1), next);
          bring(tile, count + tile - piece.first, now);
        }
      }
#pragma unroll 1
      for (int tile = end; tile < piece.last; ++tile) copy(piece, tile, count + tile - piece.first);
      count += piece.last - piece.first;
      if (!run.next(p, piece)) return;
      next = page(piece, piece.first);
    }
  }
};

// What the first warpgroup does where pages are too short for boxes.
__device__ __forceinline__ void load(const Params& p, u32 shared, const Barriers& barriers, FrontRun& run,
                                     Piece& piece) {
  const auto next = [&](u32) { return run.next(p, piece); };
  load_tiles(p, piece, next, [&](const TileRows& rows, u32 count, u32 inside) {
    const u32 stage = count % kStages, parity = ((count / kStages) & 1) ^ 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const u32 to = shared + place_of(stage, part) + inside;
      barrier_wait(barriers.empty(stage, part), parity);
#pragma unroll
      for (int chunk = 0; chunk < chunks_of(part); ++chunk)
        rows.copy(to + chunk * kChunkBytes, part * kHalfDims + chunk * 64);
      barrier_arrive_after_copies(barriers.full(stage, part));
    }
  });
}

__device__ __forceinline__ void scale_values(const float (&decay)[2], float (&values)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] *= decay[i / 2 % 2];
}

// Running softmax of the two rows a thread holds 16 keys of, lane / 4 and lane / 4 + 8 of its warp.
struct Softmax {
  float peak[2], total[2];  // totals: of the thread's own keys

  __device__ __forceinline__ void reset() {
    peak[0] = peak[1] = -kInfinity;
    total[0] = total[1] = 0.0f;
  }

  // Raise the peaks of a warp's rows where the highest score is too far above one: true then, and
  // `decay` is what was added before has to be multiplied by.
  __device__ __forceinline__ bool raise(const float (&highest)[2], float (&decay)[2]) {
    // -inf + 8: the first score of a row rises.
    const bool rises = highest[0] > peak[0] + kRise || highest[1] > peak[1] + kRise;
    if (!__any_sync(~0u, rises)) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float raised = fmaxf(highest[h], peak[h]);
      decay[h] = raised == -kInfinity ? 1.0f : exp2_fast(peak[h] - raised);
      peak[h] = raised;
      total[h] *= decay[h];
    }
    return true;
  }

  // Turn the scores of a tile into weights.
  __device__ __forceinline__ void weigh(float (&scores)[kScores], float scale) {
    // A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
    const float shift[2] = {peak[0] == -kInfinity ? 0.0f : peak[0],
                            peak[1] == -kInfinity ? 0.0f : peak[1]};
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      scores[i] = exp2_fast(fmaf(scores[i], scale, -shift[i / 2 % 2]));
#pragma unroll
    for (int i = 0; i < kScores; i += 2) total[i / 2 % 2] += scores[i] + scores[i + 1];
  }
};

// The highest score of either row, over all keys of a tile.
__device__ __forceinline__ void find_highest(const float (&scores)[kScores], float scale,
                                             float (&highest)[2]) {
  highest[0] = highest[1] = -kInfinity;
#pragma unroll
  for (int i = 0; i < kScores; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(~0u, highest[h], 1));
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(~0u, highest[h], 2)) * scale;
  }
}

// Set what a row may not see to -inf. Element 4 g + 2 h + e: row lane / 4 + 8 h of the warp, key
// 8 g + 2 (lane % 4) + e.
__device__ __forceinline__ void hide(const Params& p, const Piece& piece, int tile, int row,
                                     float (&scores)[kScores]) {
  const u64 masks[2] = {visible_keys(p, piece, tile, row), visible_keys(p, piece, tile, row + 8)};
  const int first = 2 * (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (!(masks[i / 2 % 2] >> (8 * (i / 4) + first + i % 2) & 1)) scores[i] = -kInfinity;
}

// A warpgroup that computes, one of two.
struct Group {
  const Params& p;
  unsigned char* smem;
  u32 shared, group;
  Barriers barriers;
  u32 count, weighed, followed;  // tiles so far; of them weighed here and by the other
  Softmax softmax;
  float values[kValues];
  u32 rope_queries[4][4], own_weights[kKeys / 16][4];

  __device__ __forceinline__ static int warp() { return (threadIdx.x & 127) >> 5; }
  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ static int row() { return 16 * warp() + (lane() >> 2); }
  // [64] decays, [64] peaks, [4] whether a warp raised some.
  __device__ __forceinline__ float* changes(u32 by) const {
    return reinterpret_cast<float*>(smem + kChangeOffset) + by * (2 * 64 + 4);
  }
  __device__ __forceinline__ u32 weights_at(u32 of) const {
    return opaque(shared) + kWeightOffset + of * kChunkBytes;
  }

  // Queue the product of the queries and tile number `number`, part by part as it comes.
  __device__ __forceinline__ void start_scores(u32 number, float (&scores)[kScores]) const {
    const u32 at = opaque(shared), stage = number % kStages, parity = (number / kStages) & 1;
    const u64 queries = descriptor(at + kQueryOffset, 16, 1024, 1);
    const u64 keys = descriptor(at + kValueOffset + stage * 2 * kHalfChunks * kChunkBytes, 16, 1024, 1);
    const u64 rope = descriptor(at + kRopeOffset + stage * kChunkBytes, 16, 1024, 1);
#pragma unroll
    for (int chunk = 0; chunk < kQueryChunks; ++chunk) {
      if (chunk % kHalfChunks == 0) {
        barrier_wait(barriers.full(stage, chunk / kHalfChunks), parity);
        if (!kHasBoxes) fence_async_proxy();
      }
#pragma unroll
      for (int part = 0; part < 4; ++part)
        multiply_scores(scores, queries + chunk * (kChunkBytes >> 4) + part * 2,
                        keys + chunk * (kChunkBytes >> 4) + part * 2, chunk + part > 0);
    }
    matrix_commit();
    barrier_wait(barriers.full(stage, kParts - 1), parity);
    if (!kHasBoxes) fence_async_proxy();
#pragma unroll
    for (int part = 0; part < 4; ++part)
      multiply_scores(scores, rope_queries[part], rope + part * 2);
    matrix_commit();
  }

  // This warpgroup's dims of tile `number`.
  __device__ __forceinline__ u64 rows_of(u32 number) const {
    const u32 half = number % kStages * 2 + group;
    return descriptor(opaque(shared) + kValueOffset + half * kHalfChunks * kChunkBytes, kChunkBytes,
                      1024, 1);
  }

  // Let the copies have part `part` of tile `number` anew, those of both blocks.
  __device__ __forceinline__ void give_back(u32 number, u32 part) const {
    if (lane() == 0) barrier_arrive(barriers.empty(number % kStages, part));
  }

  // Wait for the weights of the other warpgroup and follow where it raised a peak.
  __device__ __forceinline__ void follow(u32 other) {
    barrier_wait(barriers.weights_full(other), followed & 1);
    ++followed;
    const float* changed = changes(other);
    if (!uniform(reinterpret_cast<const int*>(changed)[128 + warp()])) return;
    float decay[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      decay[h] = changed[row() + 8 * h];
      softmax.peak[h] = changed[64 + row() + 8 * h];
      softmax.total[h] *= decay[h];
    }
    scale_values(decay, values);
  }

  // Compute the scores of tile number `number`, what rows may not see hidden.
  __device__ __forceinline__ void score(const Piece& piece, int tile, u32 number,
                                        float (&scores)[kScores], float (&highest)[2]) const {
    // The second warpgroup waits for the scores before: side by side both would end late.
    if (kHasBoxes && group == 1) named_barrier<256>(kScored);
    matrix_begin();
    start_scores(number, scores);
    if (kHasBoxes && group == 0 && tile + 1 < piece.last) {
      matrix_wait<1>();  // all but the rope
      named_barrier_arrive<256>(kScored);
    }
    matrix_wait<0>();
    matrix_results(scores);
    give_back(number, 2);
    const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys;
    if (tile >= context_tiles || (tile + 1) * kKeys > piece.sequence.context_len)
      hide(p, piece, tile, row(), scores);
    find_highest(scores, p.scale, highest);
  }

  // Turn scores into weights in shared memory; true where peaks have risen.
  __device__ __forceinline__ bool weigh(float (&scores)[kScores], const float (&highest)[2],
                                        float (&decay)[2]) {
    const bool is_raised = softmax.raise(highest, decay);
    softmax.weigh(scores, p.scale);
    barrier_wait(barriers.weights_empty(group), (weighed & 1) ^ 1);
    store_weights(scores);
    float* changed = changes(group);
    if (lane() == 0) reinterpret_cast<int*>(changed)[128 + warp()] = is_raised;
    if (is_raised && (lane() & 3) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        changed[row() + 8 * h] = decay[h];
        changed[64 + row() + 8 * h] = softmax.peak[h];
      }
    }
    fence_async_proxy();
    barrier_arrive(barriers.weights_full(group));
    ++weighed;
    return is_raised;
  }

  // Start to add tile number `number`, which the other warpgroup has weighed.
  __device__ __forceinline__ void begin(u32 number) {
    const u64 weights = descriptor(weights_at(group ^ 1), 16, 1024, 1), rows = rows_of(number);
    matrix_results(values);
    matrix_begin();
#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part)
      multiply_values(values, weights + part * 2, rows + (part * 2048 >> 4));
    matrix_commit();
  }

  __device__ __forceinline__ void end(u32 number) {
    matrix_wait<0>();
    matrix_results(values);
    give_back(number, group);
    if (lane() == 0) barrier_arrive(barriers.weights_empty(group ^ 1));
  }

  // Add the tile this warpgroup has weighed.
  __device__ __forceinline__ void add(u32 number, bool is_raised, const float (&decay)[2]) {
    if (is_raised) scale_values(decay, values);
    const u64 rows = rows_of(number);
    matrix_results(values);
#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(own_weights[part][i])::"memory");
    matrix_begin();
#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part)
      multiply_values(values, own_weights[part], rows + (part * 2048 >> 4));
    matrix_commit();
    matrix_wait<0>();
    matrix_results(values);
    give_back(number, group);
  }

  __device__ __forceinline__ void store_weights(const float (&weights)[kScores]) {
    const int to_row = 16 * warp() + (lane() & 15), unit = lane() >> 4;
#pragma unroll
    for (int part = 0; part < kKeys / 16; ++part) {
      u32(&own)[4] = own_weights[part];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        own[i] = pack_bf16(weights[8 * part + 2 * i], weights[8 * part + 2 * i + 1]);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       weights_at(group) + to_row * 128 +
                       (((2 * part + unit) ^ (to_row & 7)) << 4)),
                   "r"(own[0]), "r"(own[1]), "r"(own[2]), "r"(own[3])
                   : "memory");
    }
  }

  // All tiles of a piece: every other one is this warpgroup's to weigh.
  __device__ __forceinline__ void walk(const Piece& piece) {
    const u32 other = group ^ 1;
    float scores[kScores], highest[2], decay[2];
    int tile = piece.first + group;
    if (group == 0) {
      score(piece, tile, count, scores, highest);
      add(count, weigh(scores, highest, decay), decay);
      tile += 2;
    }
#pragma unroll 1
    for (; tile < piece.last; tile += 2) {
      const u32 number = count + (tile - piece.first);
      bool is_raised;
      if (group == 0) {
        follow(other);
        begin(number - 1);
        end(number - 1);
        score(piece, tile, number, scores, highest);
        is_raised = weigh(scores, highest, decay);
      } else {
        score(piece, tile, number, scores, highest);
        follow(other);
        begin(number - 1);
        is_raised = weigh(scores, highest, decay);  // while the last tile is being added
        end(number - 1);
      }
      add(number, is_raised, decay);
    }
    if (tile - 1 < piece.last) {
      const u32 number = count + (tile - 1 - piece.first);
      follow(other);
      begin(number);
      end(number);
    }
    count += piece.last - piece.first;
  }

  // Divide by the totals of both warpgroups; write the log-sum-exps and this one's dims.
  __device__ __forceinline__ void finish(const Piece& piece) {
    float* totals = reinterpret_cast<float*>(smem + kWeightOffset);  // [2, 64], all has been read
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.total[h] += __shfl_xor_sync(~0u, softmax.total[h], 1);
      softmax.total[h] += __shfl_xor_sync(~0u, softmax.total[h], 2);
    }
    named_barrier<256>(kComputing);
    if ((lane() & 3) == 0) {
      totals[64 * group + row()] = softmax.total[0];
      totals[64 * group + row() + 8] = softmax.total[1];
    }
    named_barrier<256>(kComputing);
    bf16_bits* to[2];
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = totals[row() + 8 * h] + totals[64 + row() + 8 * h];
      const int packed = piece.row + row() + 8 * h, token = packed / p.H, head = packed - token * p.H;
      const bool seen = total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
      const float lse = seen ? (softmax.peak[h] + log2_fast(total)) * kLn2 : -kInfinity;
      by[h] = seen ? 1.0f / total : 0.0f;
      const Place place(p, piece, packed, token, head);
      to[h] = place.out;
      if (place.lse && group == 0 && (lane() & 3) == 0) *place.lse = lse;
    }
    // Four lanes hold eight dims of a row, four groups of them; each takes a group whole.
#pragma unroll
    for (int i = 0; i < kValues; i += 16)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 v[4];
#pragma unroll
        for (int g = 0; g < 4; ++g)
          v[g] = pack_bf16(values[i + 4 * g + 2 * h] * by[h], values[i + 4 * g + 2 * h + 1] * by[h]);
        const bool high = lane() & 2, odd = lane() & 1;
        u32 a = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
        u32 b = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
        v[0] = high ? a : v[0];
        v[1] = high ? b : v[1];
        v[2] = high ? v[2] : a;
        v[3] = high ? v[3] : b;
        a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
        b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
        const uint4 eight = odd ? make_uint4(a, v[1], b, v[3]) : make_uint4(v[0], a, v[2], b);
        if (to[h])
          *reinterpret_cast<uint4*>(to[h] + group * kHalfDims + 2 * i + 8 * (lane() & 3)) = eight;
      }
  }

  // The rope of the queries, as the matrix instructions take it from registers.
  __device__ __forceinline__ void load_rope(const Piece& piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int packed = piece.row + row() + 8 * h, token = packed / p.H, head = packed - token * p.H;
      const bool live = token < piece.sequence.tree_size;
      const bf16_bits* from = p.q + piece.sequence.index * p.q_sequence + token * p.q_token +
                              head * p.q_head + kValueDim + 2 * (lane() & 3);
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          rope_queries[part][2 * k + h] =
              live ? *reinterpret_cast<const u32*>(from + 16 * part + 8 * k) : 0;
    }
  }

  __device__ __forceinline__ void run() {
    Piece piece = first_piece(smem);
    bool has_piece = uniform(work_of(smem).has_piece);
    int position = uniform(work_of(smem).run.position);
    while (has_piece) {
      named_barrier<256>(kComputing);  // the last queries and totals have been read
      const int half = 32 * static_cast<int>(group), first = half + ((threadIdx.x & 127) >> 3);
      load_queries<kQueryChunks, kChunkBytes, 16>(p, piece, shared + kQueryOffset, first, half + 32);
      load_rope(piece);
      named_barrier<256>(kComputing);
      softmax.reset();
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = 0.0f;
      walk(piece);
      finish(piece);
      FrontRun run = later_pieces(smem, position);
      has_piece = run.next(p, piece);
      position = run.position;
    }
#if MERGE_INSIDE
    merge_share<8, kComputing>(p, later_pieces(smem, position).line,
                               reinterpret_cast<RowParts*>(smem + kValueOffset), threadIdx.x - 128);
#endif
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    tree_attention(const __grid_constant__ WideParams w) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const Barriers barriers{shared + kBarrierOffset};
  grid_let_next_start();
  // The last warp, which waits for the share.
  if (threadIdx.x >= 384 - 32) {
    if (threadIdx.x == 384 - 32) {
      if (kHasBoxes) expect_map(w.rows);
      if (shared & 1023) __trap();  // the swizzle counts from addresses that are multiples of 1024
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage)
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          barrier_init(barriers.full(stage, part), kHasBoxes ? 1 : 128);
          barrier_init(barriers.empty(stage, part), 4);
        }
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        barrier_init(barriers.weights_full(group), 128);
        barrier_init(barriers.weights_empty(group), 4);
      }
    }
    __syncwarp();
    barriers_are_ready();
  }
  // What is said last lies at the entry, and that is where the first copies are: what is behind a jump of some
  // 10 KB has to be fetched while all wait. Said as an (in)equality of the role the two are exchanged.
  const int role = threadIdx.x >> 7;
  if (threadIdx.x > 127) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    named_barrier<384>(kReady);
    Group group{w.p, smem, shared, static_cast<u32>(uniform(role - 1)), barriers, 0, 0, 0};
    group.run();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    FrontRun run(w.p);
    Piece piece;
    const bool has_piece = run.next(w.p, piece);
    const Loader loader{w, w.p, shared, barriers};
    const int page = kHasBoxes && has_piece ? loader.page(piece, piece.first) : 0;
    if (threadIdx.x == 0) work_of(smem) = Work{run, piece, has_piece};
    named_barrier<384>(kReady);
    if (!has_piece) return;
    if (kHasBoxes) loader.run(run, piece, page);
    else load(w.p, shared, barriers, run, piece);
  }
}
