// Routed experts with int4 weights in groups of 32 inputs, for rows in bfloat16, where most experts that
// are hit have one to four tokens: three kernels.
//
//   prepare   a table of tiles, at most four pairs (row, choice) of one expert each; x as integers
//   experts   h = silu(gate x) * up x, then part = weight * (down h), all tiles' in one grid
//   combine   y = sum of a row's parts, in the order of its choices
//
// What has to be read, the weights of every expert that is hit, takes 45 us at nine rows that choose apart,
// and everything else has to hide behind it: few instructions, and never nothing under way.
//
// Few instructions. The products are those of bytes. A word of eight nibbles is two operands of
// mma.m16n8k32 as it stands and with its high nibbles masked: of a byte with nibbles l and h, and of l,
//
//   (l + 16 h) Y + l Z = l (Y + Z) + h 16 Y,
//
// so an input at a low nibble becomes an integer p = Y + Z and its neighbour, at the high one, 16 q, q = Y:
// p of 16 bits and q of 12, as multiples of a unit of 256 inputs, 1 / 30464 of the largest. Two bytes of
// each, fine and coarse, are two columns for a token: columns 2 j and 2 j + 1, whose sums a lane has both.
// Sums of products are exact; what is rounded is x, to 2^-12 of the largest of its 256 at high nibbles and
// 2^-16 at low ones, and so is h, in place of a rounding to bfloat16. A largest input that is no number
// makes the unit none. Nothing is subtracted: a group's sums begin at -8 times the sum of its integers.
//
// Never nothing under way. A box of a turn, 32 rows of 256 inputs, is one or two instructions of the copy
// engine, which also exchanges the pieces of a row of 128 bytes (piece i of row g lies at i ^ g), so that
// ldmatrix meets no bank twice. Every warp has a ring of its own, and refills a stage as soon as it has read
// it. All blocks run at once and each does its share of all the work, as many turns as any other: outputs of
// gate and up, whose inputs the four warps of a block share, then outputs of down, of the same tiles for as
// long as possible. The ring goes on from one to the next; only the first part of h that a block needs
// has to be waited for, and that is long there unless few experts are hit.
//
// Shared memory, of four warps and two stages: 4096 bytes of weights, 512 of scales and four tokens of 656
// each; sums of the warps, 3 KB; what goes into down, 2624 bytes for every 256 inputs. Sums have a fixed
// order: inputs of a warp, warps, choices.
//
// Grid: as many blocks as run at once, since blocks wait for each other's h.
//
// Source: mma of bytes and the order of operands in it: PTX ISA, "Matrix fragments for mma.m16n8k32".
#include "grouped_experts.cuh"
#include "tensor_map.cuh"

constexpr int kWarps = 4;
constexpr int kStages = 2;    // of a warp's ring
constexpr int kMostOnSm = 3;  // blocks
constexpr int kTokens = 4;    // of a tile at most
constexpr int kInputs = 256;  // of a turn
constexpr int kGroups = kInputs / 32;
constexpr int kBeginsAt = 2 * kInputs;             // of a token's turn, behind its columns: where sums begin
constexpr int kUnitAt = kBeginsAt + kGroups * 16;  // and what its integers are multiples of
constexpr int kTokenBytes = kUnitAt + 16;
constexpr int kTurnTokens = kTokens * kTokenBytes;
constexpr int kMost = 119 * 256;  // that an input becomes; with its neighbour's sixteenth below 2^15 - 128
constexpr float kLeast = 1e-30f;  // inputs are nothing where none is larger
constexpr int kRowBytes = kInputs / 2, kScaleBytes = kGroups * 2;  // of a row's turn
constexpr int kRows = 32;  // of a turn of a warp: 16 of gate and the same of up, or 32 of down
constexpr int kTiles = 2;  // of the matrix instruction, eight rows here and eight 16 rows further
constexpr int kWide = 16;               // outputs of gate and up
constexpr int kNarrow = kWarps * kRows;  // and of down that a block does at a time
constexpr int kStep = 8 * kRowBytes, kHigh = 16 * kRowBytes;
constexpr int kValues = kRows * kRowBytes, kScales = kRows * kScaleBytes;
constexpr int kRecord = 8;  // numbers of a tile in the table: expert, pairs, two unused, four pairs
constexpr int kMostExperts = 1024;
constexpr int kPrepareWarps = 8;

// Shared memory of `experts`.
constexpr int kSums = (kWarps - 1) * kTiles * 2 * 32;  // numbers, of all warps but the first
constexpr int kScalesAt = kWarps * kStages * kValues;
constexpr int kTokensAt = kScalesAt + kWarps * kStages * kScales;
constexpr int kSumsAt = kTokensAt + kWarps * kStages * kTurnTokens;
constexpr int kBarriersAt = kSumsAt + 2 * kSums * 4;
constexpr int kDownAt = kBarriersAt + kWarps * kStages * 8;  // what goes into down

struct Params {
  TensorMap gate, up, down;    // [E, inner, hidden / 8] twice, [E, hidden, inner / 8]
  const bf16_bits* x;          // [M, hidden]
  const void* ids;             // [M, K]
  const float* weights;        // [M, K]
  const bf16_bits* gate_scale; // [E, inner, hidden / 32]
  const bf16_bits* up_scale;   // [E, inner, hidden / 32]
  const bf16_bits* down_scale; // [E, hidden, inner / 32]
  int* tiles;                  // how many; from kRecord on [most_tiles, kRecord]
  int* done;                   // [most_tiles] times 16 outputs of gate and up whose h is there
  unsigned char* integers;     // [M, hidden / 256, kTokenBytes]
  float* h;                    // [P, inner] by pair
  float* parts;                // [P, hidden] by pair
  bf16_bits* out;              // [M, hidden]
  i64 x_row, ids_row, ids_choice, weights_row, weights_choice, out_row;
  i64 gate_scale_expert, gate_scale_row, up_scale_expert, up_scale_row;
  i64 down_scale_expert, down_scale_row;
  int M, K, E, hidden, inner, wide_ids, most_tiles;
  int gate_step, up_step, down_step;  // of an expert in the maps: 0 where one stands for all
};

__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void arrive_for(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ float shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

// Two matrices of 8 x 8 numbers of 16 bits; lanes 0 to 15 name the places of their rows.
__device__ __forceinline__ void load_two(u32 (&m)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(from)
               : "memory");
}

// c + a b, 16 x 8 x 32 bytes, those of b signed. Of c a lane has columns 2 t and 2 t + 1 of rows g, g + 8.
__device__ __forceinline__ int4 multiply(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                         const uint4& c) {
  int4 d;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c.x), "r"(c.y), "r"(c.z),
        "r"(c.w));
  return d;
}

// Eight inputs of a lane as integers in their places of a token's turn; all lanes of a warp, of which
// four have a group. `bits` are the largest magnitude's among the turn's.
__device__ __forceinline__ void put_integers(unsigned char* to, const float (&v)[8], u32 bits, int lane) {
  const float most = __uint_as_float(bits);
  const bool is_number = bits < 0x7F800000u;
  const float factor = is_number && most > kLeast ? kMost / most : 0.0f;
  u32 fine[2] = {0, 0}, coarse[2] = {0, 0};  // [of bytes, of their low halves]
  int sum = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int low = __float2int_rn(v[2 * k] * factor);
    const int high = __float2int_rn(v[2 * k + 1] * (factor * 0.0625f));
    sum += low + 16 * high;
    const int rest = low - high;
    fine[0] |= (high & 255) << (8 * k);
    coarse[0] |= ((high + 128) >> 8 & 255) << (8 * k);
    fine[1] |= (rest & 255) << (8 * k);
    coarse[1] |= ((rest + 128) >> 8 & 255) << (8 * k);
  }
  const int i = lane >> 2, t = lane & 3;
  unsigned char* at = to + (i >> 1) * 128 + t * 16 + (i & 1) * 8;
  *reinterpret_cast<uint2*>(at) = make_uint2(coarse[0], coarse[1]);
  *reinterpret_cast<uint2*>(at + 64) = make_uint2(fine[0], fine[1]);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const u32 begin = static_cast<u32>(-8 * sum);
  if (t == 0) *reinterpret_cast<uint4*>(to + kBeginsAt + i * 16) = make_uint4(0, begin, 0, begin);
  if (lane == 0)
    *reinterpret_cast<float4*>(to + kUnitAt) =
        make_float4(is_number ? most / kMost : __int_as_float(0x7FC00000), 0.0f, 0.0f, 0.0f);
}


// Add a turn to the sums: of tile r rows g at `values + r * kStep`, rows g + 8 kHigh bytes behind, scales
// alike in an eighth of the room. `place` is this lane's of the first group's matrices.
__device__ __forceinline__ void multiply_turn(float (&sums)[kTiles][2], u32 values, u32 scales, u32 tokens,
                                              u32 place, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const u32 from = values + place;
  const u32 columns = tokens + (g >> 1) * kTokenBytes + (g & 1) * 64 + t * 16;
  const u32 own = tokens + t * kTokenBytes;
  uint4 low_scales[kTiles], high_scales[kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    low_scales[r] = shared_16(scales + g * kScaleBytes + r * (kStep / 8));
    high_scales[r] = shared_16(scales + g * kScaleBytes + r * (kStep / 8) + kHigh / 8);
  }
  float turn[kTiles][2];
#pragma unroll
  for (int two = 0; two < kGroups / 2; ++two) {
    u32 words[2][kTiles][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < kTiles; ++r) load_two(words[i][r], (from ^ ((two * 2 + i) << 4)) + r * kStep);
    const uint4 x = shared_16(columns + two * 128);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 begin = shared_16(own + kBeginsAt + (two * 2 + i) * 16);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        const auto scale = [&](const uint4& eight) {
          const u32 pair = two == 0 ? eight.x : two == 1 ? eight.y : two == 2 ? eight.z : eight.w;
          return __uint_as_float(i ? pair & 0xFFFF0000u : pair << 16);
        };
        const u32 l = words[i][r][0], h = words[i][r][1];
        const int4 d = multiply(l, h, l & 0x0F0F0F0F, h & 0x0F0F0F0F, i ? x.z : x.x, i ? x.w : x.y, begin);
        const float low = static_cast<float>(d.x * 256 + d.y);
        const float high = static_cast<float>(d.z * 256 + d.w);
        const bool is_first = two == 0 && i == 0;
        turn[r][0] = is_first ? low * scale(low_scales[r]) : turn[r][0] + low * scale(low_scales[r]);
        turn[r][1] = is_first ? high * scale(high_scales[r]) : turn[r][1] + high * scale(high_scales[r]);
      }
    }
  }
  const float unit = shared_float(own + kUnitAt);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    sums[r][0] += turn[r][0] * unit;
    sums[r][1] += turn[r][1] * unit;
  }
}

// Blocks of the table: a warp an expert; every one counts all ids for itself, so that none waits for
// another. The others: rows as integers, a warp a turn of a row.
extern "C" __global__ void __launch_bounds__(32 * kPrepareWarps)
    prepare(const __grid_constant__ Params p) {
  __shared__ int counts[kMostExperts];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  grid_let_next_start();
  const int table_blocks = (p.E + kPrepareWarps - 1) / kPrepareWarps;
  if (blockIdx.x >= table_blocks) {
    const int blocks = p.hidden / kInputs;
    const int piece = (blockIdx.x - table_blocks) * kPrepareWarps + warp;
    if (piece >= p.M * blocks) return;
    const int row = piece / blocks, block = piece - row * blocks;
    const uint4 v = *reinterpret_cast<const uint4*>(p.x + row * p.x_row + block * kInputs + lane * 8);
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    float inputs[8];
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      inputs[2 * k] = __uint_as_float(pairs[k] << 16);
      inputs[2 * k + 1] = __uint_as_float(pairs[k] & 0xFFFF0000u);
      bits = max(bits, max(pairs[k] << 16 & 0x7FFF0000u, pairs[k] & 0x7FFF0000u));
    }
    put_integers(p.integers + static_cast<i64>(piece) * kTokenBytes, inputs, __reduce_max_sync(~0u, bits), lane);
    return;
  }
  const int num_pairs = p.M * p.K;
  for (int e = threadIdx.x; e < p.E; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x) {
    const int expert = expert_of(p, pair / p.K, pair % p.K);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int expert = blockIdx.x * kPrepareWarps + warp;
  if (expert >= p.E) return;
  const int own = counts[expert];
  if (own == 0 && expert != p.E - 1) return;
  int first = 0;
  for (int e = lane; e < expert; e += 32) first += (counts[e] + kTokens - 1) / kTokens;
  first = __reduce_add_sync(~0u, first);
  const int own_tiles = (own + kTokens - 1) / kTokens;
  if (expert == p.E - 1 && lane == 0) p.tiles[0] = first + own_tiles;
  int* records = p.tiles + (1 + first) * kRecord;
  for (int i = lane; i < own_tiles; i += 32) {
    records[i * kRecord] = expert;
    records[i * kRecord + 1] = min(own - i * kTokens, kTokens);
    p.done[first + i] = 0;
  }
  int place = 0;
  for (int from = 0; from < num_pairs && place < own; from += 32) {
    const int pair = from + lane;
    const bool is_own = pair < num_pairs && expert_of(p, pair / p.K, pair % p.K) == expert;
    const u32 those = __ballot_sync(~0u, is_own);
    const int at = place + __popc(those & ((1u << lane) - 1));
    if (is_own) records[at / kTokens * kRecord + 4 + at % kTokens] = pair;
    place += __popc(those);
  }
}

// What a block does in a row: 16 outputs of gate and up of a tile, or some of a tile's outputs of down, 128
// at a time. Which, follows from the number of tiles alone, so that all blocks have as many turns.
struct Schedule {
  u32 chunks, units, blocks;  // of a tile: 16 outputs of gate and up, 128 of down; turns of the latter
  u32 wide, begin, end;       // how many of the first kind, and which units of down
  __device__ __forceinline__ Schedule(const Params& p, u32 tiles)
      : chunks(p.inner / kWide), units(p.hidden / kNarrow), blocks(p.inner / kInputs) {
    const u32 all = gridDim.x, b = blockIdx.x;
    const u32 turns = (p.hidden / kInputs + kWarps - 1) / kWarps;
    const u32 items = tiles * chunks, narrow = tiles * units;
    const u32 each = items / all, more = items - each * all;  // blocks that have one more
    const u32 sum = items * turns + narrow * blocks, least = all * (each + 1) * turns;
    const float left = sum > least ? static_cast<float>(sum - least) / static_cast<float>(all * blocks) : 0.0f;
    const u32 late = static_cast<u32>(static_cast<float>(more) * left);  // units of these
    const u32 soon = narrow - late;  // of all others, which come first
    wide = each + (b < more);
    const u32 rank = b - more, ranks = all - more;
    begin = b < more ? soon + b * late / more : rank * soon / ranks;
    end = b < more ? soon + (b + 1) * late / more : (rank + 1) * soon / ranks;
  }
  __device__ __forceinline__ u32 count() const {
    return wide + (end > begin ? (end - 1) / units - begin / units + 1 : 0);
  }
  __device__ __forceinline__ u32 tile(u32 k) const {
    return k < wide ? (blockIdx.x + k * gridDim.x) / chunks : begin / units + k - wide;
  }
  // The first 16 or 128 outputs of the tile, and how many times 128.
  __device__ __forceinline__ u32 first(u32 k) const {
    return k < wide ? (blockIdx.x + k * gridDim.x) % chunks : k == wide ? begin % units : 0;
  }
  __device__ __forceinline__ u32 length(u32 k) const {
    const u32 from = begin / units + k - wide;
    return min(end, (from + 1) * units) - max(begin, from * units);
  }
};

extern "C" __global__ void __launch_bounds__(32 * kWarps, kMostOnSm) experts(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const u32 base = shared_address(smem);
  const u32 values = base + warp * kStages * kValues;
  const u32 scales = base + kScalesAt + warp * kStages * kScales;
  const u32 ring_tokens = base + kTokensAt + warp * kStages * kTurnTokens;
  const u32 barriers = base + kBarriersAt + warp * kStages * 8;
  float* others = reinterpret_cast<float*>(smem + kSumsAt) + lane;
  if (lane == 0) {
    expect_map(p.gate), expect_map(p.up), expect_map(p.down);
#pragma unroll
    for (int s = 0; s < kStages; ++s) barrier_init(barriers + s * 8, 1 + 32);
    barriers_are_ready();
  }
  __syncwarp();
  grid_wait();
  grid_let_next_start();
  const int guessed = p.tiles[(1 + min(blockIdx.x / (p.inner / kWide), p.most_tiles - 1)) * kRecord + (lane & 7)];
  const Schedule todo(p, p.tiles[0]);
  const int num_segments = todo.count();
  const int row_turns = p.hidden / kInputs;
  const int own_turns = (row_turns - warp + kWarps - 1) / kWarps;
  const auto record = [&](int k) {
    return k < num_segments && lane < kRecord ? p.tiles[(1 + todo.tile(k)) * kRecord + lane] : 0;
  };

  // What is copied next: a turn of segment `ahead`.
  int ahead = -1, ahead_turn = 0, ahead_turns = 0, ahead_block = 0, ahead_row = 0;
  int ahead_expert = 0, ahead_count = 0, ahead_token = 0;
  bool ahead_down = false;
  int found = todo.wide > 0 ? guessed : record(0);
  const unsigned char* ahead_scales = nullptr;
  const auto go_on = [&]() {
    do {
      ++ahead;
      ahead_turn = ahead_turns = 0;
      if (ahead >= num_segments) return;
      ahead_expert = __shfl_sync(~0u, found, 0);
      ahead_count = __shfl_sync(~0u, found, 1);
      ahead_token = __shfl_sync(~0u, found, 4 + t) / p.K;
      found = record(ahead + 1);
      ahead_down = ahead >= todo.wide;
      ahead_block = 0;
      const i64 expert = ahead_expert;
      if (ahead_down) {
        ahead_turns = todo.length(ahead) * todo.blocks;
        ahead_row = todo.first(ahead) * kNarrow + warp * kRows;
        ahead_scales = reinterpret_cast<const unsigned char*>(
            p.down_scale + expert * p.down_scale_expert + (ahead_row + lane) * p.down_scale_row);
      } else {
        ahead_turns = own_turns;
        ahead_row = todo.first(ahead) * kWide;
        const i64 row = ahead_row + (lane & 15);
        const bf16_bits* from = lane < 16 ? p.gate_scale + expert * p.gate_scale_expert + row * p.gate_scale_row
                                          : p.up_scale + expert * p.up_scale_expert + row * p.up_scale_row;
        ahead_scales = reinterpret_cast<const unsigned char*>(from) + warp * kScaleBytes;
      }
    } while (ahead_turns == 0);
  };
  const auto copy_next = [&](int s) {
    if (ahead >= num_segments) return;
    const u32 barrier = barriers + s * 8, to = values + s * kValues;
    copy_16_always(scales + s * kScales + lane * kScaleBytes, ahead_scales);
    barrier_arrive_after_copies(barrier);
    if (ahead_down) {
      if (lane == 0) {
        arrive_for(barrier, kValues);
        copy_box(to, p.down, ahead_block * (kInputs / 8), ahead_row, ahead_expert * p.down_step, barrier);
      }
      ahead_scales += kScaleBytes;
      if (++ahead_block == todo.blocks) {
        ahead_block = 0;
        ahead_row += kNarrow;
        ahead_scales += 2 * kNarrow * p.down_scale_row - todo.blocks * kScaleBytes;
      }
    } else {
      const int turn = warp + ahead_turn * kWarps;
      if (lane == 0) {
        arrive_for(barrier, kValues + ahead_count * kTokenBytes);
        copy_box(to, p.gate, turn * (kInputs / 8), ahead_row, ahead_expert * p.gate_step, barrier);
        copy_box(to + kHigh, p.up, turn * (kInputs / 8), ahead_row, ahead_expert * p.up_step, barrier);
      }
#pragma unroll 1
      for (int k = 0; k < ahead_count; ++k) {
        const i64 row = __shfl_sync(~0u, ahead_token, k);
        if (lane == 0)
          copy_bytes(ring_tokens + s * kTurnTokens + k * kTokenBytes,
                     p.integers + (row * row_turns + turn) * kTokenBytes, kTokenBytes, barrier);
      }
      ahead_scales += kWarps * kScaleBytes;
    }
    if (++ahead_turn == ahead_turns) go_on();
  };

  go_on();
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) copy_next(s);
  // What goes in of this warp's token of the next segment, if that is of down and h is there.
  float4 ready_low, ready_high;
  bool is_ready = false;
  const auto is_done = [&](int tile) {
    int done;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(p.done + tile) : "memory");
    return done == static_cast<int>(todo.chunks);
  };
  const auto look_ahead = [&](int k) {
    is_ready = false;
    if (k < todo.wide || k >= num_segments) return;
    const int next = record(k), pair = __shfl_sync(~0u, next, 4 + warp);
    is_ready = is_done(todo.tile(k));
    if (is_ready && warp < __shfl_sync(~0u, next, 1)) {
      const float4* from = reinterpret_cast<const float4*>(p.h + static_cast<i64>(pair) * p.inner + lane * 8);
      ready_low = from[0], ready_high = from[1];
    }
  };
  const u32 place = ((lane & 7) * kRowBytes + ((lane & 7) << 4)) + (lane >> 3 & 1) * kHigh;
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int k = 0; k < num_segments; ++k) {
    const int tile = todo.tile(k), first = todo.first(k);
    const bool is_down = k >= static_cast<int>(todo.wide);
    const int here = record(k);
    const int count = __shfl_sync(~0u, here, 1), pair = __shfl_sync(~0u, here, 4 + t);
    const int turns = is_down ? todo.length(k) * todo.blocks : own_turns;
    float factor = 0.0f;
    if (is_down) {
      if (t < count) factor = p.weights[pair / p.K * p.weights_row + pair % p.K * p.weights_choice];
      if (!is_ready)
        while (!is_done(tile)) __nanosleep(40);
      __syncthreads();  // the tokens before have been read
      for (int at = warp; at < todo.blocks * count; at += kWarps) {  // the first is token `warp` of block 0
        const int block = at / count, token = at - block * count;
        const i64 from_pair = __shfl_sync(~0u, pair, token);
        const float* from = p.h + from_pair * p.inner + block * kInputs + lane * 8;
        if (!is_ready || at >= count) {
          ready_low = *reinterpret_cast<const float4*>(from);
          ready_high = *reinterpret_cast<const float4*>(from + 4);
        }
        const float inputs[8] = {ready_low.x,  ready_low.y,  ready_low.z,  ready_low.w,
                                 ready_high.x, ready_high.y, ready_high.z, ready_high.w};
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(inputs[i]) & 0x7FFFFFFFu);
        put_integers(smem + kDownAt + block * kTurnTokens + token * kTokenBytes, inputs,
                     __reduce_max_sync(~0u, bits), lane);
      }
      __syncthreads();
    }
    look_ahead(k + 1);
    float sums[kTiles][2] = {};
    int block = 0, output = first * kNarrow + warp * kRows + g;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      barrier_wait(barriers + stage * 8, parity);
      const u32 tokens = is_down ? base + kDownAt + block * kTurnTokens : ring_tokens + stage * kTurnTokens;
      multiply_turn(sums, values + stage * kValues, scales + stage * kScales, tokens, place, lane);
      __syncwarp();
      copy_next(stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
      if (is_down && ++block == todo.blocks) {
        block = 0;
#pragma unroll
        for (int r = 0; r < kTiles; ++r)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (t < count)
              p.parts[static_cast<i64>(pair) * p.hidden + output + r * 8 + i * 16] = sums[r][i] * factor;
            sums[r][i] = 0.0f;
          }
        output += kNarrow;
      }
    }
    if (is_down) continue;
    // The warps' sums in their order; the next item's go to the other place.
    float* shared = others + (k & 1) * kSums;
    if (warp > 0)
#pragma unroll
      for (int r = 0; r < kTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) shared[(((warp - 1) * kTiles + r) * 2 + i) * 32] = sums[r][i];
    __syncthreads();
    if (warp > 0) continue;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int w = 0; w < kWarps - 1; ++w) sums[r][i] += shared[((w * kTiles + r) * 2 + i) * 32];
      const float gate = sums[r][0], up = sums[r][1];
      if (t < count)
        p.h[static_cast<i64>(pair) * p.inner + first * kWide + r * 8 + g] = gate / (1.0f + __expf(-gate)) * up;
    }
    __syncwarp();
    if (lane == 0)
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.done + tile) : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Params p) {
  combine_parts(p);
}
