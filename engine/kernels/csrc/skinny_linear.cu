// y = act(x) W^T for a few rows in bfloat16: every weight is read once, straight into the registers
// of the matrix instruction that multiplies it.
//
// A block owns 16 * ROW_TILES outputs, its warps share their inputs, 32 at a time in turns. Weights
// are the rows of mma.m16n8k16 and tokens its columns, so that nine tokens are padded to sixteen
// and not to a tile. Which inputs an instruction sums over is free as long as both operands agree: a
// thread takes 16 bytes in a row, eight inputs, of each of its rows and of each of its tokens, and
// they are two instructions' worth.
//
// kAhead turns of weights are on their way at any time. The first of them are asked for before the
// grid ahead has ended (programmatic launch): weights are nobody's result. Sums are in float32; those
// of the warps are added in their order, so that results repeat to the bit.
//
// act: nothing · NORM: RMS(x) * norm_weight · GATED: silu(gate) * up of x = [gate | up], rounded
// where PyTorch rounds, both read as float32 where FLOAT_X.
//
// Macros: TOKENS, 8 to 32 · WARPS, 1 to 8 · ROW_TILES · NORM, GATED, FLOAT_X, FLOAT_OUT: 0 or 1.
#include "ptx.cuh"

constexpr int kColumns = TOKENS / 8;
constexpr int kRows = 16 * ROW_TILES;
constexpr int kThreads = 32 * WARPS;
constexpr int kPieces = GATED ? (FLOAT_X ? 4 : 2) : 1;  // of 16 bytes that make eight inputs of x
constexpr int kTurnRegisters = 8 * ROW_TILES + 4 * kColumns * kPieces + 4 * NORM;
// Of what is on its way, beside the sums and what a gate takes.
constexpr int kRegisters = 104 - 4 * ROW_TILES * kColumns - 16 * GATED;
constexpr int kFit = kRegisters / kTurnRegisters;
constexpr int kAhead = kFit < 1 ? 1 : (kFit > 8 ? 8 : kFit);

struct Params {
  const void* x;               // [H, M, inputs], GATED: [H, M, 2 * inputs]
  const bf16_bits* weight;     // [H, N, inputs]
  const bf16_bits* norm;       // [inputs], NORM
  void* out;                   // [H, M, N]
  i64 x_head, x_row, weight_head, weight_row, out_head, out_row;
  int M, N, inputs;
  float eps;
};

__device__ __forceinline__ uint4 load_weights(const bf16_bits* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The pair as two numbers rounded to bfloat16.
__device__ __forceinline__ void round_both(float& low, float& high) {
  const u32 pair = pack_bf16(low, high);
  low = low_of(pair);
  high = high_of(pair);
}

__device__ __forceinline__ u32 normed(u32 pair, float scale, u32 weights) {
  return pack_bf16(low_of(pair) * scale * low_of(weights), high_of(pair) * scale * high_of(weights));
}

__device__ __forceinline__ u32 gated(float gate0, float gate1, float up0, float up1) {
  round_both(gate0, gate1);
  round_both(up0, up1);
  float low = gate0 / (1.0f + __expf(-gate0)), high = gate1 / (1.0f + __expf(-gate1));
  round_both(low, high);
  return pack_bf16(low * up0, high * up1);
}

// Eight inputs of one token as they lie in memory.
struct Piece {
  uint4 words[kPieces];

  __device__ __forceinline__ void load(const char* row, int input, int inputs) {
    if constexpr (GATED) {
      constexpr int kSize = FLOAT_X ? 4 : 2;
      const uint4* gate = reinterpret_cast<const uint4*>(row + static_cast<i64>(input) * kSize);
      const uint4* up = reinterpret_cast<const uint4*>(row + static_cast<i64>(inputs + input) * kSize);
#pragma unroll
      for (int i = 0; i < kPieces / 2; i++) {
        words[i] = gate[i];
        words[kPieces / 2 + i] = up[i];
      }
    } else {
      words[0] = *reinterpret_cast<const uint4*>(row + static_cast<i64>(input) * 2);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPieces; i++) words[i] = make_uint4(0, 0, 0, 0);
  }

  // The inputs of the products.
  __device__ __forceinline__ uint4 value(float scale, const uint4& norm) const {
    if constexpr (NORM) {
      return make_uint4(normed(words[0].x, scale, norm.x), normed(words[0].y, scale, norm.y),
                        normed(words[0].z, scale, norm.z), normed(words[0].w, scale, norm.w));
    } else if constexpr (GATED && FLOAT_X) {
      const uint4 &g = words[0], &h = words[kPieces / 4], &u = words[kPieces / 2],
                  &v = words[kPieces - 1];
      return make_uint4(gated(__uint_as_float(g.x), __uint_as_float(g.y), __uint_as_float(u.x),
                              __uint_as_float(u.y)),
                        gated(__uint_as_float(g.z), __uint_as_float(g.w), __uint_as_float(u.z),
                              __uint_as_float(u.w)),
                        gated(__uint_as_float(h.x), __uint_as_float(h.y), __uint_as_float(v.x),
                              __uint_as_float(v.y)),
                        gated(__uint_as_float(h.z), __uint_as_float(h.w), __uint_as_float(v.z),
                              __uint_as_float(v.w)));
    } else if constexpr (GATED) {
      const uint4 &g = words[0], &u = words[kPieces - 1];
      return make_uint4(gated(low_of(g.x), high_of(g.x), low_of(u.x), high_of(u.x)),
                        gated(low_of(g.y), high_of(g.y), low_of(u.y), high_of(u.y)),
                        gated(low_of(g.z), high_of(g.z), low_of(u.z), high_of(u.z)),
                        gated(low_of(g.w), high_of(g.w), low_of(u.w), high_of(u.w)));
    } else {
      return words[0];
    }
  }
};

// Write one over the root mean square of each token, [TOKENS].
__device__ __forceinline__ void measure(const Params& p, const char* x, float* scales, int warp,
                                        int lane) {
  for (int token = warp; token < p.M; token += WARPS) {
    const uint4* row = reinterpret_cast<const uint4*>(x + token * p.x_row * 2);
    float sum = 0.0f;
    for (int i = lane; i < p.inputs / 8; i += 32) {
      const uint4 v = row[i];
      sum += low_of(v.x) * low_of(v.x) + high_of(v.x) * high_of(v.x);
      sum += low_of(v.y) * low_of(v.y) + high_of(v.y) * high_of(v.y);
      sum += low_of(v.z) * low_of(v.z) + high_of(v.z) * high_of(v.z);
      sum += low_of(v.w) * low_of(v.w) + high_of(v.w) * high_of(v.w);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (lane == 0) scales[token] = rsqrtf(sum / p.inputs + p.eps);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 16 / WARPS)
    skinny_linear(const __grid_constant__ Params p) {
  __shared__ float sums[WARPS * TOKENS * kRows];
  __shared__ float scales[TOKENS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = lane >> 2, own = lane & 3;  // row or column of a fragment, and place in it
  const int first = blockIdx.x * kRows, head = blockIdx.y;
  const char* x = static_cast<const char*>(p.x) + head * p.x_head * (FLOAT_X ? 4 : 2);
  const bf16_bits* weight = p.weight + head * p.weight_head + own * 8;

  const bf16_bits* rows[ROW_TILES][2];
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first + 16 * r + 8 * half + group;
      rows[r][half] = weight + (row < p.N ? row : p.N - 1) * p.weight_row;  // not stored beyond
    }
  }

  const int turns = (p.inputs / 32 - warp + WARPS - 1) / WARPS;  // of this warp
  uint4 a[kAhead][ROW_TILES][2];
  uint4 norm[NORM ? kAhead : 1];
  Piece b[kAhead][kColumns];
  auto input_of = [&](int turn) { return (warp + turn * WARPS) * 32; };
  auto ask_weights = [&](int slot, int turn) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      a[slot][r][0] = load_weights(rows[r][0] + input_of(turn));
      a[slot][r][1] = load_weights(rows[r][1] + input_of(turn));
    }
    if constexpr (NORM) norm[slot] = load_weights(p.norm + own * 8 + input_of(turn));
  };
  auto ask_tokens = [&](int slot, int turn) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int token = 8 * c + group;
      if (token < p.M) {
        const char* row = x + token * p.x_row * (FLOAT_X ? 4 : 2);
        b[slot][c].load(row, input_of(turn) + own * 8, p.inputs);
      } else {
        b[slot][c].clear();
      }
    }
  };

#pragma unroll
  for (int slot = 0; slot < kAhead; slot++) {
    if (slot < turns) ask_weights(slot, slot);
  }
  grid_wait();
  grid_let_next_start();
#pragma unroll
  for (int slot = 0; slot < kAhead; slot++) {
    if (slot < turns) ask_tokens(slot, slot);
  }
  if constexpr (NORM) measure(p, x, scales, warp, lane);
  float scale[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; c++) scale[c] = NORM && 8 * c + group < p.M ? scales[8 * c + group] : 0.0f;

  float sum[ROW_TILES][kColumns][4] = {};
  for (int base = 0; base < turns; base += kAhead) {
#pragma unroll
    for (int slot = 0; slot < kAhead; slot++) {
      const int turn = base + slot;
      if (turn < turns) {
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          const uint4 v = b[slot][c].value(scale[c], norm[NORM ? slot : 0]);
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++) {
            const uint4 &low = a[slot][r][0], &high = a[slot][r][1];
            multiply(sum[r][c], low.x, high.x, low.y, high.y, v.x, v.y);
            multiply(sum[r][c], low.z, high.z, low.w, high.w, v.z, v.w);
          }
        }
        if (turn + kAhead < turns) {
          ask_weights(slot, turn + kAhead);
          ask_tokens(slot, turn + kAhead);
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 8 * c + 2 * own + (i & 1), row = 16 * r + group + 8 * (i >> 1);
        sums[(warp * TOKENS + token) * kRows + row] = sum[r][c][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.M * kRows; i += kThreads) {
    const int token = i / kRows, row = first + i % kRows;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w * TOKENS * kRows + i];
    const i64 at = head * p.out_head + token * p.out_row + row;
    if (row < p.N) {
      if constexpr (FLOAT_OUT) {
        static_cast<float*>(p.out)[at] = total;
      } else {
        static_cast<bf16_bits*>(p.out)[at] = static_cast<bf16_bits>(pack_bf16(total, 0.0f));
      }
    }
  }
}
