// The merge of few rows' partial results, at the end of tree_attention_sm90.cu; see
// tree_attention_merge_inside.cuh for how all blocks of the grid wait for each other and how the parts lie.
#pragma once

#include "barriers.cuh"
#include "tree_attention_merge_inside.cuh"
#include "tree_attention_share.cuh"

// `kThreads` of a block, whose named barrier is `kBarrier`; `kRoom` bytes of shared memory. Few
// instructions: each is fetched once, which takes longer than to execute it.
//
// The (peak, total) of two rows are one vector more, of four floats. Where all peaks are 0, the parts are
// added as they are: the sum of |peak| tells, and then they are weighed.
template <int kThreads, int kBarrier, int kRoom>
struct FewMerge {
  static constexpr int kPairs = 3;  // of rows, that a run of vectors touches
  static constexpr int kTurnsAhead = 4;  // copies of a thread that are under way
  static_assert(kThreads == 2 * kPairVectors, "a warp for each number of a vector; rows of a run");
  struct Scratch {
    bf16_bits* to[2 * kPairs];  // a row that the slice touches, null where there is none
    float* lse_to[2 * kPairs];  // null where another slice begins it
    int is_live[2 * kPairs];
    int slots[kMostParts];
    float2 totals[2 * kPairs];  // and peaks
    float2 weights[kPairs * kMostParts];
    float sums[8 * kThreads];
    uint4 vectors[1];
  };
  static constexpr int kMostVectors = (kRoom - static_cast<int>(sizeof(Scratch))) / 16;
  static_assert(kMostVectors >= (2 * kPairs + 1) * kMostParts, "vectors of each part");

  const Params& p;
  const Line* cut;         // the line, or null where every run has a block for itself
  const Parts* own_parts;  // of each sequence then
  Scratch& scratch;
  int thread;

  __device__ __forceinline__ static void barrier() {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
  }

  // A run of vectors of an item.
  struct Slice {
    int n, tree_size, row;                // row: the first packed one that it touches
    int inside, columns, pairs, parts;    // vectors [inside, inside + columns) of each part
    int wide, groups;                     // columns and those of peaks and totals; groups of parts
  };

  // Where row `row` of the slice goes, by one thread.
  __device__ __forceinline__ void find_place(const Slice& slice, int row) const {
    const int packed = slice.row + row, token = quotient(packed, p.H), head = packed - token * p.H;
    const i64 n = slice.n;
    const bool is_there = token < p.T, begins = row > 1 || slice.inside % kPairVectors == 0;
    scratch.to[row] =
        is_there ? p.out + n * p.out_sequence + token * p.out_token + head * p.out_head : nullptr;
    scratch.lse_to[row] = is_there && begins
                              ? p.lse + n * p.lse_sequence + token * p.lse_token + head * p.lse_head
                              : nullptr;
    scratch.is_live[row] = token < slice.tree_size;
  }

  // Of the vectors a thread writes numbers `number` and the next but one, which are of one row and 8 dims
  // apart, of columns `column`, + 64, ..
  __device__ __forceinline__ int number() const { return (thread >> 4 & 4) + (thread >> 5 & 1); }
  __device__ __forceinline__ int column() const { return (thread >> 2 & 32) + (thread & 31); }

  // Both of column `at`, their row's total and peak.
  __device__ __forceinline__ void write(const Slice& slice, int at, float first, float second,
                                        float total, float peak) const {
    const int vector = slice.inside + at, row = 2 * pair_of(slice, at) + number() % 2;
    bf16_bits* const to = scratch.to[row];
    if (!to) return;
    const bool seen = total != 0.0f && scratch.is_live[row];  // NaN is seen
    const float by = inverse(total);
    const u32 both = seen ? pack_bf16(first * by, second * by) : 0;
    const int dim = dim_of(vector, number());
    to[dim] = static_cast<bf16_bits>(both);
    to[dim + 8] = static_cast<bf16_bits>(both >> 16);
    if (vector % kPairVectors == 0 && number() < 2)
      *scratch.lse_to[row] = seen ? (peak + log2_fast(total)) * kLn2 : -kInfinity;
  }

  // The pair of rows, of those that the slice touches, of a column.
  __device__ __forceinline__ static int pair_of(const Slice& slice, int at) {
    return (slice.inside % kPairVectors + at) / kPairVectors;
  }

  // Peaks differ: weigh the parts.
  __device__ __forceinline__ void add_weighed(const Slice& slice, int group, int column) const {
    const int lane = thread & 31, warp = thread >> 5;
    if (warp < 2 * slice.pairs) {
      const float* stats = reinterpret_cast<const float*>(scratch.vectors + slice.columns + warp / 2) +
                           2 * (warp % 2);
      float* weights = reinterpret_cast<float*>(scratch.weights + warp / 2 * slice.parts) + warp % 2;
      float peak = -kInfinity, total = 0.0f;
#pragma unroll 1
      for (int part = lane; part < slice.parts; part += 32)
        if (stats[4 * slice.wide * part + 1] != 0.0f) peak = fmaxf(peak, stats[4 * slice.wide * part]);
#pragma unroll 1
      for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
      const float shift = peak == -kInfinity ? 0.0f : peak;
#pragma unroll 1
      for (int part = lane; part < slice.parts; part += 32) {
        const float own = stats[4 * slice.wide * part + 1];
        const float weight = own != 0.0f ? exp2_fast(stats[4 * slice.wide * part] - shift) : 0.0f;
        weights[2 * part] = weight;
        total += weight * own;
      }
#pragma unroll 1
      for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      if (lane == 0) scratch.totals[warp] = make_float2(total, peak);
    }
    barrier();
    if (group < slice.groups && column < slice.columns) {
      float sum[8] = {};
      const float2* weights = scratch.weights + pair_of(slice, column) * slice.parts;
#pragma unroll 1
      for (int part = group; part < slice.parts; part += slice.groups) {
        const uint4 eight = scratch.vectors[part * slice.wide + column];
        const float2 weight = weights[part];
        const u32 twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[2 * i] += weight.x * __uint_as_float(twos[i] << 16);
          sum[2 * i + 1] += weight.y * __uint_as_float(twos[i] & 0xFFFF0000u);
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        scratch.sums[(i * slice.groups + group) * slice.wide + column] = sum[i];
    }
    barrier();
#pragma unroll 1
    for (int at = this->column(); at < slice.columns; at += 64) {
      float first = 0.0f, second = 0.0f;
      const int between = slice.groups * slice.wide;
      const float* sums = scratch.sums + number() * between + at;
#pragma unroll 1
      for (int each = 0; each < between; each += slice.wide) {
        first += sums[each];
        second += sums[2 * between + each];
      }
      const float2 total = scratch.totals[2 * pair_of(slice, at) + number() % 2];
      write(slice, at, first, second, total.x, total.y);
    }
    barrier();
  }

  // All that this block has written is visible among the threads. A block without a share leaves once
  // it has said that it is done.
  __device__ __forceinline__ void run() const {
    const int blocks = (p.T * p.H + BLOCK_ROWS - 1) / BLOCK_ROWS, all = p.N * blocks * kItemVectors;
    const int share = quotient(all + gridDim.x - 1, gridDim.x);
    const int end = min(static_cast<int>(blockIdx.x + 1) * share, all);
    const int lane = thread & 31, warp = thread >> 5;
    GridBarrier grid;
    if (thread == 0) grid.arrive();
    bool waits = true;
    Slice slice;
#pragma unroll 1
    for (int first = blockIdx.x * share; first < end; first += slice.columns) {
      const int item = first / kItemVectors;
      slice.inside = first - item * kItemVectors;
      slice.n = blocks == 1 ? item : quotient(item, blocks);
      const int block = item - slice.n * blocks;
      int first_slot = 0, step = 0;  // slots of the parts, where the line is not cut
      slice.parts = 0;
      if (__builtin_expect(cut != nullptr, 0)) {
        const Line line = *cut;
        const Sequence sequence = line.find(p, -1, slice.n);
        slice.tree_size = sequence.tree_size;
        if (block < sequence.blocks)
          slice.parts = fill_slots(line, sequence, block, thread, scratch.slots);
      } else {
        const Parts own = own_parts[slice.n];
        slice.tree_size = own.tree_size;
        step = Line::blocks_of(p, own.tree_size);
        first_slot = own.first + block;
        if (block < step) slice.parts = own.chunks;
      }
      slice.columns = min(min(end - first, kItemVectors - slice.inside), kThreads - kPairs);
      if (slice.parts > 1)
        slice.columns = min(slice.columns, quotient(kMostVectors, slice.parts) - kPairs);
      const int first_pair = slice.inside / kPairVectors;
      slice.row = block * BLOCK_ROWS + 2 * first_pair;
      slice.pairs = pair_of(slice, slice.columns - 1) + 1;
      slice.wide = slice.columns + slice.pairs;
      slice.groups = quotient(kThreads, slice.wide);
      const int group = quotient(thread, slice.wide), column = thread - group * slice.wide;
      const bool is_stat = column >= slice.columns;
      const unsigned char* from =
          is_stat ? reinterpret_cast<const unsigned char*>(p.partial_lse) +
                        16 * (first_pair + column - slice.columns)
                  : reinterpret_cast<const unsigned char*>(p.partial_out) + 16 * (slice.inside + column);
      const int slot_bytes = is_stat ? BLOCK_ROWS * 8 : kItemVectors * 16;
      const uint4* own = scratch.vectors + column;
      if (lane == 0 && warp < 2 * slice.pairs) find_place(slice, warp);
      if (waits && thread == 0) grid.wait();
      waits = false;
      barrier();
      if (!ONE && slice.parts == 1) continue;  // one block held it whole
      // A thread adds what it has copied some turns before.
      if (group < slice.groups) {
        // Of a peak and a total as floats the number and its absolute value.
        const u32 shift = is_stat ? 0 : 16, mask = is_stat ? 0x7FFFFFFFu : 0xFFFF0000u;
        float sum[8] = {};
        int asked = group, added = group;
#pragma unroll 1
        for (int turn = 0; added < slice.parts; ++turn) {
          if (asked < slice.parts)
            copy_16_always(shared_address(own + asked * slice.wide),
                           from + static_cast<i64>(cut ? scratch.slots[asked]
                                                       : first_slot + asked * step) * slot_bytes);
          copies_commit();
          asked += slice.groups;
          if (turn < kTurnsAhead) continue;
          copies_wait<kTurnsAhead>();
          const uint4 eight = own[added * slice.wide];
          added += slice.groups;
          const u32 twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[2 * i] += __uint_as_float(twos[i] << shift);
            sum[2 * i + 1] += __uint_as_float(twos[i] & mask);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          scratch.sums[(i * slice.groups + group) * slice.wide + column] = sum[i];
      }
      barrier();
      bool is_far = false;
#pragma unroll 1
      for (int at = this->column(); at < slice.columns; at += 64) {
        const int between = slice.groups * slice.wide;  // numbers
        const float* sums = scratch.sums + number() * between + at;
        const float* stats = scratch.sums + (number() % 2 * 4 + 1) * between + slice.columns +
                             pair_of(slice, at);
        float first = 0.0f, second = 0.0f, total = 0.0f, far = 0.0f;
#pragma unroll 2
        for (int each = 0; each < between; each += slice.wide) {
          first += sums[each];
          second += sums[2 * between + each];
          far += stats[each];
          total += stats[between + each];
        }
        is_far |= far != 0.0f;
        write(slice, at, first, second, total, 0.0f);
      }
      if (__builtin_expect(any_at_barrier<kBarrier, kThreads>(is_far), 0)) add_weighed(slice, group, column);
    }
  }
};
