// Tree attention over fp8 latent rows, for sm_90a: rows of 656 bytes, as fp8_rows.py lays them out.
//
// As tree_attention_sm90.cu has it, S^T = K Q^T and O^T = V^T P^T with the packed rows in the N of the
// matrix instructions; the share, the line and the merge are the same. What differs is how a tile of 64
// cached rows comes to the matrix instructions, which multiply float16, in which a number in fp8 times a
// power of two is exact: rows lie in shared memory as they do in their pages, byte by byte, and the warps
// that multiply turn what they read into float16 in registers, which are the first operand of the
// instruction. Which number of a row is which row or column of that operand is free, as long as the other
// operand, or who reads the result, knows:
//
//   as keys    A thread reads 32 bytes of a row side by side where the instruction wants 2 of each 16, so
//              the dims of the queries are turned around to fit: dim 128 g + 32 c + 16 i + 4 s + 2 q + e
//              stands at 128 g + 64 i + 16 s + 8 q + 2 c + e, and rotated dim 16 c + 8 i + 4 t + 2 q + e at
//              32 i + 16 t + 8 q + 2 c + e.
//   as values  `ldmatrix` turns pairs of bytes, which are two dims of a key; with those of the next key they
//              are one word, whose bytes change places so that each half is one dim of both keys. So rows
//              r and r + 8 of the operand are dims 2 r and 2 r + 1, from r = 4 on the other way round, and
//              what is 8 dims apart comes together by two shuffles once all tiles are added.
//
// Rotated dims are bfloat16, and multiplied as such. Numbers have the range of float16: products are exact
// where a scale is a power of two from 2^-15 on, and queries from 2^-17 on; other scales and their products are
// rounded once each, in steps of 2^-24 below 2^-14, and so are smaller queries. NaN stays NaN. What is beyond
// 65504, a value, a scale or a query's number that meets values, is infinite: infinity times a zero is NaN, a
// weight of zero too, so that one such row of a tile makes NaN of rows that do not see it.
//
// Grid: one block an SM, each with its share of the line (tree_attention_line.cuh); launched cooperatively
// where MERGE_INSIDE, see there.
//
// Warpgroups (128 threads each):
//   0 loads     the block's share, for all; rows side by side, 16 bytes a thread and copy (cp.async), a
//               warp a quarter of a tile, zeros for rows that are not live; any page size, page ids asked
//               one tile ahead
//   1 scores    as in tree_attention_sm90.cu
//   2, 3 values 256 value dims each, O^T in registers; the merge
// The last three load the queries of the first piece, the scores those of later ones.
//
// Shared memory: queries ROWS x 576, in chunks of 64 dims whose rows of 128 bytes are swizzled by 128 |
// weights 2 x 64 x ROWS in 8 x 8 matrices | tiles kStages x 64 x 656 bytes | decays 2 x ROWS, peaks |
// barriers | the share. While an item that a block held whole ends, its rows lie in place of the queries
// on their way out; what is merged lies in place of the tiles.
// Barriers, each with a full and an empty side: a quarter of a tile of a stage, a stage of the weights, the
// queries (full: those of the first piece). A quarter is given back as soon as it has been read.
//
// While no score is farther than FAR from 0, weights are 2^score, which float16 has exponents enough for.
// From the first other tile of a piece on a row's shift is 2^6 below its running maximum, but no less than -FAR
// where the row has seen something before, and raised only when a score exceeds it by RISE (weights stay
// below 2^RISE, 2^14). Weights below 2^-14 are rounded in steps of 2^-24 where they meet values, and vanish
// from 2^-25 down, 2^-31 of the greatest one; totals have them in full.
//
// Source of the format: deepseek-ai/FlashMLA README; of the exchange of dims for wider loads: NVIDIA/cutlass
// examples/55_hopper_mixed_dtype_gemm (bytes as the register operand).
//
// Compile-time: ROWS, PAGE_SIZE, HYBRID, MERGE_INSIDE, ONE, SHARED_BYTES as in tree_attention_sm90.cu.
// Strides of cached rows count pairs of bytes.

#ifndef ROWS
#define ROWS 72
#endif
#ifndef ONE
#define ONE 0
#endif
#define BLOCK_ROWS ROWS
#define WEIGHT_ROOM 6

#include "mma.cuh"
#include "tree_attention_softmax.cuh"
#include "tree_attention_work.cuh"
#if MERGE_INSIDE
#include "tree_attention_merge_few.cuh"
#else
#include "tree_attention_merge.cuh"
#endif

constexpr int kRowBytes = 656, kScalePlace = 512, kRopePlace = 528;
constexpr int kUnits = kRowBytes / 16;         // copies of a row
constexpr int kDimGroups = kValueDim / 128;    // that share a scale
constexpr int kParts = 4;                      // of a tile: what a warp copies, and the keys of a product
constexpr int kPartKeys = kKeys / kParts;
constexpr int kPartBytes = kPartKeys * kRowBytes;
constexpr int kStageBytes = kParts * kPartBytes;
constexpr int kWeightStages = 2;
constexpr int kWeightBytes = kGroups * 1024;
constexpr float kFar = 14.0f;                  // FAR, in powers of two: the least normal number of float16
constexpr float kFarPower = 16384.0f;          // 2^FAR

// Registers of a thread. With 72 rows a warp of values needs all of its own.
constexpr int kValueRegisters = ROWS > 64 ? 192 : 176, kScoreRegisters = ROWS > 64 ? 104 : 112;
constexpr int kLoadRegisters = 512 - 2 * kValueRegisters - kScoreRegisters;

constexpr int kMostShared = 232448;            // of a block on sm_90
constexpr int kRestBytes = (3 * ROWS + 2) * 4 + (2 * kParts * 5 + 6) * 8 + kWorkBytes;  // at most
constexpr int kQueryOffset = 0;
constexpr int kWeightOffset = kQueryOffset + kChunks * kQueryChunkBytes;
constexpr int kTileOffset = kWeightOffset + kWeightStages * kWeightBytes;
constexpr int kStages = (kMostShared - kTileOffset - kRestBytes) / kStageBytes;
constexpr int kDecayOffset = kTileOffset + kStages * kStageBytes;
constexpr int kPeakOffset = kDecayOffset + kWeightStages * ROWS * 4;
constexpr int kFlagOffset = kPeakOffset + ROWS * 4;
constexpr int kBarrierOffset = kFlagOffset + kWeightStages * 4;
constexpr int kNumBarriers = 2 * kParts * kStages + 6;
constexpr int kWorkOffset = kBarrierOffset + kNumBarriers * 8;
constexpr int kSharedBytes = kWorkOffset + kWorkBytes;
static_assert(ROWS * kOutPitch <= kWeightOffset, "rows on their way out, in place of the queries");
static_assert(kStages >= 3 && kStages <= 5 && kBarrierOffset % 8 == 0, "stages of tiles");
static_assert(kSharedBytes <= kMostShared, "shared memory of a block");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

// ---- matrix instructions, 64 x ROWS x 16 ---------------------------------------------------------

// By the number of columns: the operands in the text where the first is four registers.
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
#define ROPE_CALL(a, b, keep) CALL("bf16", a, b, keep, ", 0")
#define VALUES_CALL(a, b, keep) CALL("f16", a, b, keep, ", 1")
#define MULTIPLY(call)                                                                     \
  asm volatile(JOIN(J, ROWS)(call)                                                         \
               : JOIN(D, ROWS)                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))

// d = a b + (keep ? d : 0), a in registers, b K-major.
__device__ __forceinline__ void multiply_bytes(float (&d)[kScores], const u32 (&a)[4], u64 b, int keep) {
  MULTIPLY(BYTES_CALL);
}

// The same of numbers in bfloat16.
__device__ __forceinline__ void multiply_rope(float (&d)[kScores], const u32 (&a)[4], u64 b, int keep) {
  MULTIPLY(ROPE_CALL);
}

// The same with b N-major.
__device__ __forceinline__ void multiply_values(float (&d)[kScores], const u32 (&a)[4], u64 b, int keep) {
  MULTIPLY(VALUES_CALL);
}

// A descriptor of an address that is the same in all lanes, in a form the compiler knows to be that.
__device__ __forceinline__ u64 uniform_descriptor(u32 address, u32 leading, u32 stride, u64 mode) {
  const u64 both = descriptor(address, leading, stride, mode);
  const u32 low = static_cast<u32>(uniform(static_cast<int>(static_cast<u32>(both))));
  return both >> 32 << 32 | low;
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

// ---- roles ---------------------------------------------------------------------------------------

struct Work {
  Run run;
  Piece piece;
  int has_piece, has_more;
  Parts parts[kMostSequences];
};
static_assert(sizeof(Work) <= kWorkBytes, "in shared memory");

__device__ __forceinline__ Work& work_of(unsigned char* smem) {
  return *reinterpret_cast<Work*>(smem + kWorkOffset);
}

// The stage of the next tile, and of how often all stages have been gone through the parity.
struct Turn {
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Barriers {
  u32 base;

  __device__ __forceinline__ u32 full(u32 stage, u32 part) const {
    return base + 8 * (kParts * stage + part);
  }
  __device__ __forceinline__ u32 empty(u32 stage, u32 part) const {
    return base + 8 * (kParts * (kStages + stage) + part);
  }
  __device__ __forceinline__ u32 rest(u32 i) const { return base + 8 * (2 * kParts * kStages + i); }
  __device__ __forceinline__ u32 weights_full(u32 count) const { return rest(count % kWeightStages); }
  __device__ __forceinline__ u32 weights_empty(u32 count) const { return rest(2 + count % kWeightStages); }
  __device__ __forceinline__ u32 query_empty() const { return rest(4); }
  __device__ __forceinline__ u32 query_full() const { return rest(5); }  // of the first piece

  // Arrivals at barrier number `i`, in the order above: a quarter is brought by a warp and given back by a
  // lane of each that reads it, one warp of scores and eight of values.
  __device__ __forceinline__ static u32 arrivals(int i) {
    if (i < kParts * kStages) return 32;
    if (i < 2 * kParts * kStages) return 9;
    i -= 2 * kParts * kStages;
    return i < 2 ? 128 : i < 4 ? 8 : i == 4 ? 256 : 384;
  }
};

// The row of a tile that a thread of the first warpgroup finds: both halves of a warp those that it copies.
__device__ __forceinline__ int found_key() {
  return kPartKeys * ((threadIdx.x & 127) >> 5) + (threadIdx.x & 15);
}

// The tiles' places are nobody's any more: said by those that copy, heard before the merge.
__device__ __forceinline__ void all_copied() {
#if MERGE_INSIDE
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("barrier.cta.arrive 4, 384;" ::: "memory");
#endif
}

__device__ __forceinline__ void begin_work() {
  asm volatile("barrier.cta.sync 7, 512;" ::: "memory");
}

// Start to copy 16 rows, of which lane l % 16 knows where row l % 16 is, all live or those whose bit is set: 32
// units of 16 bytes of each, then what is left of all.
template <bool kAll>
__device__ __forceinline__ void copy_rows(u64 own_row, u32 live, u32 to) {
  constexpr int kLeft = kUnits - 32;
  static_assert(kLeft == 9 && kLeft * kPartKeys % 32 == 16, "rows of 656 bytes");
  const int lane = threadIdx.x & 31;
  const auto copy = [&](int row, int unit) {
    const void* from = reinterpret_cast<const void*>(__shfl_sync(~0u, own_row, row) + unit * 16);
    const u32 here = to + row * kRowBytes + unit * 16;
    if (row >= kPartKeys) return;
    if (kAll)
      copy_16_always(here, from);
    else
      copy_16(here, from, live >> row & 1 ? 16u : 0u);
  };
#pragma unroll kAll ? 8 : 1
  for (int row = 0; row < kPartKeys; ++row) copy(row, lane);
#pragma unroll 1
  for (int at = lane; at < kLeft * kPartKeys + 16; at += 32) {
    const int row = at * 57 >> 9;  // at / 9
    copy(row, 32 + at - kLeft * row);
  }
}

// The same of rows at `own`, null where there is none, for which zeros come.
__device__ __forceinline__ void copy_part(const Params& p, const void* own, u32 to) {
  const u32 live = __ballot_sync(~0u, own != nullptr);
  const u64 own_row = reinterpret_cast<u64>(own ? own : p.q);
  if (live == ~0u)
    copy_rows<true>(own_row, live, to);
  else
    copy_rows<false>(own_row, live, to);
}

// Find the share, for all; load all tiles, a quarter of each a warp.
__device__ __forceinline__ void load(const Params& p, unsigned char* smem, u32 shared,
                                     const Barriers& barriers) {
  const int thread = threadIdx.x & 127, warp = thread >> 5;
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
#if ONE
  if (thread == 0) work_of(smem).parts[0] = only_parts(piece, share);
#endif
  asm volatile("barrier.cta.sync 6, 160;" ::: "memory");  // the barriers are there
  asm volatile("barrier.cta.arrive 7, 512;" ::: "memory");
  if (!has_piece) return all_copied();
  const u32 tiles = shared + kTileOffset + warp * kPartBytes;
  u32 count = 0;
  Turn turn;
  while (true) {
    prefetch_pages(p, piece);
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++count, turn.next()) {
      const void* own = Row(piece.sequence, tile, found_key()).address(p, piece.sequence, page);
      if (tile + 1 < piece.last)
        page = Row(piece.sequence, tile + 1, found_key()).page(p, piece.sequence);
      barrier_wait(barriers.empty(turn.stage, warp), turn.parity ^ 1);
      copy_part(p, own, tiles + turn.stage * kStageBytes);
      barrier_arrive_after_copies(barriers.full(turn.stage, warp));
    }
    if (!next_piece(p, work_of(smem), count, piece)) return all_copied();
    page = Row(piece.sequence, piece.first, found_key()).page(p, piece.sequence);
  }
}

// Rows `first`, `first` + `kStep`, .. of a piece's queries, dims turned around, eight lanes a row.
template <int kStep>
__device__ __forceinline__ void load_queries(const Params& p, const Piece& piece, u32 queries, int first) {
  const int unit = threadIdx.x & 7;
  const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + unit * 8;
#pragma unroll 1
  for (int row = first; row < ROWS; row += kStep) {
    const int token = quotient(piece.row + row, p.H), head = piece.row + row - token * p.H;
    const bool live = token < piece.sequence.tree_size;
    const bf16_bits* from = base + token * p.q_token + head * p.q_head;
    uint4 eight[kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      eight[chunk] = live ? *reinterpret_cast<const uint4*>(from + chunk * 64) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool is_rope = chunk == kValueChunks;
      const u32 twos[4] = {eight[chunk].x, eight[chunk].y, eight[chunk].z, eight[chunk].w};
      const int column = is_rope ? unit >> 1 : 2 * (chunk & 1) + (unit >> 2);
      const int to_chunk = is_rope ? chunk : (chunk & ~1) + ((unit >> 1) & 1);
      const u32 to = queries + to_chunk * kQueryChunkBytes + row * 128 + 4 * column;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_4(to + (((4 * (unit & 1) + i) ^ (row & 7)) << 4), is_rope ? twos[i] : as_f16(twos[i]));
    }
  }
  fence_async_proxy();
}

// Those of the first piece, by all warps that do not copy tiles.
__device__ __forceinline__ void first_queries(const Params& p, const Piece& piece, u32 shared,
                                              const Barriers& barriers) {
  load_queries<48>(p, piece, shared + kQueryOffset, (static_cast<int>(threadIdx.x) - 128) >> 3);
  barrier_arrive(barriers.query_full());
}

// May a row not see all of a tile?
__device__ __forceinline__ bool is_cut(const Piece& piece, int tile) {
  return (tile + 1) * kKeys > piece.sequence.context_len;  // the tiles of the tree too
}

// Set what a row may not see to -inf; `masks` [2, ROWS] is scratch, words of 32 keys. Element
// 4 g + 2 h + e: key 16 warp + lane / 4 + 8 h, row 8 g + 2 (lane % 4) + e of the block.
__device__ __forceinline__ void hide(const Params& p, const Piece& piece, int tile, u32* masks,
                                     float (&scores)[kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  if (thread < ROWS) {
    const u64 visible = visible_keys(p, piece, tile, thread);
    masks[thread] = static_cast<u32>(visible);
    masks[ROWS + thread] = static_cast<u32>(visible >> 32);
  }
  warpgroup_barrier();
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

// As long as no score of the block's rows is farther than FAR from 0, weights are 2^score. From the first
// other tile on rows have peaks. A thread keeps the totals of its own keys.
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

  // Peaks from here on: -FAR of rows that have seen something, the least that it may have been, so that
  // weights keep the bits that a row's greatest score leaves them.
  __device__ __forceinline__ void begin_peaks() {
    const int thread = threadIdx.x & 127, lane = thread & 31;
    is_plain = false;
    if (thread < ROWS) peaks[thread] = -kInfinity;
    warpgroup_barrier();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (total[c] != 0.0f) peaks[8 * (c / 2) + 2 * (lane & 3) + c % 2] = -kFar;
      total[c] *= kFarPower;
    }
    warpgroup_barrier();
  }

  __device__ __forceinline__ static void weigh_plainly(float (&scores)[kScores], float scale) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = exp2_fast(scores[i] * scale);
  }
};

// Where the rows of a block go, null where there is none; scratch in place of the weights.
__device__ __forceinline__ bf16_bits** destinations(unsigned char* smem, u32 weight_count) {
  return reinterpret_cast<bf16_bits**>(smem + kWeightOffset +
                                       weight_count % kWeightStages * kWeightBytes);
}

// What O^T is multiplied by before the weights are added.
__device__ __forceinline__ float* decays_of(unsigned char* smem, u32 weight_count) {
  return reinterpret_cast<float*>(smem + kDecayOffset) + weight_count % kWeightStages * ROWS;
}

__device__ __forceinline__ volatile int& flag_of(unsigned char* smem, u32 weight_count) {
  return reinterpret_cast<volatile int*>(smem + kFlagOffset)[weight_count % kWeightStages];
}

// Totals of all threads through `exchange` [32, ROWS]. Of a part, each row's peak and total; of an item
// that is whole the log-sum-exp of each row, what O^T is divided by (as a decay) and where it goes; the
// last two once `free` says that their places are.
__device__ __forceinline__ void finish(const Params& p, const Piece& piece, const Softmax& softmax,
                                       float* exchange, float* decays, bf16_bits** to, u32 free,
                                       u32 parity) {
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
    barrier_wait(free, parity);  // no phase of the weights' barrier may pass unseen
    return;
  }
  const int packed = piece.row + thread, token = packed / p.H, head = packed - token * p.H;
  const bool seen = total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
  const float lse = seen ? (peak + log2_fast(total)) * kLn2 : -kInfinity;
  const Place place(p, piece, packed, token, head);
  if (place.lse) *place.lse = lse;
  barrier_wait(free, parity);
  decays[thread] = seen ? inverse(total) : 0.0f;
  to[thread] = place.out;
}

// The product of a tile and the queries: rotated dims, which are no bytes, then group by group of the others.
__device__ __forceinline__ void score_tile(u32 shared, const Barriers& barriers, const Turn& turn,
                                           float (&scores)[kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  constexpr u32 k8 = 8 * kRowBytes;
  u32 from = shared + kTileOffset + turn.stage * kStageBytes + warp * kPartBytes +
             (lane >> 2) * kRowBytes + (lane & 3) * 32;
  u64 queries = uniform_descriptor(shared + kQueryOffset, 16, 1024, 1);
  const u64 rope_queries = queries + kValueChunks * (kQueryChunkBytes >> 4);
  u32 keys[4][4];
  barrier_wait(barriers.full(turn.stage, warp), turn.parity);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 row = shared_16(from + kRopePlace + 16 * i), row_8 = shared_16(from + k8 + kRopePlace + 16 * i);
    const u32 words[4] = {row.x, row.y, row.z, row.w}, words_8[4] = {row_8.x, row_8.y, row_8.z, row_8.w};
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        keys[2 * i + t][2 * q] = words[2 * t + q];
        keys[2 * i + t][2 * q + 1] = words_8[2 * t + q];
      }
    matrix_begin();
#pragma unroll
    for (int t = 0; t < 2; ++t)
      multiply_rope(scores, keys[2 * i + t], rope_queries + (2 * i + t) * 2, i + t > 0);
    matrix_commit();
  }
  uint4 row = shared_16(from), row_8 = shared_16(from + k8);
  matrix_wait<1>();
#pragma unroll 1
  for (int group = 0; group < kDimGroups; ++group) {
    const u32 scales = from - (opaque(lane) & 3) * 32 - 124 * group + kScalePlace;
    const float one = shared_float(scales), one_8 = shared_float(scales + k8);
    const u32 scale = pack_f16(one, one), scale_8 = pack_f16(one_8, one_8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < 4; step += 2) {
        const u32 words[2] = {step ? row.z : row.x, step ? row.w : row.y};
        const u32 words_8[2] = {step ? row_8.z : row_8.x, step ? row_8.w : row_8.y};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          decode_four(words[s], scale, keys[step + s][0], keys[step + s][2]);
          decode_four(words_8[s], scale_8, keys[step + s][1], keys[step + s][3]);
        }
        if (step) {  // what comes next, behind the last group what nobody wants
          const u32 next = i ? from + 128 : from + 16;
          row = shared_16(next), row_8 = shared_16(next + k8);
        }
        matrix_begin();
#pragma unroll
        for (int s = step; s < step + 2; ++s)
          multiply_bytes(scores, keys[s], queries + i * (kQueryChunkBytes >> 4) + s * 2, 1);
        matrix_commit();
        matrix_wait<1>();  // the last but these have left their registers
      }
    }
    from += 128;
    queries += 2 * (kQueryChunkBytes >> 4);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(barriers.empty(turn.stage, warp));
  matrix_wait<0>();
}

// A tile of which a row may not see all, or whose scores are far from 0, or that follows such one; scratch
// lies in place of the weights. True where its weights are found, false where all is plain.
__device__ __forceinline__ bool weigh_with_care(const Params& p, const Piece& piece, int tile,
                                                void* scratch, Softmax& softmax,
                                                float (&scores)[kScores], bool& is_raised) {
  bool begins = false;
  if (softmax.is_plain && any_in_warpgroup(Softmax::is_far(scores, p.scale))) {
    softmax.begin_peaks();
    begins = true;
  }
  if (is_cut(piece, tile)) {
    hide(p, piece, tile, static_cast<u32*>(scratch), scores);
    warpgroup_barrier();
  }
  if (softmax.is_plain) return false;
  is_raised = any_in_warpgroup(softmax.rises(scores, p.scale)) || begins;
  if (is_raised) softmax.raise(scores, p.scale, static_cast<float*>(scratch), softmax.total);
  if (begins) {  // so far O^T is as far above its peak as the totals were
    warpgroup_barrier();
    if ((threadIdx.x & 127) < ROWS) softmax.decays[threadIdx.x & 127] *= kFarPower;
  }
  softmax.weigh(scores, p.scale);
  return true;
}

__device__ __forceinline__ void score(const Params& p, unsigned char* smem, u32 shared,
                                      const Barriers& barriers) {
  u32 tile_count = 0, piece_count = 0, weight_count = 0;
  Turn turn;
  Softmax softmax;
  softmax.peaks = reinterpret_cast<float*>(smem + kPeakOffset);
  float scores[kScores];
  begin_work();
  if (!work_of(smem).has_piece) return;
  Piece piece = first_piece(work_of(smem));
  first_queries(p, piece, shared, barriers);
  barrier_wait(barriers.query_full(), 0);
  while (true) {
    softmax.reset();
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count, turn.next()) {
      score_tile(shared, barriers, turn, scores);
      const bool needs_care = any_in_warpgroup(!softmax.is_plain | is_cut(piece, tile) |
                                               Softmax::is_far(scores, p.scale));
      const u32 place = kWeightOffset + weight_count % kWeightStages * kWeightBytes;
      barrier_wait(barriers.weights_empty(weight_count), (weight_count / kWeightStages & 1) ^ 1);
      softmax.decays = decays_of(smem, weight_count);
      bool is_raised = false;
      if (!needs_care || !weigh_with_care(p, piece, tile, smem + place, softmax, scores, is_raised))
        Softmax::weigh_plainly(scores, p.scale);
      store_weights<pack_f16>(shared + place, scores);
      if ((threadIdx.x & 127) == 0) flag_of(smem, weight_count) = is_raised && tile > piece.first;
      fence_async_proxy();
      barrier_arrive(barriers.weights_full(weight_count));
      add_weights(scores, softmax.total);
    }
    finish(p, piece, softmax, reinterpret_cast<float*>(smem + kQueryOffset), decays_of(smem, weight_count),
           destinations(smem, weight_count), barriers.weights_empty(weight_count),
           (weight_count / kWeightStages & 1) ^ 1);
    barrier_arrive(barriers.weights_full(weight_count));
    ++weight_count;
    if (!next_piece(p, work_of(smem), tile_count, piece)) return;
    barrier_wait(barriers.query_empty(), piece_count & 1);
    ++piece_count;
    load_queries<16>(p, piece, shared + kQueryOffset, (threadIdx.x & 127) >> 3);
    warpgroup_barrier();
  }
}

// Numbers of rows r and r + 8 of a block of O^T, lane / 4 = r, are of dims 2 r and 2 r + 1, from r = 4 on the
// other way round; make them those of dims r and r + 8.
struct Dims {
  int first, second;  // lanes that have either row's number for this one
  bool is_turned;     // and which of them is which

  __device__ __forceinline__ Dims() {
    const int lane = threadIdx.x & 31, row = lane >> 2;
    is_turned = row & 1;
    first = (row >> 1) * 4 + (lane & 3) + (is_turned ? 16 : 0);
    second = first ^ 16;
  }

  template <class Number>
  __device__ __forceinline__ void put_right(Number& row, Number& row_8) const {
    const Number one = __shfl_sync(~0u, row, first), other = __shfl_sync(~0u, row_8, second);
    row = is_turned ? other : one;
    row_8 = is_turned ? one : other;
  }
};

#if MERGE_INSIDE

// Write the values, not divided by the totals, as the vectors of a partial result: of two rows
// (group, lane % 4) and 2 blocks the 32 of each half of the value dims.
__device__ __forceinline__ void store_part(const Params& p, int slot, int half,
                                           const float (&values)[4][kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const Dims dims;
  uint4* to = reinterpret_cast<uint4*>(p.partial_out) + static_cast<i64>(slot) * kItemVectors +
              (lane & 3) * kPairVectors + 32 * half + 8 * warp + (lane >> 2);
#pragma unroll
  for (int two = 0; two < 2; ++two)
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint4 vector = part_vector(values[2 * two] + 4 * group, values[2 * two + 1] + 4 * group);
      dims.put_right(vector.x, vector.y);
      dims.put_right(vector.z, vector.w);
      to[4 * group * kPairVectors + 64 * two] = vector;
    }
}

// Named barrier 5; in place of the tiles.
using Merging = FewMerge<256, 5, kStages * kStageBytes>;

__device__ __forceinline__ Merging merging(const Params& p, unsigned char* smem) {
  Work& work = work_of(smem);
  return {p, !ONE && work.has_more ? &work.run.line : nullptr, work.parts,
          *reinterpret_cast<Merging::Scratch*>(smem + kTileOffset),
          static_cast<int>(threadIdx.x) - 256};
}

#endif

// Bytes of 16 keys of this warp's dims of two blocks of 64, pairs of dims of two keys turned, and the keys'
// scales.
struct Bytes {
  u32 words[2][2];  // of each block those of keys 2 (lane % 4) and the next, and of the keys 8 later
  u32 scales[2];

  __device__ __forceinline__ void load(u32 from, u32 from_scales) {
    u32 turned[4];
    load_turned(turned, from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i][0] = turned[2 * i];
      words[i][1] = turned[2 * i + 1];
      scales[i] = pack_f16(shared_float(from_scales + 8 * i * kRowBytes),
                           shared_float(from_scales + (8 * i + 1) * kRowBytes));
    }
  }
};

// Add a tile's values, 16 keys after the other: the bytes of two blocks of dims are turned while the last two
// are multiplied.
__device__ __forceinline__ void add_tile(u32 shared, const Barriers& barriers, const Turn& turn, u64 weights,
                                         int half, float (&values)[4][kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 order = lane < 16 ? 0x3120 : 0x2031;  // of the bytes of two keys' two dims
  const u32 tile = shared + kTileOffset + turn.stage * kStageBytes;
  u32 from = tile + (lane & 15) * kRowBytes + 256 * half + 64 * (lane >> 4) + 16 * warp;
  u32 scales = tile + 2 * (lane & 3) * kRowBytes + kScalePlace + 8 * half;
  u32 dims[2][2][4];
  Bytes bytes;
  bytes.load(from, scales);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int two = 0; two < 2; ++two) {
#pragma unroll
      for (int block = 0; block < 2; ++block)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          decode_four(__byte_perm(bytes.words[block][i], 0, order), bytes.scales[i],
                      dims[two][block][2 * i], dims[two][block][2 * i + 1]);
      matrix_begin();
#pragma unroll
      for (int block = 0; block < 2; ++block)
        multiply_values(values[2 * two + block], dims[two][block], weights, 1);
      matrix_commit();
      matrix_wait<1>();  // the last but these have left their registers
      if (two == 0) {
        bytes.load(from + 128, scales + 4);
      } else if (part + 1 < kParts) {
        from += kPartBytes;
        scales += kPartBytes;
        bytes.load(from, scales);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.empty(turn.stage, part));
    weights += 256 >> 4;
  }
  matrix_wait<0>();
}

__device__ __forceinline__ void add_values(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, int half) {
  const int lane = threadIdx.x & 31;
  u32 tile_count = 0, weight_count = 0;
  Turn turn;
  float values[4][kScores];
  begin_work();
  Piece piece = first_piece(work_of(smem));
  const bool has_piece = uniform(work_of(smem).has_piece);
  if (has_piece) first_queries(p, piece, shared, barriers);
  if (has_piece) do {
#if MERGE_INSIDE
    const int slot = !ONE && piece.is_whole ? -1 : piece.slot;
#else
    constexpr int slot = -1;  // of a part that is merged inside
#endif
#pragma unroll
    for (int i = 0; i < 4 * kScores; ++i) values[i / kScores][i % kScores] = 0.0f;
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count, turn.next()) {
      barrier_wait(barriers.weights_full(weight_count), weight_count / kWeightStages & 1);
      fence_async_proxy();
      if (flag_of(smem, weight_count)) scale_values(decays_of(smem, weight_count), values);
      const u64 weights = uniform_descriptor(
          shared + kWeightOffset + weight_count % kWeightStages * kWeightBytes, 128, 1024, 0);
      add_tile(shared, barriers, turn, weights, half, values);
      if (lane == 0) barrier_arrive(barriers.weights_empty(weight_count));
    }
#if MERGE_INSIDE
    if (slot >= 0) store_part(p, slot, half, values);
#endif
    barrier_wait(barriers.weights_full(weight_count), weight_count / kWeightStages & 1);
    if (slot < 0) {
      scale_values(decays_of(smem, weight_count), values);
      const Dims dims;
#pragma unroll
      for (int block = 0; block < 4; ++block)
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          if (i % 4 < 2) dims.put_right(values[block][i], values[block][i + 2]);
      store_values(smem + kQueryOffset, shared + kQueryOffset, destinations(smem, weight_count), half,
                   values);
    }
    barrier_arrive(barriers.query_empty());
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.weights_empty(weight_count));
    ++weight_count;
  } while (next_piece(p, work_of(smem), tile_count, piece));
#if MERGE_INSIDE
  asm volatile("barrier.cta.sync 4, 384;" ::: "memory");
  merging(p, smem).run();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    tree_attention_fp8(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const Barriers barriers{shared + kBarrierOffset};
  grid_let_next_start();
  if (threadIdx.x >= 512 - 32) {
    if (shared & 1023) __trap();  // the swizzle counts from addresses that are multiples of 1024
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < kNumBarriers; i += 32)
      barrier_init(barriers.base + 8 * i, Barriers::arrivals(i));
    barriers_are_ready();
    asm volatile("barrier.cta.arrive 6, 160;" ::: "memory");
  }
  const int role = threadIdx.x >> 7;
  // The compiler lays the last branch first, and that is where the first copies are.
  if (role >= 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kValueRegisters));
    add_values(p, smem, shared, barriers, role - 2);
  } else if (role == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kScoreRegisters));
    score(p, smem, shared, barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoadRegisters));
    load(p, smem, shared, barriers);
  }
}
