// Routed experts with int4 weights in groups of 32 inputs, for rows in bfloat16, where experts have
// several tokens (grouped_experts_few.cu where they have few): four kernels.
//
//   prepare   pairs (row, choice) by expert, tiles of at most TOKENS pairs of one expert, and x in
//             the order of inputs that the matrix instructions below want, with sums by group
//   gate_up   h = silu(gate x) * up x           a block for a tile and 8 * WIDE * ROW_TILES outputs
//   down      part = weight * (down h)          a block for a tile and its share of hidden
//   combine   y = sum of a row's parts, in the order of its choices
//
// Weights are the rows of mma.m16n8k16 and tokens its columns, so that an expert with one token
// is padded to eight and not to a tile. Row g of a warp's 16 is an output of gate and row g + 8 the
// same output of up: SiLU and product need no exchange.
//
// What is scarce is not only bandwidth: at 4 TB/s an SM has 70 instructions for 1000 weights. So
//
//   * a nibble n is the bfloat16 n * 2^-133 as it stands, and 16 n * 2^-133 four bits higher: numbers
//     below the smallest normal one and those of its binade are equally spaced. A word's nibbles j
//     and j + 4 become a pair with one AND, every second one after a shift. x carries the factors,
//     2^64 and 2^60, and what is left is undone at the end; x and h must be below 2^63. Which inputs
//     an instruction sums over at a time is free as long as both operands agree: x is laid out to
//     match, of every eight inputs 0 4 1 5 2 6 3 7;
//   * nothing is subtracted: sum (n - 8) x = sum n x - 8 sum x, and the last term is where the sum of
//     a group begins;
//   * a group's sum is multiplied by its scale, in float32, rather than every weight: the product of
//     value and scale is not rounded.
//
// Weights come by asynchronous copies into a ring that belongs to the warp that reads them, whole
// lines of 128 bytes, pieces of 16 bytes exchanged (piece i of row g lies at i ^ g) so that reads
// meet no bank twice. Tokens come beside them, only those that there are, shared by WIDE warps;
// columns without a token see another's or nothing that was ever written, and are not stored. A turn
// of the loops: 256 inputs.
//
// Every sum is in float32 and has a fixed order; nothing is added atomically.
//
// Macros: TOKENS, of a tile: 8 or 16 - SPLITS, warps that share the inputs of gate_up -
// WIDE, warps beside each other in outputs - ROW_TILES of such a warp - STAGES of its ring -
// DOWN_WARPS, DOWN_STAGES, DOWN_ROW_TILES of a turn, and DOWN_TURNS times as many outputs a warp.
//
// Source: arXiv 2408.11743 (MARLIN) for weights that stay packed up to the registers of the matrix
// instruction. That tensor cores take numbers below the smallest normal one as they are: Fasi,
// Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021.
#include "grouped_experts.cuh"

constexpr int kInputs = 256;  // of a turn of the loops
constexpr int kGroups = kInputs / 32;
constexpr int kColumns = TOKENS / 8;
constexpr int kPiece = 32 * 16;  // of a group and eight tokens: each lane's 16 bytes
constexpr int kColumnBytes = kGroups * kPiece;
constexpr int kTokenBytes = kColumns * kColumnBytes;  // of a turn: [column, group] pieces
constexpr int kBeginBytes = kGroups * TOKENS * 4;     // of a turn: where a group's sums begin
constexpr float kEven = 18446744073709551616.0f, kOdd = 1152921504606846976.0f;  // 2^64, 2^60
constexpr float kUndo = 590295810358705651712.0f;                                 // 2^(133 - 64)
constexpr int kValueBytes = 16 * kInputs / 2;              // of 16 rows
constexpr int kScaleBytes = 16 * kGroups * 2;
constexpr int kTileBytes = kValueBytes + kScaleBytes;
constexpr int kMostExperts = 1024;
constexpr int kPrepareWarps = 8;

struct Params {
  const bf16_bits* x;          // [M, hidden]
  const void* ids;             // [M, K]
  const float* weights;        // [M, K]
  const u32* gate;             // [E, inner, hidden / 8]
  const u32* up;               // [E, inner, hidden / 8]
  const u32* down;             // [E, hidden, inner / 8]
  const bf16_bits* gate_scale; // [E, inner, hidden / 32]
  const bf16_bits* up_scale;   // [E, inner, hidden / 32]
  const bf16_bits* down_scale; // [E, hidden, inner / 32]
  int* order;                  // [P] pairs by expert
  int* tiles;                  // [3, num_tiles]: expert (-1: none), first and last entry of order
  bf16_bits* ordered_x;        // [M, hidden], inputs in the order above
  float* begins;               // [M, hidden / 32] where the sums of a group begin
  bf16_bits* h;                // [P, inner] in the order of `order`, inputs in the order above
  float* parts;                // [P, hidden] by pair
  bf16_bits* out;              // [M, hidden]
  i64 x_row, ids_row, ids_choice, weights_row, weights_choice, out_row;
  i64 gate_expert, gate_row, gate_scale_expert, gate_scale_row;
  i64 up_expert, up_row, up_scale_expert, up_scale_row;
  i64 down_expert, down_row, down_scale_expert, down_scale_row;
  int M, K, E, hidden, inner, num_tiles, wide_ids;
};

__device__ __forceinline__ bf16_bits bf16_rounded(float x) {
  return static_cast<bf16_bits>(pack_bf16(x, 0.0f));
}

// Two numbers in bfloat16 by a power of two.
__device__ __forceinline__ u32 scaled(u32 pair, float power) {
  return __byte_perm(__float_as_uint(__uint_as_float(pair << 16) * power),
                     __float_as_uint(__uint_as_float(pair & 0xFFFF0000u) * power), 0x7632);
}

__device__ __forceinline__ float sum_of(u32 pair) {
  return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000u);
}

// Where the sums over eight scaled inputs begin.
__device__ __forceinline__ float begin_of(const uint4& v) {
  const float sum = (sum_of(v.x) + sum_of(v.z)) / kEven + (sum_of(v.y) + sum_of(v.w)) / kOdd;
  return sum * (-8.0f / kUndo);
}

// The same in all four lanes of a group: the sum over them.
__device__ __forceinline__ float over_group(float sum) {
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

__device__ __forceinline__ u32 shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ float2 shared_8(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

struct Quad {
  float x[4];
};

// Columns 2 t and 2 t + 1 of rows g and g + 8: c + a b.
__device__ __forceinline__ Quad multiply(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const Quad& c) {
  Quad d;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d.x[0]), "=f"(d.x[1]), "=f"(d.x[2]), "=f"(d.x[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c.x[0]), "f"(c.x[1]), "f"(c.x[2]),
        "f"(c.x[3]));
  return d;
}

// Where input `o` of eight stands.
__device__ __forceinline__ int ordered(int o) { return o < 4 ? 2 * o : 2 * o - 7; }

// What a tile of the table says.
struct Tile {
  int expert, begin, end;
  __device__ __forceinline__ Tile(const Params& p, int index)
      : expert(p.tiles[index]),
        begin(p.tiles[p.num_tiles + index]),
        end(p.tiles[2 * p.num_tiles + index]) {}
};

// Copies of turns of kTiles times 16 rows, eight of them (`low`) here and eight (`high`) there.
template <int kTiles>
struct Copies {
  const unsigned char *low[kTiles], *high[kTiles];  // this lane's piece of row `lane / 8`
  const unsigned char* scales[(kTiles + 1) / 2];    // of row `lane % 16` of two tiles
  i64 four_low, four_high;                          // bytes of four rows
  u32 to;                                           // of this warp's tiles in stage 0

  // Copy a turn into the ring and go on to the next.
  __device__ __forceinline__ void next(u32 stage, int lane) {
    const int row = lane >> 3, piece = lane & 7;
    const u32 even = to + stage + row * 128 + ((piece ^ row) << 4);
    const u32 odd = even + 512 + (((piece ^ row) & 4) ? -64 : 64);
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      copy_16_always(even + r * kTileBytes, low[r]);
      copy_16_always(odd + r * kTileBytes, low[r] + four_low);
      copy_16_always(even + r * kTileBytes + 1024, high[r]);
      copy_16_always(odd + r * kTileBytes + 1024, high[r] + four_high);
      low[r] += kInputs / 2;
      high[r] += kInputs / 2;
    }
#pragma unroll
    for (int two = 0; two < (kTiles + 1) / 2; ++two) {
      if (kTiles > 1 || lane < 16)
        copy_16_always(to + stage + (2 * two + (lane >> 4)) * kTileBytes + kValueBytes + (lane & 15) * 16,
                       scales[two]);
      scales[two] += kGroups * 2;
    }
  }
  __device__ __forceinline__ void skip(i64 values, i64 scale_bytes) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) low[r] += values, high[r] += values;
#pragma unroll
    for (int two = 0; two < (kTiles + 1) / 2; ++two) scales[two] += scale_bytes;
  }
};

// Add a turn of kTiles times 16 rows to the sums. `places` are this lane's of a group's words,
// `token(j, i)` gives the piece of a column's token, `begin(j, i)` where a group's sums begin.
template <int kTiles, class Token, class Begin>
__device__ __forceinline__ void multiply_turn(Quad (&sums)[kTiles][kColumns], u32 tiles,
                                              const u32 (&places)[kGroups], int lane, Token token,
                                              Begin begin) {
  uint4 low_scales[kTiles], high_scales[kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    const u32 at = tiles + r * kTileBytes + kValueBytes + (lane >> 2) * 16;
    low_scales[r] = shared_16(at);
    high_scales[r] = shared_16(at + 128);
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const auto scale = [&](const uint4& eight) {
      const u32 two = i / 2 == 0 ? eight.x : i / 2 == 1 ? eight.y : i / 2 == 2 ? eight.z : eight.w;
      return __uint_as_float(i % 2 ? two & 0xFFFF0000u : two << 16);
    };
    u32 low[kTiles], high[kTiles];
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      low[r] = shared_4(tiles + places[i] + r * kTileBytes);
      high[r] = shared_4(tiles + places[i] + r * kTileBytes + 1024);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint4 x = token(j, i);
      const float2 c = begin(j, i);
      const Quad start = {c.x, c.y, c.x, c.y};
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        const u32 l = low[r], h = high[r], even = 0x000F000F, odd = 0x00F000F0;
        Quad sum = multiply(l & even, h & even, l & odd, h & odd, x.x, x.y, start);
        const u32 k = l >> 8, n = h >> 8;
        sum = multiply(k & even, n & even, k & odd, n & odd, x.z, x.w, sum);
        const float low_scale = scale(low_scales[r]), high_scale = scale(high_scales[r]);
        sums[r][j].x[0] += sum.x[0] * low_scale;
        sums[r][j].x[1] += sum.x[1] * low_scale;
        sums[r][j].x[2] += sum.x[2] * high_scale;
        sums[r][j].x[3] += sum.x[3] * high_scale;
      }
    }
  }
}

// This lane's place of its word of each group in 16 rows.
__device__ __forceinline__ void word_places(u32 (&places)[kGroups], int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) places[i] = g * 128 + ((i ^ g) << 4) + t * 4;
}

// A warp an expert: its pairs in their order, its tiles. Every block counts all ids for itself, so
// that none waits for another.
extern "C" __global__ void __launch_bounds__(32 * kPrepareWarps)
    prepare(const __grid_constant__ Params p) {
  __shared__ int counts[kMostExperts];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int num_pairs = p.M * p.K;
  for (int e = threadIdx.x; e < p.E; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x) {
    const int expert = expert_of(p, pair / p.K, pair % p.K);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  const i64 pieces = static_cast<i64>(p.M) * (p.hidden / 8);
  for (i64 piece = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; piece < pieces;
       piece += static_cast<i64>(gridDim.x) * blockDim.x) {
    const i64 row = piece / (p.hidden / 8), eight = piece - row * (p.hidden / 8);
    const uint4 v = *reinterpret_cast<const uint4*>(p.x + row * p.x_row + eight * 8);
    uint4 o;
    o.x = scaled(__byte_perm(v.x, v.z, 0x5410), kEven);
    o.y = scaled(__byte_perm(v.x, v.z, 0x7632), kOdd);
    o.z = scaled(__byte_perm(v.y, v.w, 0x5410), kEven);
    o.w = scaled(__byte_perm(v.y, v.w, 0x7632), kOdd);
    reinterpret_cast<uint4*>(p.ordered_x)[piece] = o;
    const float begin = over_group(begin_of(o));  // of whole warps: hidden / 8 is a multiple of 32
    if (piece % 4 == 0) p.begins[piece / 4] = begin;
  }
  __syncthreads();
  const int expert = blockIdx.x * kPrepareWarps + warp;
  if (expert >= p.E) return;
  const int own = counts[expert];
  if (own == 0 && expert != p.E - 1) return;
  int start = 0, first_tile = 0;
  for (int e = lane; e < expert; e += 32) {
    start += counts[e];
    first_tile += (counts[e] + TOKENS - 1) / TOKENS;
  }
  start = __reduce_add_sync(~0u, start);
  first_tile = __reduce_add_sync(~0u, first_tile);
  const int own_tiles = (own + TOKENS - 1) / TOKENS;
  for (int i = lane; i < own_tiles; i += 32) {
    p.tiles[first_tile + i] = expert;
    p.tiles[p.num_tiles + first_tile + i] = start + i * TOKENS;
    p.tiles[2 * p.num_tiles + first_tile + i] = min(start + (i + 1) * TOKENS, start + own);
  }
  if (expert == p.E - 1)  // what no expert fills
    for (int i = first_tile + own_tiles + lane; i < p.num_tiles; i += 32) p.tiles[i] = -1;
  if (own == 0) return;
  int place = start;
  for (int first = 0; first < num_pairs; first += 32) {
    const int pair = first + lane;
    const bool is_own = pair < num_pairs && expert_of(p, pair / p.K, pair % p.K) == expert;
    const u32 those = __ballot_sync(~0u, is_own);
    if (is_own) p.order[place + __popc(those & ((1u << lane) - 1))] = pair;
    place += __popc(those);
  }
}

// Wait for the copies of a turn; then all that share its tokens have finished the turn before.
__device__ __forceinline__ void turn_is_there(int split) {
  if (WIDE == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + split), "n"(32 * WIDE) : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(32 * SPLITS * WIDE)
    gate_up(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  constexpr int kShared = kTokenBytes + kBeginBytes;               // by the warps of a split
  constexpr int kRing = kShared + WIDE * ROW_TILES * kTileBytes;  // of a split's stage
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int split = warp / WIDE, beside = warp - split * WIDE;
  grid_wait();
  grid_let_next_start();
  const Tile tile(p, blockIdx.y);
  if (tile.expert < 0) return;
  const int turns = (p.hidden / kInputs - split + SPLITS - 1) / SPLITS;
  const int first_output = (blockIdx.x * WIDE + beside) * ROW_TILES * 8;
  const u32 ring = shared_address(smem) + split * STAGES * kRing;
  const u32 tiles = ring + kShared + beside * ROW_TILES * kTileBytes;

  Copies<ROW_TILES> copies;
  copies.to = tiles;
  copies.four_low = 16 * p.gate_row;
  copies.four_high = 16 * p.up_row;
  {
    const i64 expert = tile.expert, output = first_output;
    const u32* gate = p.gate + expert * p.gate_expert + (output + (lane >> 3)) * p.gate_row;
    const u32* up = p.up + expert * p.up_expert + (output + (lane >> 3)) * p.up_row;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      copies.low[r] = reinterpret_cast<const unsigned char*>(gate + r * 8 * p.gate_row) + (lane & 7) * 16;
      copies.high[r] = reinterpret_cast<const unsigned char*>(up + r * 8 * p.up_row) + (lane & 7) * 16;
    }
    const i64 row = output + (lane & 7) + (ROW_TILES > 1 ? lane >> 4 : 0) * 8;
    const bf16_bits* scales = lane & 8 ? p.up_scale + expert * p.up_scale_expert + row * p.up_scale_row
                                       : p.gate_scale + expert * p.gate_scale_expert + row * p.gate_scale_row;
    const i64 sixteen = 16 * (lane & 8 ? p.up_scale_row : p.gate_scale_row);
#pragma unroll
    for (int two = 0; two < (ROW_TILES + 1) / 2; ++two)
      copies.scales[two] = reinterpret_cast<const unsigned char*>(scales + two * sixteen);
    copies.skip(split * (kInputs / 2), split * kGroups * 2);
  }
  // Rows of the tile's tokens, in the lanes.
  const int count = uniform(tile.end - tile.begin);
  const int row_here = lane < count ? p.order[tile.begin + lane] / p.K : 0;
  const int groups = p.hidden / 32;
  int copied = split;  // the turn whose copies are next
  const auto copy_next = [&](u32 stage) {
    copies.next(stage, lane);
    copies.skip((SPLITS - 1) * (kInputs / 2), (SPLITS - 1) * kGroups * 2);
    const u32 to = ring + stage + (lane >> 2) * kPiece + (lane & 3) * 16;
    const u32 to_begins = ring + stage + kTokenBytes + lane * TOKENS * 4;
#pragma unroll 1
    for (int k = beside; k < count; k += WIDE) {
      const i64 row = __shfl_sync(~0u, row_here, k);
      copy_16_always(to + k / 8 * kColumnBytes + k % 8 * 64,
                     p.ordered_x + row * p.hidden + copied * kInputs + lane * 8);
      if (lane < kGroups) copy_4(to_begins + k * 4, p.begins + row * groups + copied * kGroups + lane);
    }
    copied += SPLITS;
  };

  int ahead = 0;
#pragma unroll
  for (; ahead < STAGES - 1; ++ahead) {
    if (ahead < turns) copy_next(ahead * kRing);
    copies_commit();
  }
  u32 places[kGroups];
  word_places(places, lane);
  Quad sums[ROW_TILES][kColumns] = {};
  u32 stage = 0, next = (STAGES - 1) * kRing;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, ++ahead) {
    copies_wait<STAGES - 2>();
    turn_is_there(split);
    if (ahead < turns) copy_next(next);
    copies_commit();
    const u32 from = ring + stage + lane * 16, begin_at = ring + stage + kTokenBytes + 8 * t;
    const auto piece = [&](int j, int i) { return shared_16(from + j * kColumnBytes + i * kPiece); };
    const auto begin = [&](int j, int i) { return shared_8(begin_at + (i * TOKENS + j * 8) * 4); };
    multiply_turn<ROW_TILES>(sums, tiles + stage, places, lane, piece, begin);
    next = stage;
    stage = stage == (STAGES - 1) * kRing ? 0 : stage + kRing;
  }

  // The splits' sums in their order.
  if (SPLITS > 1) {
    copies_wait<0>();
    __syncthreads();
    float* shared = reinterpret_cast<float*>(smem);
    const auto place = [&](int s, int r, int j, int i) {
      return ((((s * WIDE + beside) * ROW_TILES + r) * kColumns + j) * 4 + i) * 32 + lane;
    };
    if (split > 0)
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) shared[place(split - 1, r, j, i)] = sums[r][j].x[i];
    __syncthreads();
    if (split > 0) return;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int s = 0; s < SPLITS - 1; ++s) sums[r][j].x[i] += shared[place(s, r, j, i)];
  }
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = tile.begin + j * 8 + 2 * t + i;
        const float gate = sums[r][j].x[i] * kUndo, up = sums[r][j].x[2 + i] * kUndo;
        const float h = gate / (1.0f + __expf(-gate)) * up;
        const float rounded = __uint_as_float(pack_bf16(0.0f, h));
        if (slot < tile.end)
          p.h[static_cast<i64>(slot) * p.inner + first_output + r * 8 + ordered(g)] =
              bf16_rounded(rounded * (g & 1 ? kOdd : kEven));
      }
}

extern "C" __global__ void __launch_bounds__(32 * DOWN_WARPS)
    down(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  constexpr int kRows = 16 * DOWN_ROW_TILES;  // outputs of a turn
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  // The table was there before gate_up let this grid start.
  const Tile tile(p, blockIdx.y);
  grid_let_next_start();
  if (tile.expert < 0) return;
  const int blocks = p.inner / kInputs;  // turns of the same outputs
  const int first_output = (blockIdx.x * DOWN_WARPS + warp) * DOWN_TURNS * kRows;
  const int turns = max(0, min(DOWN_TURNS, (p.hidden - first_output) / kRows)) * blocks;
  const u32 tokens = shared_address(smem), begins = tokens + blocks * kTokenBytes;
  const int begin_bytes = p.inner / 32 * TOKENS * 4;
  constexpr int kStage = DOWN_ROW_TILES * kTileBytes;
  const u32 ring = begins + begin_bytes + warp * DOWN_STAGES * kStage;

  Copies<DOWN_ROW_TILES> copies;
  copies.to = ring;
  copies.four_low = copies.four_high = 16 * p.down_row;
  {
    const i64 expert = tile.expert;
    const u32* row = p.down + expert * p.down_expert + (first_output + (lane >> 3)) * p.down_row;
    const bf16_bits* scales = p.down_scale + expert * p.down_scale_expert;
#pragma unroll
    for (int r = 0; r < DOWN_ROW_TILES; ++r) {
      copies.low[r] = reinterpret_cast<const unsigned char*>(row + r * 16 * p.down_row) + (lane & 7) * 16;
      copies.high[r] = copies.low[r] + 32 * p.down_row;
    }
#pragma unroll
    for (int two = 0; two < (DOWN_ROW_TILES + 1) / 2; ++two)
      copies.scales[two] = reinterpret_cast<const unsigned char*>(
          scales + (first_output + two * 32 + (DOWN_ROW_TILES > 1 ? lane : lane & 15)) * p.down_scale_row);
  }
  const i64 more_values = 4 * kRows * p.down_row - blocks * (kInputs / 2);
  const i64 more_scales = 2 * kRows * p.down_scale_row - blocks * kGroups * 2;
  int copied_block = 0;
  const auto copy_next = [&](u32 stage) {
    copies.next(stage, lane);
    if (++copied_block == blocks) {
      copied_block = 0;
      copies.skip(more_values, more_scales);
    }
  };
  int ahead = 0;
#pragma unroll
  for (; ahead < DOWN_STAGES - 1; ++ahead) {
    if (ahead < turns) copy_next(ahead * kStage);
    copies_commit();
  }

  grid_wait();
  float* begin_to = reinterpret_cast<float*>(smem + blocks * kTokenBytes);
  for (int at = warp; at < blocks * kColumns * kGroups; at += DOWN_WARPS) {
    const int block = at / (kColumns * kGroups), rest = at - block * kColumns * kGroups;
    const int j = rest / kGroups, i = rest - j * kGroups, slot = tile.begin + j * 8 + g;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (slot < tile.end)
      v = *reinterpret_cast<const uint4*>(p.h + static_cast<i64>(slot) * p.inner + block * kInputs +
                                          i * 32 + t * 8);
    const float begin = over_group(begin_of(v));
    *reinterpret_cast<uint4*>(smem + (block * kColumns * kGroups + rest) * kPiece + lane * 16) = v;
    if (t == 0) begin_to[(block * kGroups + i) * TOKENS + j * 8 + g] = begin;
  }
  i64 pairs[kColumns][2];
  float factors[kColumns][2];
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = tile.begin + j * 8 + 2 * t + i;
      const int pair = slot < tile.end ? p.order[slot] : 0;
      pairs[j][i] = slot < tile.end ? static_cast<i64>(pair) * p.hidden + first_output + g : -1;
      factors[j][i] = kUndo * p.weights[pair / p.K * p.weights_row + pair % p.K * p.weights_choice];
    }
  __syncthreads();

  u32 places[kGroups];
  word_places(places, lane);
  Quad sums[DOWN_ROW_TILES][kColumns] = {};
  u32 stage = 0, next = (DOWN_STAGES - 1) * kStage;
  int block = 0, done = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, ++ahead) {
    copies_wait<DOWN_STAGES - 2>();
    __syncwarp();
    if (ahead < turns) copy_next(next);
    copies_commit();
    const u32 from = tokens + block * kTokenBytes + lane * 16;
    const u32 begin_at = begins + (block * kGroups * TOKENS + 2 * t) * 4;
    const auto piece = [&](int j, int i) { return shared_16(from + j * kColumnBytes + i * kPiece); };
    const auto begin = [&](int j, int i) { return shared_8(begin_at + (i * TOKENS + j * 8) * 4); };
    multiply_turn<DOWN_ROW_TILES>(sums, ring + stage, places, lane, piece, begin);
    next = stage;
    stage = stage == (DOWN_STAGES - 1) * kStage ? 0 : stage + kStage;
    if (++block < blocks) continue;
    block = 0;
#pragma unroll
    for (int r = 0; r < DOWN_ROW_TILES; ++r)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (pairs[j][i % 2] >= 0)
            p.parts[pairs[j][i % 2] + done + r * 16 + i / 2 * 8] = sums[r][j].x[i] * factors[j][i % 2];
          sums[r][j].x[i] = 0.0f;
        }
    done += kRows;
  }
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Params p) {
  combine_parts(p);
}
