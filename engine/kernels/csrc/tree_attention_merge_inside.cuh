// The merge of partial results at the end of the kernel that writes them; see tree_attention_line.cuh.
//
// All blocks of the grid wait for each other, then each merges its share: a run of vectors, which lie
// in every partial result at the same place. A vector is 16 bytes, 8 values of two rows; the 128 of
// two rows lie together. The values are not divided by their total: (peak, total) of a row lie beside
// them, the peak in powers of two.
//
// The launch is cooperative, so that all blocks are there and none waits for one that cannot start,
// whatever other streams do. What they count on is the word that the driver gives each such launch for
// this, also one in a graph: nothing has to be set before a launch, and nothing is left behind but its
// highest bit turned.
#pragma once

#include "tree_attention_line.cuh"

constexpr int kMostParts = 512;  // of an item: twice the grid
constexpr int kPairVectors = kValueDim / 4;
constexpr int kItemVectors = BLOCK_ROWS / 2 * kPairVectors;

// What one thread a block says and hears of the others. Each adds 1, the first block what is missing to
// 2^31, so that the word's highest bit turns when the last one arrives.
// Source: cooperative_groups/details/driver_abi.h and sync.h (CUDA 13.0).
struct GridBarrier {
  u32* word;
  u32 before;

  __device__ __forceinline__ void arrive() {
    u32 high, low;
    asm volatile("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm volatile("mov.u32 %0, %%envreg2;" : "=r"(low));
    word = reinterpret_cast<u32*>((static_cast<u64>(high) << 32 | low) + 4);
    const u32 add = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(add)
                 : "memory");
  }

  __device__ __forceinline__ void wait() const {
    u32 now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (!((now ^ before) >> 31));
  }
};

// Slots of the parts of an item, by one warp, where a run may be cut; how many there are.
__device__ __forceinline__ int fill_slots(const Line& line, const Sequence& sequence, int block, int thread,
                                          int* slots) {
  const int lane = thread & 31;
  int parts = 0;
#pragma unroll 1
  for (int first = 0; first * line.share < sequence.tiles; first += 32) {
    const int chunk = first + lane, run = chunk * sequence.blocks + block;
    const int length = min(line.share, sequence.tiles - chunk * line.share);
    const int begin = sequence.begin + line.begin_of(sequence, chunk, block);
    const int grid_block = begin / line.share, cut = (grid_block + 1) * line.share;
    const bool is_there = length > 0, is_cut = is_there && cut < begin + length;
    const u32 cuts = __ballot_sync(~0u, is_cut);
    int* to = slots + parts + lane + __popc(cuts & ((1u << lane) - 1));
    if (is_there && thread < 32) to[0] = line.slot(sequence, run, grid_block, begin == cut - line.share);
    if (is_cut && thread < 32) to[1] = line.slot(sequence, run, grid_block + 1, true);
    parts += __popc(__ballot_sync(~0u, is_there)) + __popc(cuts);
  }
  return parts;
}

// The vector of a partial result of four numbers of a block of 64 value dims and of four of the next.
__device__ __forceinline__ uint4 part_vector(const float* first, const float* second) {
  return make_uint4(pack_bf16(first[0], first[1]), pack_bf16(first[2], first[3]),
                    pack_bf16(second[0], second[1]), pack_bf16(second[2], second[3]));
}

// The value dim of number `i` of vector `vector` of a partial result; see `store_part`.
__device__ __forceinline__ int dim_of(int vector, int i) {
  const int half = vector >> 5 & 1, warp = vector >> 3 & 3, block = 2 * (vector >> 6 & 1) + i / 4;
  return 256 * half + 64 * block + 16 * warp + (vector & 7) + 8 * (i / 2 % 2);
}

// `kThreads` of a block, whose named barrier is `kBarrier`; `kRoom` bytes of shared memory. Few
// instructions: each is fetched once, which takes longer than to execute it.
template <int kThreads, int kBarrier, int kRoom>
struct Merge {
  static constexpr int kPairs = 3;  // of rows, that a run of vectors touches
  static_assert(kThreads == 2 * kPairVectors, "a warp for each number of a vector; rows of a run");
  struct Scratch {
    bf16_bits* to[2 * kPairs];
    float by[2 * kPairs];
    int slots[kMostParts];
    float2 weights[kPairs * kMostParts];
    float4 stats[kPairs * kMostParts];  // peak and total of two rows
    float sums[8 * kThreads];
    uint4 vectors[1];
  };
  static constexpr int kMostVectors = (kRoom - static_cast<int>(sizeof(Scratch))) / 16;
  static_assert(kMostVectors >= kMostParts, "a vector of each part");

  const Params& p;
  const Line line;
  Scratch& scratch;
  int thread;

  __device__ __forceinline__ static void barrier() {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
  }

  // Weights of the parts for a row, by one warp, and where it goes.
  __device__ __forceinline__ void weigh(const Sequence& sequence, int packed, int row, int parts,
                                        int pairs, bool begins) const {
    const int lane = thread & 31, token = packed / p.H, head = packed - token * p.H;
    const float2* stats = reinterpret_cast<const float2*>(scratch.stats + row / 2) + row % 2;
    float* weights = reinterpret_cast<float*>(scratch.weights + row / 2 * parts) + row % 2;
    if (token >= sequence.tree_size) parts = 0;
    float peak = -kInfinity, total = 0.0f;
#pragma unroll 1
    for (int part = lane; part < parts; part += 32) peak = fmaxf(peak, stats[2 * pairs * part].x);
    // A float in the order of integers, for which there is an instruction.
    int ordered = __float_as_int(peak);
    ordered = __reduce_max_sync(~0u, ordered ^ ((ordered >> 31) & 0x7FFFFFFF));
    peak = __int_as_float(ordered ^ ((ordered >> 31) & 0x7FFFFFFF));
    const float shift = peak == -kInfinity ? 0.0f : peak;
#pragma unroll 1
    for (int part = lane; part < parts; part += 32) {
      const float2 found = stats[2 * pairs * part];
      const float weight = exp2_fast(found.x - shift);
      weights[2 * part] = weight;
      total += weight * found.y;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    if (lane == 0) {
      const i64 n = sequence.index;
      scratch.to[row] = token < p.T ? p.out + n * p.out_sequence + token * p.out_token + head * p.out_head
                                    : nullptr;
      scratch.by[row] = total != 0.0f ? 1.0f / total : 0.0f;  // NaN is seen
      if (begins && token < p.T)
        p.lse[n * p.lse_sequence + token * p.lse_token + head * p.lse_head] =
            total != 0.0f ? (peak + log2_fast(total)) * kLn2 : -kInfinity;
    }
  }

  // All that this block has written is visible among the threads. A block without a share leaves once
  // it has said that it is done.
  __device__ __forceinline__ void run() const {
    const int blocks = (p.T * p.H + BLOCK_ROWS - 1) / BLOCK_ROWS, all = p.N * blocks * kItemVectors;
    const int share = (all + gridDim.x - 1) / gridDim.x;
    const int end = min(static_cast<int>(blockIdx.x + 1) * share, all);
    const int lane = thread & 31, warp = thread >> 5;
    GridBarrier grid;
    barrier();
    if (thread == 0) grid.arrive();
    bool waits = true;
    int columns;
#pragma unroll 1
    for (int first = blockIdx.x * share; first < end; first += columns) {
      const int item = first / kItemVectors, inside = first - item * kItemVectors;
      const int n = item / blocks, block = item - n * blocks;
      const Sequence sequence = line.find(p, -1, n);
      int parts = 0;
      if (block < sequence.blocks)
        parts = line.is_padded ? (sequence.tiles + line.share - 1) / line.share
                               : fill_slots(line, sequence, block, thread, scratch.slots);
      columns = min(min(end - first, kItemVectors - inside), kThreads);
      if (parts > 1) columns = min(columns, kMostVectors / parts);
      if (waits && thread == 0) grid.wait();
      waits = false;
      barrier();
      if (parts == 1) continue;  // one block held it whole
      const int first_slot = sequence.begin / line.share + block;  // where the line is padded
      const int first_pair = inside / kPairVectors;
      const int pairs = (inside + columns - 1) / kPairVectors - first_pair + 1;
      const auto slot_of = [&](int part) {
        return static_cast<i64>(line.is_padded ? first_slot + part * sequence.blocks
                                               : scratch.slots[part]);
      };
#pragma unroll 1
      for (int part = thread; part < parts; part += kThreads)
#pragma unroll 1
        for (int pair = 0; pair < pairs; ++pair)
          copy_16_always(shared_address(scratch.stats + part * pairs + pair),
                         p.partial_lse +
                             (slot_of(part) * (BLOCK_ROWS / 2) + first_pair + pair) * 4);
      copies_commit();
      // A thread copies what it will add.
      const int groups = kThreads / columns, group = thread / columns, column = thread - group * columns;
      if (group < groups)
#pragma unroll 1
        for (int part = group; part < parts; part += groups)
          copy_16_always(shared_address(scratch.vectors + part * columns + column),
                         p.partial_out + (slot_of(part) * kItemVectors + inside + column) * 8);
      copies_commit();
      copies_wait<1>();
      barrier();
      if (warp < 2 * pairs)
        weigh(sequence, block * BLOCK_ROWS + 2 * first_pair + warp, warp, parts, pairs,
              first_pair * kPairVectors >= inside || warp > 1);  // two rows begin in one run
      barrier();
      copies_wait<0>();
      if (group < groups) {
        float sum[8] = {};
        const float2* weights =
            scratch.weights + ((inside + column) / kPairVectors - first_pair) * parts;
#pragma unroll 2
        for (int part = group; part < parts; part += groups) {
          const uint4 eight = scratch.vectors[part * columns + column];
          const float2 weight = weights[part];
          const u32 twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[2 * i] += weight.x * __uint_as_float(twos[i] << 16);
            sum[2 * i + 1] += weight.y * __uint_as_float(twos[i] & 0xFFFF0000u);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) scratch.sums[(i * groups + group) * columns + column] = sum[i];
      }
      barrier();
      // A warp for each number of the vectors.
#pragma unroll 1
      for (int at = lane; at < columns; at += 32) {
        float sum = 0.0f;
#pragma unroll 1
        for (int each = 0; each < groups; ++each) sum += scratch.sums[(warp * groups + each) * columns + at];
        const int vector = inside + at, row = 2 * (vector / kPairVectors - first_pair) + warp % 2;
        const float by = scratch.by[row];
        if (scratch.to[row])
          scratch.to[row][dim_of(vector, warp)] =
              static_cast<bf16_bits>(pack_bf16(by != 0.0f ? sum * by : 0.0f, 0.0f));
      }
      barrier();
    }
  }
};
