// Tree attention over paged latent rows, for sm_90a: S^T = K Q^T, O^T = V^T P^T.
//
// Tree tokens and heads are packed into rows, and the rows stand in the N of the matrix
// instructions, which comes in steps of 8: 72 rows cost 72, where a kernel with the rows in M pays
// for 128. A tile is 64 consecutive cached rows, keys in the M of the first product and the K of
// the second; it lies in shared memory once, read as K-major keys and as M-major values.
//
// Grid: one block an SM. The tiles of all (sequence, block of rows) items are laid in one line and
// cut into equal shares, one a block; a block finds its share from the lengths on the device, so
// nothing depends on a length known to the host and a captured graph can be replayed at any lengths.
// The tiles of a sequence are cut into chunks as long as a share, and the line runs chunk by chunk:
// the runs of one chunk, one a block of rows, are worked on at the same time, and what the first
// reads from memory the others find in L2. An item that one block holds whole is written at once;
// the parts of the others are partial results in bfloat16, normalised, which `merge` weighs in
// float32 and in a fixed order.
//
// Warpgroups (128 threads each):
//   0 loads     tiles, 16 bytes a thread and copy (cp.async), zeros for rows that are not live; any
//               page size, page ids asked one tile ahead
//   1 scores    the queries of an item; 64 x ROWS scores of a tile, softmax, weights to shared memory
//   2, 3 values 256 value dims each, O^T in registers
//
// Shared memory: queries ROWS x 576 | values 2 x 64 x 512 | rope ROPE_STAGES x 64 x 64 |
// weights 64 x ROWS | decays, peaks | barriers; queries, values and rope in chunks of 64 dims whose
// rows of 128 bytes are swizzled by 128, weights in 8 x 8 matrices. While an item ends, its rows lie
// in place of the queries on their way out.
// Barriers, each with a full and an empty side: a pair of value chunks of a stage (chunk j of either
// half of the value dims), the rope chunk of a rope stage, the weights; and one for the queries'
// place. A tile is loaded and given back pair by pair, so that the next but one is on its way while
// half of it is in use.
//
// A row's shift is its running maximum, raised only when a score exceeds it by RISE (weights stay
// below 2^RISE): most tiles then need neither an exchange between warps nor a rescaling of O^T.
//
// Source of the ideas: DeepSeek FlashMLA docs/20250422-new-kernel-deep-dive.md (value from the key
// tile, split output), flashinfer include/flashinfer/attention/mla_hopper.cuh (page ids one tile
// ahead), FlashAttention-4 (rescaling only beyond a threshold), ThunderMLA (no host schedule).
//
// Compile-time: ROWS (8..72, a multiple of 8), PAGE_SIZE, HYBRID (tree rows beside the pages),
// SHARED_BYTES (what the launch asks for, to be compared).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bf16_bits;

#ifndef ROWS
#define ROWS 72
#endif
#ifndef PAGE_SIZE
#define PAGE_SIZE 1
#endif
#ifndef HYBRID
#define HYBRID 0
#endif

constexpr int kValueDim = 512;
constexpr int kRowDim = 576;
constexpr int kKeys = 64;                      // cached rows of a tile: the M of an instruction
constexpr int kChunks = kRowDim / 64;          // chunks of 64 dims; the last one is rope
constexpr int kValueChunks = kValueDim / 64;
constexpr int kChunkBytes = kKeys * 128;
constexpr int kQueryChunkBytes = ROWS * 128;
constexpr int kStages = 2;
constexpr int kPairs = kValueChunks / 2;       // chunk j of the first and of the second half
constexpr int kRopeStages = ROWS > 64 ? 1 : 2;  // 72 rows leave room for one
constexpr int kGroups = ROWS / 8;              // groups of 8 rows (columns of the accumulators)
constexpr int kScores = ROWS / 2;              // accumulator registers of 64 x ROWS a thread
constexpr int kColumns = ROWS / 4;             // columns a thread holds scores of
constexpr int kMostPlaces = 1024;              // partial results of a row: twice the grid
constexpr float kRise = 8.0f;                  // RISE, in powers of two
constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity __int_as_float(0x7f800000)

constexpr int kOutPitch = kValueDim * 2 + 16;   // bytes of a row on its way out; no two share banks

constexpr int kQueryOffset = 0;
constexpr int kValueOffset = kQueryOffset + kChunks * kQueryChunkBytes;
constexpr int kRopeOffset = kValueOffset + kStages * kValueChunks * kChunkBytes;
constexpr int kWeightOffset = kRopeOffset + kRopeStages * kChunkBytes;
constexpr int kDecayOffset = kWeightOffset + kGroups * 1024;
constexpr int kPeakOffset = kDecayOffset + ROWS * 4;
constexpr int kFlagOffset = kPeakOffset + ROWS * 4;
constexpr int kBarrierOffset = (kFlagOffset + 4 + 7) / 8 * 8;
constexpr int kNumBarriers = 23;
constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
static_assert(ROWS % 8 == 0 && ROWS >= 8 && ROWS <= 72, "rows of a block: 8..72 in steps of 8");
static_assert(ROWS * kOutPitch <= kValueOffset, "rows on their way out, in place of the queries");
static_assert(kSharedBytes <= 232448, "shared memory of a block on sm_90");
#ifdef SHARED_BYTES
static_assert(kSharedBytes == SHARED_BYTES, "shared memory the launch asks for");
#endif

struct Params {
  const bf16_bits* q;          // [N, T, H, 576]
  const bf16_bits* kv_pages;   // [P, L, 576]
  const bf16_bits* tree_kv;    // [N, T, 576] where HYBRID, else null
  const int* page_table;       // [N, max_pages]
  const void* context_lens;    // [N] int32, or int64 where wide_context
  const void* tree_sizes;      // [N] int32, or int64 where wide_tree
  const int* ancestor_bits;    // [N, T, W]
  bf16_bits* out;              // [N, T, H, 512]
  float* lse;                  // [N, T, H]
  bf16_bits* partial_out;      // [4 * grid + 2, ROWS, 512]
  float* partial_lse;          // [4 * grid + 2, ROWS]
  i64 q_sequence, q_token, q_head, page, page_row, table_sequence, bits_sequence, bits_token;
  i64 tree_sequence, tree_row, out_sequence, out_token, out_head;
  i64 lse_sequence, lse_token, lse_head;
  int N, T, H, num_blocks;     // num_blocks: grid of the attention kernel
  int wide_context, wide_tree;
  float scale;                 // softmax_scale * log2(e)
};

// ---- small device functions -------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive once every copy this thread has started so far is in shared memory.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 live_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(live_bytes)
               : "memory");
}

// True in every thread of the warpgroup iff `mine` is in one of them; also a barrier among them.
__device__ __forceinline__ bool any_in_warpgroup(bool mine) {
  int result;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred any, 1, 128, mine;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}"
      : "=r"(result)
      : "r"(static_cast<int>(mine))
      : "memory");
  return result != 0;
}

__device__ __forceinline__ void warpgroup_barrier() {
  asm volatile("barrier.cta.sync 1, 128;" ::: "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ int length_at(const void* lengths, int index, int is_wide) {
  return is_wide ? static_cast<int>(static_cast<const i64*>(lengths)[index])
                 : static_cast<const int*>(lengths)[index];
}

// The same number, which the compiler knows nothing about: what depends on it is not computed ahead
// of a loop and kept in registers that the loop needs.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A number that is the same in all lanes, in a form the compiler knows to be: matrix instructions
// behind a branch that may diverge are run one by one.
__device__ __forceinline__ int uniform(int x) {
  return static_cast<int>(__reduce_max_sync(~0u, static_cast<u32>(x)));
}

// Matrix descriptors. Offsets in bytes; `mode` 1 is the 128-byte swizzle, 0 none.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride, u64 mode) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | mode << 62;
}

// ---- matrix instructions, 64 x ROWS x 16 ---------------------------------------------------------

#define L8 "%0,%1,%2,%3"
#define L16 L8 ",%4,%5,%6,%7"
#define L24 L16 ",%8,%9,%10,%11"
#define L32 L24 ",%12,%13,%14,%15"
#define L40 L32 ",%16,%17,%18,%19"
#define L48 L40 ",%20,%21,%22,%23"
#define L56 L48 ",%24,%25,%26,%27"
#define L64 L56 ",%28,%29,%30,%31"
#define L72 L64 ",%32,%33,%34,%35"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8 D4(0)
#define D16 D8, D4(4)
#define D24 D16, D4(8)
#define D32 D24, D4(12)
#define D40 D32, D4(16)
#define D48 D40, D4(20)
#define D56 D48, D4(24)
#define D64 D56, D4(28)
#define D72 D64, D4(32)
#define I8(x) x("%4", "%5", "%6")
#define I16(x) x("%8", "%9", "%10")
#define I24(x) x("%12", "%13", "%14")
#define I32(x) x("%16", "%17", "%18")
#define I40(x) x("%20", "%21", "%22")
#define I48(x) x("%24", "%25", "%26")
#define I56(x) x("%28", "%29", "%30")
#define I64(x) x("%32", "%33", "%34")
#define I72(x) x("%36", "%37", "%38")
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define SHAPE "wgmma.mma_async.sync.aligned.m64n" TEXT(ROWS) "k16.f32.bf16.bf16 {"
#define SCORES_CALL(a, b, keep)                                                                  \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n" SHAPE JOIN(L, ROWS) "}, " a ", " b      \
  ", keep, 1, 1, 0, 0;\n}"
#define VALUES_CALL(a, b, keep)                                                                  \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n" SHAPE JOIN(L, ROWS) "}, " a ", " b      \
  ", keep, 1, 1, 1, 1;\n}"

// d = a b + (keep ? d : 0), both operands K-major.
__device__ __forceinline__ void multiply_scores(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(SCORES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

// The same, a M-major and b N-major.
__device__ __forceinline__ void multiply_values(float (&d)[kScores], u64 a, u64 b, int keep) {
  asm volatile(JOIN(I, ROWS)(VALUES_CALL) : JOIN(D, ROWS) : "l"(a), "l"(b), "r"(keep));
}

__device__ __forceinline__ void matrix_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void matrix_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most `kPending` of the committed groups are under way.
template <int kPending>
__device__ __forceinline__ void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- the schedule --------------------------------------------------------------------------------

// One sequence. Counts fit an int: 2^31 tiles, whichever blocks copy them, are 158 TB of rows.
struct Sequence {
  int index, context_len, tree_size;
  int tiles, blocks;  // tiles of an item, items
  int begin;          // of its first tile on the line
  int order;          // runs before it of items that have several
};

// How the line is cut.
struct Line {
  int total, share;  // tiles; tiles of a block of the grid and of a chunk

  // All lanes of a warp together.
  __device__ __forceinline__ explicit Line(const Params& p) {
    const int lane = threadIdx.x & 31;
    total = 0;
    for (int n = lane; n < p.N; n += 32) {
      const int tree_size = length_at(p.tree_sizes, n, p.wide_tree);
      const int context_len = length_at(p.context_lens, n, p.wide_context);
      total += blocks_of(p, tree_size) * tiles_of(context_len, tree_size);
    }
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    total = uniform(total);
    share = max((total + p.num_blocks - 1) / p.num_blocks, 1);
  }

  __device__ __forceinline__ static int blocks_of(const Params& p, int tree_size) {
    return (tree_size * p.H + ROWS - 1) / ROWS;
  }

  __device__ __forceinline__ static int tiles_of(int context_len, int tree_size) {
    return (context_len + kKeys - 1) / kKeys + (tree_size + kKeys - 1) / kKeys;
  }

  // All lanes together: the sequence that holds tile `position`, or sequence `wanted` where position
  // is negative.
  __device__ __forceinline__ Sequence find(const Params& p, int position, int wanted) const {
    const int lane = threadIdx.x & 31;
    int base = 0, order_base = 0;
    for (int first = 0; first < p.N; first += 32) {
      const int n = first + lane;
      int tree_size = 0, context_len = 0, tiles = 0, blocks = 0;
      if (n < p.N) {
        tree_size = length_at(p.tree_sizes, n, p.wide_tree);
        context_len = length_at(p.context_lens, n, p.wide_context);
        tiles = tiles_of(context_len, tree_size);
        blocks = blocks_of(p, tree_size);
      }
      const int own = blocks * tiles;
      const int own_runs = tiles > share ? blocks * ((tiles + share - 1) / share) : 0;
      int end = own, order_end = own_runs;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, end, step);
        const int order_before = __shfl_up_sync(~0u, order_end, step);
        if (lane >= step) {
          end += before;
          order_end += order_before;
        }
      }
      end += base;
      order_end += order_base;
      const bool is_it = position < 0 ? n == wanted : position >= end - own && position < end;
      const u32 found = __ballot_sync(~0u, is_it);
      if (found) {
        const int from = __ffs(found) - 1;
        Sequence sequence;
        sequence.index = first + from;
        sequence.context_len = uniform(__shfl_sync(~0u, context_len, from));
        sequence.tree_size = uniform(__shfl_sync(~0u, tree_size, from));
        sequence.tiles = uniform(__shfl_sync(~0u, tiles, from));
        sequence.blocks = uniform(__shfl_sync(~0u, blocks, from));
        sequence.begin = uniform(__shfl_sync(~0u, end - own, from));
        sequence.order = uniform(__shfl_sync(~0u, order_end - own_runs, from));
        return sequence;
      }
      base = __shfl_sync(~0u, end, 31);
      order_base = __shfl_sync(~0u, order_end, 31);
    }
    return Sequence{0, 0, 0, 0, 0, 0, 0};
  }

  // Slot of the partial result of the piece at `position`, part of run `run` of the sequence. A later
  // piece lies with a later block, or is not the first of its block, or has more runs before it.
  __device__ __forceinline__ i64 slot(const Sequence& sequence, int run, int position) const {
    const int grid_block = position / share;
    const int order = sequence.order + (sequence.tiles > share ? run : 0);
    return 2 * grid_block + (position > grid_block * share) + order;
  }
};

// What one block does of one item: tiles [first, last) for rows [row, row + ROWS).
struct Piece {
  Sequence sequence;
  int row, first, last;
  bool is_whole;
  int slot;  // of the partial result where it is not whole
};

// The pieces of this block, one after the other.
struct Run {
  Line line;
  int position, end;

  __device__ __forceinline__ explicit Run(const Params& p) : line(p) {
    position = min(static_cast<int>(blockIdx.x) * line.share, line.total);
    end = min(position + line.share, line.total);
  }

  __device__ __forceinline__ bool next(const Params& p, Piece& piece) {
    if (position >= end) return false;
    piece.sequence = line.find(p, position, -1);
    const int tiles = piece.sequence.tiles, blocks = piece.sequence.blocks;
    const int inside = position - piece.sequence.begin;
    // A share may be many times a sequence, and times its blocks beyond an int.
    const int chunk = inside / (min(line.share, tiles) * blocks), first = chunk * line.share;
    const int length = min(line.share, tiles - first), in_chunk = inside - first * blocks;
    const int block = in_chunk / length, done = in_chunk - block * length;
    piece.row = uniform(block * ROWS);
    piece.first = uniform(first + done);
    piece.last = uniform(min(first + length, piece.first + end - position));
    piece.is_whole = piece.first == 0 && piece.last == tiles;
    piece.slot = line.slot(piece.sequence, chunk * blocks + block, position);
    position += piece.last - piece.first;
    return true;
  }
};

// ---- roles ---------------------------------------------------------------------------------------

struct Barriers {
  u32 base;

  __device__ __forceinline__ u32 pair_full(u32 stage, u32 pair) const {
    return base + 8 * (kPairs * stage + pair);
  }
  __device__ __forceinline__ u32 pair_empty(u32 stage, u32 pair) const {
    return base + 8 * (kPairs * (kStages + stage) + pair);
  }
  __device__ __forceinline__ u32 rope_full(u32 stage) const { return base + 128 + 8 * stage; }
  __device__ __forceinline__ u32 rope_empty(u32 stage) const { return base + 144 + 8 * stage; }
  __device__ __forceinline__ u32 weights_full() const { return base + 160; }
  __device__ __forceinline__ u32 weights_empty() const { return base + 168; }
  __device__ __forceinline__ u32 query_empty() const { return base + 176; }
};

// One row of a tile. Which page holds it is asked one tile ahead of the copy, since the answer takes
// about as long as a tile does.
struct Row {
  int position;  // in the pages, or column of the tree where HYBRID; -1 where there is no row
  bool is_beside;

  __device__ __forceinline__ Row(const Sequence& sequence, int tile, int key) {
    const int context_tiles = (sequence.context_len + kKeys - 1) / kKeys;
    position = tile * kKeys + key;
    is_beside = false;
    if (tile < context_tiles) {
      if (position >= sequence.context_len) position = -1;
      return;
    }
    const int column = position - context_tiles * kKeys;
    is_beside = HYBRID;
    position = column < sequence.tree_size ? column + (HYBRID ? 0 : sequence.context_len) : -1;
  }

  __device__ __forceinline__ int page(const Params& p, const Sequence& sequence) const {
    if (position < 0 || is_beside) return 0;
    return p.page_table[sequence.index * p.table_sequence + position / PAGE_SIZE];
  }

  // Null where there is no row.
  __device__ __forceinline__ const bf16_bits* address(const Params& p, const Sequence& sequence,
                                                      int page) const {
    if (position < 0) return nullptr;
    if (is_beside) return p.tree_kv + sequence.index * p.tree_sequence + position * p.tree_row;
    return p.kv_pages + page * p.page + (position % PAGE_SIZE) * p.page_row;
  }
};

// Bring the page ids of a piece near, a line of 32 ids a thread; later ones come as they come.
__device__ __forceinline__ void prefetch_pages(const Params& p, const Piece& piece) {
  const int thread = threadIdx.x & 127;
  const int* ids = p.page_table + piece.sequence.index * p.table_sequence;
  const int first = piece.first * kKeys / PAGE_SIZE + 32 * thread;
  const int end = min(piece.last * kKeys, piece.sequence.context_len) / PAGE_SIZE;
  if (first < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(ids + first));
}

__device__ __forceinline__ void load_queries(const Params& p, const Piece& piece, u32 queries) {
  const int thread = threadIdx.x & 127, unit = thread & 7;
  int token = (piece.row + (thread >> 3)) / p.H, head = piece.row + (thread >> 3) - token * p.H;
  const bf16_bits* base = p.q + piece.sequence.index * p.q_sequence + unit * 8;
#pragma unroll 1
  for (int row = thread >> 3; row < ROWS; row += 16) {
    const bool live = token < piece.sequence.tree_size;
    const bf16_bits* from = live ? base + token * p.q_token + head * p.q_head : p.q;
    const u32 to = queries + row * 128 + ((unit ^ (row & 7)) << 4);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      copy_16(to + chunk * kQueryChunkBytes, from + chunk * 64, live ? 16u : 0u);
    for (head += 16; head >= p.H; head -= p.H) ++token;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async_proxy();
}

// A warp copies rows 4 warp + i + 16 part, i and part below 4, eight lanes a row. Lane l of either
// half finds row 4 warp + l % 4 + 16 (l / 4 % 4); the others ask it.
__device__ __forceinline__ void load(const Params& p, u32 shared, const Barriers& barriers) {
  const int thread = threadIdx.x & 127, lane = thread & 31, unit = thread & 7, key = thread >> 3;
  const int own_key = 4 * (thread >> 5) + (lane & 3) + 16 * ((lane >> 2) & 3);
  const u32 inside = key * 128 + ((unit ^ (key & 7)) << 4);
  u32 tile_count = 0;
  Run run(p);
  Piece piece;
  while (run.next(p, piece)) {
    prefetch_pages(p, piece);
    int page = Row(piece.sequence, piece.first, own_key).page(p, piece.sequence);
#pragma unroll 1
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count) {
      const u64 own = reinterpret_cast<u64>(
          Row(piece.sequence, tile, own_key).address(p, piece.sequence, page));
      if (tile + 1 < piece.last)
        page = Row(piece.sequence, tile + 1, own_key).page(p, piece.sequence);
      const bf16_bits* from[4];
      u32 live_bytes[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const u64 row = __shfl_sync(~0u, own, (lane >> 3) + 4 * part);
        live_bytes[part] = row ? 16 : 0;
        from[part] = row ? reinterpret_cast<const bf16_bits*>(row) + unit * 8 : p.q;
      }
      const u32 stage = tile_count % kStages, parity = ((tile_count / kStages) & 1) ^ 1;
      const u32 values = shared + kValueOffset + stage * kValueChunks * kChunkBytes + inside;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        barrier_wait(barriers.pair_empty(stage, pair), parity);
#pragma unroll
        for (int chunk = pair; chunk < kValueChunks; chunk += kPairs)
#pragma unroll
          for (int part = 0; part < 4; ++part)
            copy_16(values + chunk * kChunkBytes + part * 2048, from[part] + chunk * 64,
                    live_bytes[part]);
        barrier_arrive_after_copies(barriers.pair_full(stage, pair));
      }
      const u32 rope_stage = tile_count % kRopeStages;
      const u32 rope = shared + kRopeOffset + rope_stage * kChunkBytes + inside;
      barrier_wait(barriers.rope_empty(rope_stage), ((tile_count / kRopeStages) & 1) ^ 1);
#pragma unroll
      for (int part = 0; part < 4; ++part)
        copy_16(rope + part * 2048, from[part] + kValueDim, live_bytes[part]);
      barrier_arrive_after_copies(barriers.rope_full(rope_stage));
    }
  }
}

// Keys of a tile that a row sees, a bit each.
__device__ __forceinline__ u64 visible_keys(const Params& p, const Piece& piece, int tile, int row) {
  const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys;
  const bool is_tree = tile >= context_tiles;
  const int first = (is_tree ? tile - context_tiles : tile) * kKeys;
  const int left = (is_tree ? piece.sequence.tree_size : piece.sequence.context_len) - first;
  const u64 live = left >= kKeys ? ~0ull : (1ull << left) - 1;
  const int token = (piece.row + row) / p.H;
  if (!is_tree || token >= piece.sequence.tree_size) return live;
  const int* words = p.ancestor_bits + piece.sequence.index * p.bits_sequence +
                     token * p.bits_token + first / 32;
  u64 bits = static_cast<u32>(words[0]);
  if (left > 32) bits |= static_cast<u64>(static_cast<u32>(words[1])) << 32;
  return bits & live;
}

// Set what a row may not see to -inf; `masks` [ROWS] is scratch. Element 4 g + 2 h + e: key
// 16 warp + lane / 4 + 8 h, row 8 g + 2 (lane % 4) + e of the block.
__device__ __forceinline__ void hide(const Params& p, const Piece& piece, int tile, u64* masks,
                                     float (&scores)[kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  if (thread < ROWS) masks[thread] = visible_keys(p, piece, tile, thread);
  warpgroup_barrier();
  const int key = warp * 16 + (lane >> 2);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const u64 mask = masks[8 * (c / 2) + 2 * (lane & 3) + c % 2] >> key;
    const int i = 4 * (c / 2) + c % 2;
    if (!(mask & 1)) scores[i] = -kInfinity;
    if (!(mask & 256)) scores[i + 2] = -kInfinity;
  }
}

__device__ __forceinline__ void store_weights(u32 to_weights, const float (&weights)[kScores]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 to = to_weights + (2 * warp + ((lane >> 3) & 1)) * 128 + (lane & 7) * 16;
#pragma unroll
  for (int group = 0; group + 1 < kGroups; group += 2) {
    const float* w = weights + 4 * group;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to + (group + (lane >> 4)) * 1024),
                 "r"(pack_bf16(w[0], w[1])), "r"(pack_bf16(w[2], w[3])),
                 "r"(pack_bf16(w[4], w[5])), "r"(pack_bf16(w[6], w[7]))
                 : "memory");
  }
  if (kGroups % 2) {
    const float* w = weights + 4 * (kGroups - 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                     to + (kGroups - 1) * 1024),
                 "r"(pack_bf16(w[0], w[1])), "r"(pack_bf16(w[2], w[3]))
                 : "memory");
  }
}

// Running softmax. The peaks of the rows lie in shared memory, where all warps find the same; a
// thread keeps the totals of its own keys, for the rows (columns of S^T) it holds scores of.
struct Softmax {
  float* peaks;   // [ROWS]
  float* decays;  // [ROWS] what O^T and the totals are multiplied by where the peaks have risen
  float total[kColumns];

  __device__ __forceinline__ void reset() {
    const int thread = threadIdx.x & 127;
    if (thread < ROWS) peaks[thread] = -kInfinity;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] = 0.0f;
  }

  // Is a score too far above its row's peak?
  __device__ __forceinline__ bool rises(const float (&scores)[kScores], float scale) const {
    const int first = 2 * (threadIdx.x & 3);
    bool any = false;
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const float2 peak = *reinterpret_cast<const float2*>(peaks + 4 * c + first);
      const float* s = scores + 2 * c;
      // -inf + 8: the first score of a row rises.
      any |= fmaxf(s[0] * scale, s[2] * scale) > peak.x + kRise;
      any |= fmaxf(s[1] * scale, s[3] * scale) > peak.y + kRise;
    }
    return any;
  }

  // Turn the scores of a tile into weights.
  __device__ __forceinline__ void weigh(float (&scores)[kScores], float scale) const {
    const int first = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const float2 peak = *reinterpret_cast<const float2*>(peaks + 4 * c + first);
      // A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
      const float shift[2] = {peak.x == -kInfinity ? 0.0f : peak.x,
                              peak.y == -kInfinity ? 0.0f : peak.y};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[2 * c + i] = exp2_fast(fmaf(scores[2 * c + i], scale, -shift[i % 2]));
    }
  }

  __device__ __forceinline__ void add(const float (&weights)[kScores]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = 4 * (c / 2) + c % 2;
      total[c] += weights[i] + weights[i + 2];
    }
  }

  // Agree on new peaks with the other warps through `exchange` [ROWS, 4].
  __device__ __forceinline__ void raise(const float (&scores)[kScores], float scale,
                                        float* exchange) {
    const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
    float highest[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = 4 * (c / 2) + c % 2;
      highest[c] = fmaxf(scores[i] * scale, scores[i + 2] * scale);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        highest[c] = fmaxf(highest[c], __shfl_xor_sync(~0u, highest[c], step));
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (lane < 4) exchange[4 * (8 * (c / 2) + 2 * lane + c % 2) + warp] = highest[c];
    warpgroup_barrier();
    if (thread < ROWS) {
      const float4 others = *reinterpret_cast<const float4*>(exchange + 4 * thread);
      const float old = peaks[thread];
      const float raised =
          fmaxf(fmaxf(fmaxf(others.x, others.y), fmaxf(others.z, others.w)), old);
      decays[thread] = raised == -kInfinity ? 1.0f : exp2_fast(old - raised);
      peaks[thread] = raised;
    }
    warpgroup_barrier();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) total[c] *= decays[8 * (c / 2) + 2 * (lane & 3) + c % 2];
  }

};

// Where the rows of a block go, null where there is none; scratch in place of the weights.
__device__ __forceinline__ bf16_bits** destinations(unsigned char* smem) {
  return reinterpret_cast<bf16_bits**>(smem + kWeightOffset);
}

// Totals of all warps through `exchange` [ROWS, 4], the log-sum-exp of each row, what O^T is divided
// by (as a decay) and where it goes; the last two once `free` says that their places are.
__device__ __forceinline__ void finish(const Params& p, const Piece& piece, Softmax& softmax,
                                       float* exchange, bf16_bits** to, u32 free, u32 parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      softmax.total[c] += __shfl_xor_sync(~0u, softmax.total[c], step);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane < 4) exchange[4 * (8 * (c / 2) + 2 * lane + c % 2) + warp] = softmax.total[c];
  warpgroup_barrier();
  if (thread >= ROWS) return;
  const float4 totals = *reinterpret_cast<const float4*>(exchange + 4 * thread);
  const float total = totals.x + totals.y + (totals.z + totals.w);
  const int packed = piece.row + thread, token = packed / p.H, head = packed - token * p.H;
  const bool seen = total != 0.0f && token < piece.sequence.tree_size;  // NaN is seen
  const float lse = seen ? (softmax.peaks[thread] + log2_fast(total)) * kLn2 : -kInfinity;
  bf16_bits* destination = nullptr;
  if (!piece.is_whole) {
    const i64 slot_row = static_cast<i64>(piece.slot) * ROWS + thread;
    p.partial_lse[slot_row] = lse;
    destination = p.partial_out + slot_row * kValueDim;
  } else if (token < p.T) {
    const i64 n = piece.sequence.index;
    p.lse[n * p.lse_sequence + token * p.lse_token + head * p.lse_head] = lse;
    destination = p.out + n * p.out_sequence + token * p.out_token + head * p.out_head;
  }
  barrier_wait(free, parity);
  softmax.decays[thread] = seen ? 1.0f / total : 0.0f;
  to[thread] = destination;
}

// Queue the product of a tile and the queries, chunk by chunk as they arrive.
__device__ __forceinline__ void start_scores(u32 shared, const Barriers& barriers, u32 tile_count,
                                             float (&scores)[kScores]) {
  const u32 stage = tile_count % kStages, rope_stage = tile_count % kRopeStages;
  shared = opaque(shared);
  const u64 queries = descriptor(shared + kQueryOffset, 16, 1024, 1);
  const u64 keys =
      descriptor(shared + kValueOffset + stage * kValueChunks * kChunkBytes, 16, 1024, 1);
  const u64 rope_keys = descriptor(shared + kRopeOffset + rope_stage * kChunkBytes, 16, 1024, 1);
  matrix_begin();
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    barrier_wait(barriers.pair_full(stage, pair), (tile_count / kStages) & 1);
    fence_async_proxy();
#pragma unroll
    for (int chunk = pair; chunk < kValueChunks; chunk += kPairs)
#pragma unroll
      for (int part = 0; part < 4; ++part)
        multiply_scores(scores, keys + chunk * (kChunkBytes >> 4) + part * 2,
                        queries + chunk * (kQueryChunkBytes >> 4) + part * 2, chunk + part > 0);
  }
  barrier_wait(barriers.rope_full(rope_stage), (tile_count / kRopeStages) & 1);
  fence_async_proxy();
#pragma unroll
  for (int part = 0; part < 4; ++part)
    multiply_scores(scores, rope_keys + part * 2,
                    queries + kValueChunks * (kQueryChunkBytes >> 4) + part * 2, 1);
  matrix_commit();
}

// Turn the scores of a tile into weights in shared memory, for the values to be added.
__device__ __forceinline__ void weigh_tile(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, const Piece& piece, int tile,
                                           u32 weight_count, Softmax& softmax,
                                           float (&scores)[kScores]) {
  const u32 parity = (weight_count & 1) ^ 1;
  const int context_tiles = (piece.sequence.context_len + kKeys - 1) / kKeys;
  // Scratch lies in place of the weights: the last ones must have been read.
  if (tile >= context_tiles || (tile + 1) * kKeys > piece.sequence.context_len) {
    barrier_wait(barriers.weights_empty(), parity);
    hide(p, piece, tile, reinterpret_cast<u64*>(smem + kWeightOffset), scores);
  }
  const bool is_raised = any_in_warpgroup(softmax.rises(scores, p.scale));
  if (is_raised) {
    barrier_wait(barriers.weights_empty(), parity);
    softmax.raise(scores, p.scale, reinterpret_cast<float*>(smem + kWeightOffset));
  }
  softmax.weigh(scores, p.scale);
  barrier_wait(barriers.weights_empty(), parity);
  store_weights(shared + kWeightOffset, scores);
  if ((threadIdx.x & 127) == 0)
    *reinterpret_cast<int*>(smem + kFlagOffset) = is_raised && tile > piece.first;
  fence_async_proxy();
  barrier_arrive(barriers.weights_full());
  softmax.add(scores);
}

__device__ __forceinline__ void score(const Params& p, unsigned char* smem, u32 shared,
                                      const Barriers& barriers) {
  u32 tile_count = 0, piece_count = 0, weight_count = 0;
  Run run(p);
  Piece piece;
  Softmax softmax;
  softmax.peaks = reinterpret_cast<float*>(smem + kPeakOffset);
  softmax.decays = reinterpret_cast<float*>(smem + kDecayOffset);
  float scores[kScores];
  while (run.next(p, piece)) {
    barrier_wait(barriers.query_empty(), (piece_count & 1) ^ 1);
    ++piece_count;
    load_queries(p, piece, shared + kQueryOffset);
    softmax.reset();
    warpgroup_barrier();
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count) {
      start_scores(shared, barriers, tile_count, scores);
      matrix_wait<0>();
      __syncwarp();
      if ((threadIdx.x & 31) == 0) barrier_arrive(barriers.rope_empty(tile_count % kRopeStages));
      weigh_tile(p, smem, shared, barriers, piece, tile, weight_count, softmax, scores);
    }
    finish(p, piece, softmax, reinterpret_cast<float*>(smem + kQueryOffset), destinations(smem),
           barriers.weights_empty(), (weight_count & 1) ^ 1);
    barrier_arrive(barriers.weights_full());
    ++weight_count;
  }
}

// Round the values to bfloat16, turn them to [row, dim] in place of the queries and write the rows
// out. Element (block, 4 g + 2 h + e): value dim 256 half + 64 block + 16 warp + lane / 4 + 8 h,
// row 8 g + 2 (lane % 4) + e.
__device__ __forceinline__ void store_values(unsigned char* smem, u32 shared, int half,
                                             const float (&values)[4][kScores]) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  // Lane l names row l % 8 of matrix l / 8: matrices (group, h = 0), (group, 1), (group + 1, 0), ..
  const int dim = 256 * half + 16 * warp + 8 * ((lane >> 3) & 1);
  const u32 to = shared + kQueryOffset + (lane & 7) * kOutPitch + dim * 2;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
#pragma unroll
    for (int group = 0; group + 1 < kGroups; group += 2) {
      const float* v = values[block] + 4 * group;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::
                       "r"(to + (group + (lane >> 4)) * 8 * kOutPitch + block * 128),
                   "r"(pack_bf16(v[0], v[1])), "r"(pack_bf16(v[2], v[3])),
                   "r"(pack_bf16(v[4], v[5])), "r"(pack_bf16(v[6], v[7]))
                   : "memory");
    }
    if (kGroups % 2) {
      const float* v = values[block] + 4 * (kGroups - 1);
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                       to + (kGroups - 1) * 8 * kOutPitch + block * 128),
                   "r"(pack_bf16(v[0], v[1])), "r"(pack_bf16(v[2], v[3]))
                   : "memory");
    }
  }
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + half) : "memory");
  const unsigned char* from = smem + kQueryOffset + 512 * half + lane * 16;
#pragma unroll 6
  for (int row = warp; row < ROWS; row += 4) {
    bf16_bits* destination = destinations(smem)[row];
    const uint4 eight = *reinterpret_cast<const uint4*>(from + row * kOutPitch);
    if (destination) *reinterpret_cast<uint4*>(destination + 256 * half + lane * 8) = eight;
  }
}

__device__ __forceinline__ void scale_values(const float* decay, float (&values)[4][kScores]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float by = decay[8 * (c / 2) + 2 * (lane & 3) + c % 2];
    const int i = 4 * (c / 2) + c % 2;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      values[block][i] *= by;
      values[block][i + 2] *= by;
    }
  }
}

__device__ __forceinline__ void add_values(const Params& p, unsigned char* smem, u32 shared,
                                           const Barriers& barriers, int half) {
  const int lane = threadIdx.x & 31;
  const float* decay = reinterpret_cast<const float*>(smem + kDecayOffset);
  const volatile int* is_raised = reinterpret_cast<const volatile int*>(smem + kFlagOffset);
  const u64 weights = descriptor(shared + kWeightOffset, 128, 1024, 0);
  u32 tile_count = 0, weight_count = 0;
  Run run(p);
  Piece piece;
  float values[4][kScores];
  while (run.next(p, piece)) {
    for (int tile = piece.first; tile < piece.last; ++tile, ++tile_count, ++weight_count) {
      const u32 stage = tile_count % kStages;
      const u64 keys = descriptor(
          shared + kValueOffset + (stage * kValueChunks + 4 * half) * kChunkBytes, 16, 1024, 1);
      barrier_wait(barriers.weights_full(), weight_count & 1);
      fence_async_proxy();
      if (*is_raised) scale_values(decay, values);
      matrix_begin();
#pragma unroll
      for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int part = 0; part < 4; ++part)
          multiply_values(values[block], keys + (block * kChunkBytes + part * 2048 >> 4),
                          weights + (part * 256 >> 4), part > 0 || tile > piece.first);
        matrix_commit();
      }
      matrix_wait<3>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 0));
      matrix_wait<2>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 1));
      matrix_wait<1>();
      if (lane == 0) barrier_arrive(barriers.pair_empty(stage, 2));
      matrix_wait<0>();
      if (lane == 0) {
        barrier_arrive(barriers.pair_empty(stage, 3));
        barrier_arrive(barriers.weights_empty());
      }
    }
    barrier_wait(barriers.weights_full(), weight_count & 1);
    ++weight_count;
    scale_values(decay, values);
    store_values(smem, shared, half, values);
    barrier_arrive(barriers.query_empty());
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.weights_empty());
  }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    tree_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  const Barriers barriers{shared + kBarrierOffset};
  if (threadIdx.x == 0) {
    if (shared & 1023) __trap();  // the swizzle counts from addresses that are multiples of 1024
    for (int stage = 0; stage < 2; ++stage) {
      for (int pair = 0; pair < kPairs; ++pair) {
        barrier_init(barriers.pair_full(stage, pair), 128);
        barrier_init(barriers.pair_empty(stage, pair), 8);
      }
      barrier_init(barriers.rope_full(stage), 128);
      barrier_init(barriers.rope_empty(stage), 4);
    }
    barrier_init(barriers.query_empty(), 256);
    barrier_init(barriers.weights_full(), 128);
    barrier_init(barriers.weights_empty(), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int role = threadIdx.x >> 7;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    load(p, shared, barriers);
  } else if (role == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    score(p, smem, shared, barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    add_values(p, smem, shared, barriers, role - 2);
  }
}

// ---- merge ---------------------------------------------------------------------------------------

constexpr int kMostMergeWarps = 16;

__device__ __forceinline__ float bf16_at(const uint4& eight, int i) {
  const u32 both = i / 2 == 0 ? eight.x : i / 2 == 1 ? eight.y : i / 2 == 2 ? eight.z : eight.w;
  return __uint_as_float(i % 2 ? both & 0xFFFF0000u : both << 16);
}

// One block a packed row and 256 dims: partial results of the row weighted by exp(their lse - lse),
// divided over as many warps as there are. Rows of items that one block held whole are left alone;
// rows that no tile belongs to become 0.
extern "C" __global__ void __launch_bounds__(32 * kMostMergeWarps)
    merge(const __grid_constant__ Params p) {
  __shared__ int slots[kMostPlaces];
  __shared__ float weights[kMostPlaces], peaks[kMostMergeWarps], totals[kMostMergeWarps];
  __shared__ float sums[kMostMergeWarps][256];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int packed_rows = p.T * p.H;
  const int n = blockIdx.x / packed_rows, packed = blockIdx.x - n * packed_rows;
  const int token = packed / p.H, head = packed - token * p.H, dim = blockIdx.y * 256;
  const Line line(p);
  const Sequence sequence = line.find(p, -1, n);
  bf16_bits* out = p.out + n * p.out_sequence + token * p.out_token + head * p.out_head + dim;
  float* lse = p.lse + n * p.lse_sequence + token * p.lse_token + head * p.lse_head;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (token >= sequence.tree_size) {
    if (warp == 0) reinterpret_cast<uint4*>(out)[lane] = make_uint4(0, 0, 0, 0);
    if (blockIdx.y == 0 && threadIdx.x == 0) *lse = -kInfinity;
    return;
  }
  const int block = packed / ROWS, row = packed - block * ROWS;

  // Two places a chunk: a run is as long as a share at most, so it is cut in two at most.
  const int chunks = (sequence.tiles + line.share - 1) / line.share, places = 2 * chunks;
  const auto slot_of = [&](int place) {
    const int chunk = place / 2, first = chunk * line.share;
    const int length = min(line.share, sequence.tiles - first);
    const int begin = sequence.begin + first * sequence.blocks + block * length;
    const int cut = (begin / line.share + 1) * line.share;  // where the next block begins
    if (place % 2 && cut >= begin + length) return static_cast<i64>(-1);
    return line.slot(sequence, chunk * sequence.blocks + block, place % 2 ? cut : begin);
  };
  if (chunks == 1 && slot_of(1) < 0) return;

  const bf16_bits* from = p.partial_out + static_cast<i64>(row) * kValueDim + dim + lane * 8;
  float peak = -kInfinity;
  for (int place = threadIdx.x; place < places; place += blockDim.x) {
    const i64 slot = slot_of(place);
    slots[place] = static_cast<int>(slot);
    weights[place] = slot < 0 ? -kInfinity : p.partial_lse[slot * ROWS + row];
    peak = fmaxf(peak, weights[place]);
  }
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
  if (lane == 0) peaks[warp] = peak;
  __syncthreads();
  for (int other = 0; other < warps; ++other) peak = fmaxf(peak, peaks[other]);
  const float shift = peak == -kInfinity ? 0.0f : peak;
  float total_weight = 0.0f, sum[8] = {};
  const auto add = [&](int place) {
    const i64 slot = slots[place];
    const uint4 eight = *reinterpret_cast<const uint4*>(from + slot * ROWS * kValueDim);
    const float weight = exp2_fast((weights[place] - shift) / kLn2);
    total_weight += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += weight * bf16_at(eight, i);
  };
#pragma unroll 8
  for (int place = 2 * warp; place < places; place += 2 * warps) add(place);
  for (int place = 2 * warp + 1; place < places; place += 2 * warps)
    if (slots[place] >= 0) add(place);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[warp][lane * 8 + i] = sum[i];
  if (lane == 0) totals[warp] = total_weight;
  __syncthreads();
  float all = 0.0f;
  for (int other = 0; other < warps; ++other) all += totals[other];
  const float scale = all != 0.0f ? 1.0f / all : 0.0f;
  for (int two = threadIdx.x; two < 128; two += blockDim.x) {
    float low = 0.0f, high = 0.0f;
    for (int other = 0; other < warps; ++other) {
      low += sums[other][2 * two];
      high += sums[other][2 * two + 1];
    }
    reinterpret_cast<u32*>(out)[two] = pack_bf16(low * scale, high * scale);
  }
  if (blockIdx.y == 0 && threadIdx.x == 0)
    *lse = all != 0.0f ? peak + log2_fast(all) * kLn2 : -kInfinity;
}
