// y = act(x) W^T for a few rows in bfloat16: every weight is read once.
//
// A block owns ROWS outputs; its warps share their inputs, 64 at a time in turns. Weights are the rows
// of mma.m16n8k16 and tokens its columns, so that nine tokens are padded to sixteen and not to a
// tile; where outputs are few, eight of an instruction's rows stay empty, and more SMs read. Which
// inputs an instruction sums over is free as long as both operands agree: a thread takes 16 bytes in
// a row, eight inputs, of each of its rows and of each of its tokens, two instructions' worth.
//
// Weights, in lines of 128 bytes, come by asynchronous copies into a ring of STAGES turns that
// belongs to the warp that reads them; halves of odd rows are exchanged so that reads meet no bank
// twice. The first turns are asked for before the grid ahead has ended (programmatic launch): weights
// are nobody's result. Tokens come beside them; those that are gated first lie in shared memory ready
// to be multiplied, CHUNK inputs of all of them at a time. Sums are in float32; those of the warps are
// added in their order, so that results repeat to the bit.
//
// act: nothing · NORM: x * norm_weight, rounded, and one over the root mean square of x onto the sum,
// which is known when all inputs have passed · GATED: silu(gate) * up of x = [gate | up], rounded where
// PyTorch rounds, both read as float32 where FLOAT_X.
//
// GATES: half of a block's rows are of the gate, half the same ones of what it gates, which lie N rows
// further; what the block stores is silu(gate) * up of both sums.
//
// Macros: TOKENS, 8 to 32 · WARPS · ROWS, of a block: 8, 16 or 32 · STAGES, of at least 2 · CHUNK: a multiple of
// 64 * WARPS, of no meaning but for GATED · NORM, GATED, GATES, FLOAT_X, FLOAT_OUT: 0 or 1.
#include "mma.cuh"

static_assert(STAGES >= 2, "a turn is read while the next one is copied");

constexpr int kColumns = TOKENS / 8;
constexpr int kTiles = ROWS > 16 ? 2 : 1;
constexpr bool kIsHalf = ROWS == 8;
constexpr int kOutputs = GATES ? ROWS / 2 : ROWS;
constexpr int kThreads = 32 * WARPS;
constexpr int kTurn = 64;         // inputs
constexpr int kRow = kTurn * 2;   // bytes
constexpr int kWeightBytes = ROWS * kRow, kTokenBytes = TOKENS * kRow;  // of a turn
constexpr int kStage = kWeightBytes + (GATED ? 0 : kTokenBytes);        // of a warp
constexpr int kReadyBytes = GATED ? CHUNK / kTurn * kTokenBytes : 0;
constexpr int kPieces = GATED ? (FLOAT_X ? 4 : 2) : 1;  // of 16 bytes that make eight inputs of x

struct Params {
  const void* x;               // [H, M, inputs], GATED: [H, M, 2 * inputs]
  const bf16_bits* weight;     // [H, N, inputs], GATES: [H, 2 * N, inputs]
  const bf16_bits* norm;       // [inputs], NORM
  void* out;                   // [H, M, N]
  i64 x_head, x_row, weight_head, weight_row, out_head, out_row;
  int M, N, inputs;
  float eps;
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The pair as two numbers rounded to bfloat16.
__device__ __forceinline__ void round_both(float& low, float& high) {
  const u32 pair = pack_bf16(low, high);
  low = low_of(pair);
  high = high_of(pair);
}

__device__ __forceinline__ u32 product(u32 pair, u32 weights) {
  return pack_bf16(low_of(pair) * low_of(weights), high_of(pair) * high_of(weights));
}

__device__ __forceinline__ float square(u32 pair) {
  return low_of(pair) * low_of(pair) + high_of(pair) * high_of(pair);
}

__device__ __forceinline__ u32 gated(float gate0, float gate1, float up0, float up1) {
  round_both(gate0, gate1);
  round_both(up0, up1);
  float low = gate0 / (1.0f + __expf(-gate0)), high = gate1 / (1.0f + __expf(-gate1));
  round_both(low, high);
  return pack_bf16(low * up0, high * up1);
}

// Eight inputs of one token, GATED, as they lie in memory.
struct Piece {
  uint4 words[kPieces];

  __device__ __forceinline__ void load(const char* row, int input, int inputs) {
    constexpr int kSize = FLOAT_X ? 4 : 2;
    const uint4* gate = reinterpret_cast<const uint4*>(row + static_cast<i64>(input) * kSize);
    const uint4* up = reinterpret_cast<const uint4*>(row + static_cast<i64>(inputs + input) * kSize);
#pragma unroll
    for (int i = 0; i < kPieces / 2; i++) {
      words[i] = gate[i];
      words[kPieces / 2 + i] = up[i];
    }
  }

  // The inputs of the products.
  __device__ __forceinline__ uint4 value() const {
    if constexpr (FLOAT_X) {
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
    } else {
      const uint4 &g = words[0], &u = words[kPieces - 1];
      return make_uint4(gated(low_of(g.x), high_of(g.x), low_of(u.x), high_of(u.x)),
                        gated(low_of(g.y), high_of(g.y), low_of(u.y), high_of(u.y)),
                        gated(low_of(g.z), high_of(g.z), low_of(u.z), high_of(u.z)),
                        gated(low_of(g.w), high_of(g.w), low_of(u.w), high_of(u.w)));
    }
  }
};

// Where piece `piece` of a turn of a row lies, from the turn's begin on.
__device__ __forceinline__ int place(int row, int piece) {
  return row * kRow + ((piece ^ ((row & 1) << 2)) << 4);
}

// Write the inputs [begin, begin + CHUNK) of all tokens, ready to be multiplied, turn by turn.
__device__ __forceinline__ void make_ready(const Params& p, const char* x, unsigned char* to,
                                           int begin) {
  const int pieces = (min(CHUNK, p.inputs - begin) + kTurn - 1) / kTurn * 8;
  for (int i = threadIdx.x; i < p.M * pieces; i += kThreads) {
    const int token = i / pieces, piece = i - token * pieces, input = begin + piece * 8;
    uint4 value = make_uint4(0, 0, 0, 0);  // the last turn may have half its inputs
    if (input < p.inputs) {
      Piece raw;
      raw.load(x + token * p.x_row * (FLOAT_X ? 4 : 2), input, p.inputs);
      value = raw.value();
    }
    *reinterpret_cast<uint4*>(to + piece / 8 * kTokenBytes + place(token, piece % 8)) = value;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    skinny_linear(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = lane >> 2, own = lane & 3;     // row or column of a fragment, and place in it
  const int copied = lane >> 3, piece = lane & 7;  // row, of four, and piece that this lane copies
  const int first = blockIdx.x * kOutputs, head = blockIdx.y;
  const char* x = static_cast<const char*>(p.x) + head * p.x_head * (FLOAT_X ? 4 : 2);
  const u32 ring = shared_address(smem) + kReadyBytes + warp * STAGES * kStage;

  const bf16_bits* rows[ROWS / 4];
#pragma unroll
  for (int n = 0; n < ROWS / 4; ++n) {
    const bool is_up = 4 * n >= kOutputs;
    const int row = first + 4 * n + copied - (is_up ? kOutputs : 0);
    const int kept = (row < p.N ? row : p.N - 1) + (is_up ? p.N : 0);  // beyond the last: not stored
    rows[n] = p.weight + head * p.weight_head + kept * p.weight_row + piece * 8;
  }
  const auto input_of = [&](int turn) { return (warp + turn * WARPS) * kTurn; };
  const auto copy_weights = [&](u32 stage, int turn) {
    const int input = input_of(turn);
    const u32 live = input + piece * 8 < p.inputs ? 16 : 0;
#pragma unroll
    for (int n = 0; n < ROWS / 4; ++n)
      copy_16(ring + stage + n * 4 * kRow + place(copied, piece), rows[n] + (live ? input : 0), live);
  };
  const auto copy_tokens = [&](u32 stage, int turn) {
    if (GATED) return;
    const int input = input_of(turn) + piece * 8;
#pragma unroll
    for (int n = 0; n < TOKENS / 4; ++n) {
      const int token = 4 * n + copied;
      const bool is_live = token < p.M && input < p.inputs;
      if (4 * n < p.M)
        copy_16(ring + stage + kWeightBytes + n * 4 * kRow + place(copied, piece),
                x + (is_live ? token * p.x_row + input : 0) * 2, is_live ? 16 : 0);
    }
  };

  const int all_turns = (p.inputs + kTurn - 1) / kTurn;
  const int turns = (all_turns - warp + WARPS - 1) / WARPS;  // of this warp
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s)
    if (s < turns) copy_weights(s * kStage, s);
  grid_wait();
  grid_let_next_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < turns) copy_tokens(s * kStage, s);
    copies_commit();
  }

  float sum[kTiles][kColumns][4] = {}, squares[kColumns] = {};
  u32 stage = 0, next = (STAGES - 1) * kStage;
  const int here = place(group, own);
  const auto multiply_turn = [&](u32 tokens, const uint4 (&norms)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 a[kTiles], b[kTiles];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        const u32 at = ring + stage + r * 16 * kRow + (here ^ (half * 64));
        a[r] = shared_16(at);
        b[r] = kIsHalf ? make_uint4(0, 0, 0, 0) : shared_16(at + (kIsHalf ? 0 : 8 * kRow));
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        uint4 v = shared_16(tokens + c * 8 * kRow + (here ^ (half * 64)));
        if constexpr (NORM) {
          const uint4& n = norms[half];
          squares[c] += square(v.x) + square(v.y) + square(v.z) + square(v.w);
          v = make_uint4(product(v.x, n.x), product(v.y, n.y), product(v.z, n.z), product(v.w, n.w));
        }
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          multiply_add(sum[r][c], a[r].x, b[r].x, a[r].y, b[r].y, v.x, v.y);
          multiply_add(sum[r][c], a[r].z, b[r].z, a[r].w, b[r].w, v.z, v.w);
        }
      }
    }
  };
  const auto take_turn = [&](int turn, u32 ready) {
    uint4 norms[2];  // of this lane's inputs in both halves; where inputs end tokens are zero
    if constexpr (NORM) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int input = input_of(turn) + (own + 4 * half) * 8;
        norms[half] = *reinterpret_cast<const uint4*>(p.norm + (input < p.inputs ? input : 0));
      }
    }
    copies_wait<STAGES - 2>();
    __syncwarp();
    if (turn + STAGES - 1 < turns) {
      copy_weights(next, turn + STAGES - 1);
      copy_tokens(next, turn + STAGES - 1);
    }
    copies_commit();
    multiply_turn(GATED ? ready : ring + stage + kWeightBytes, norms);
    next = stage;
    stage = stage == (STAGES - 1) * kStage ? 0 : stage + kStage;
  };
  if constexpr (GATED) {
    constexpr int kChunkTurns = CHUNK / kTurn / WARPS;  // of a warp
    for (int begin = 0, turn = 0; begin < p.inputs; begin += CHUNK) {
      __syncthreads();
      make_ready(p, x, smem, begin);
      __syncthreads();
      for (int i = 0; i < kChunkTurns && turn < turns; ++i, ++turn)
        take_turn(turn, shared_address(smem) + (i * WARPS + warp) * kTokenBytes);
    }
  } else {
    for (int turn = 0; turn < turns; ++turn) take_turn(turn, 0);
  }

  copies_wait<0>();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(smem);  // [WARPS, TOKENS, ROWS]
  float* all_squares = sums + WARPS * TOKENS * ROWS;  // [WARPS, TOKENS]
  if constexpr (NORM) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      squares[c] += __shfl_xor_sync(0xFFFFFFFFu, squares[c], 1);
      squares[c] += __shfl_xor_sync(0xFFFFFFFFu, squares[c], 2);
      if (own == 0) all_squares[warp * TOKENS + 8 * c + group] = squares[c];
    }
  }
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * c + 2 * own + (i & 1), row = 16 * r + group + 8 * (i >> 1);
        if (!kIsHalf || i < 2) sums[(warp * TOKENS + token) * ROWS + row] = sum[r][c][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.M * kOutputs; i += kThreads) {
    const int token = i / kOutputs, row = first + i % kOutputs;
    float total = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float* sum = sums + (w * TOKENS + token) * ROWS + i % kOutputs;
      total += sum[0];
      if (GATES) up += sum[kOutputs];
    }
    if constexpr (NORM) {
      float all = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) all += all_squares[w * TOKENS + token];
      total *= rsqrtf(all / p.inputs + p.eps);
    }
    if (GATES) total = low_of(gated(total, 0.0f, up, 0.0f));
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
