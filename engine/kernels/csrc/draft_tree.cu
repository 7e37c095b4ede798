// Draft trees from sorted candidates, best first: the host's order, ties and sums, bit for bit.
//
// One block a sequence. All threads bring the candidates' costs, minus their log-probs, into shared
// memory; warp 0 chooses nodes; all threads write the tree's rows.
//
// Of all candidates that a heap would hold there is exactly one for each node chosen so far: the
// best child it does not have yet. So the frontier is an array with a slot for each node, SLOTS of
// them in the registers of every lane, as integers of the order of their costs. To choose is to
// find the least of them: high words by one warp reduction, low words by another. Equal costs are
// settled by the ranks on the way from the root, three to a word of ten bits each, where 0 stands
// behind the end of a path, so that a prefix comes first.
//
// Costs of dropped candidates and those behind the end of a row and of the horizon are infinite:
// what is infinite is never chosen, and no branch asks where a row ends.
//
// Shared memory, for n = node_budget + 1 nodes: 16 n (costs) + 4 n words + 16 n (ranks, parents,
// depths) + 4 (horizon + 1) (K + 1) bytes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define kInfinity __int_as_float(0x7f800000)

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr u32 kAll = 0xffffffffu;
constexpr int kRankBits = 10, kRanksPerWord = 3;
constexpr u64 kNever = 0xfff0000000000000ull;  // the key of an infinite cost

struct Params {
  const float* log_probs;     // [N, horizon, K], descending
  const i64* candidates;      // [N, horizon, K], their tokens
  const i64* root_tokens;     // [N]
  const i64* root_positions;  // [N]
  i64* token_ids;             // [N, T]
  i64* positions;             // [N, T]
  int* parents;               // [N, T]
  int* depths;                // [N, T]
  double* path_log_probs;     // [N, T]
  u32* ancestor_bits;         // [N, T, W]
  int* tree_sizes;            // [N]
  i64 log_probs_sequence, log_probs_depth, candidates_sequence, candidates_depth;
  int horizon, K, node_budget, T, W;  // K: those that are looked at
};

// What shared memory holds of a tree under way. Slot i is the best child that node i has not got.
struct Tree {
  double* slot_costs;
  double* node_costs;
  u32* words;  // [node, num_words], ranks from the root
  int* slot_ranks;
  int* node_ranks;
  int* parents;
  int* depths;
  float* costs;  // [horizon + 1, row]
  int num_words, row;

  __device__ Tree(unsigned char* memory, const Params& p)
      : num_words((p.horizon + kRanksPerWord - 1) / kRanksPerWord), row(p.K + 1) {
    const int nodes = p.node_budget + 1;
    slot_costs = reinterpret_cast<double*>(memory);
    node_costs = slot_costs + nodes;
    words = reinterpret_cast<u32*>(node_costs + nodes);
    slot_ranks = reinterpret_cast<int*>(words + nodes * num_words);
    node_ranks = slot_ranks + nodes;
    parents = node_ranks + nodes;
    depths = parents + nodes;
    costs = reinterpret_cast<float*>(depths + nodes);
  }

  // Word `index` of the ranks of the candidate in a slot.
  __device__ u32 word(int slot, int index) const {
    const int before = depths[slot];
    const u32 own = before / kRanksPerWord == index ? digit(slot_ranks[slot], before) : 0;
    return words[slot * num_words + index] | own;
  }

  static __device__ u32 digit(int rank, int before) {
    return static_cast<u32>(rank + 1) << kRankBits * (kRanksPerWord - 1 - before % kRanksPerWord);
  }
};

// An integer of the order of a cost; -0.0 is 0.0.
__device__ __forceinline__ u64 key_of(double cost) {
  const i64 bits = __double_as_longlong(__dadd_rn(cost, 0.0));
  return bits < 0 ? ~static_cast<u64>(bits) : static_cast<u64>(bits) | 1ull << 63;
}

__device__ __forceinline__ u64 least_of_warp(u64 key) {
  const u32 high = static_cast<u32>(key >> 32);
  const u32 least_high = __reduce_min_sync(kAll, high);
  const u32 low = high == least_high ? static_cast<u32>(key) : ~0u;
  return static_cast<u64>(least_high) << 32 | __reduce_min_sync(kAll, low);
}

// The one slot among those marked in `equal`, of each lane, whose ranks come first.
__device__ int first_of_equals(const Tree& tree, u32 equal, int lane) {
  for (int index = 0; index < tree.num_words; ++index) {
    u32 least = ~0u;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s)
      if (equal >> s & 1) least = min(least, tree.word(s * kLanes + lane, index));
    least = __reduce_min_sync(kAll, least);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s)
      if (equal >> s & 1 && tree.word(s * kLanes + lane, index) != least) equal &= ~(1u << s);
  }
  const int owner = __ffs(__ballot_sync(kAll, equal != 0)) - 1;
  return (__ffs(__shfl_sync(kAll, equal, owner)) - 1) * kLanes + owner;
}

// Choose up to `node_budget` nodes; returns how many there are. One warp.
__device__ int choose(const Tree& tree, const Params& p, int lane) {
  u64 keys[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) keys[s] = kNever;
  if (lane == 0) {
    keys[0] = key_of(tree.costs[0]);
    tree.slot_costs[0] = tree.costs[0];
    tree.slot_ranks[0] = tree.depths[0] = 0;
  }
  for (int index = lane; index < tree.num_words; index += kLanes) tree.words[index] = 0;
  __syncwarp();

  int count = 0;
  while (count < p.node_budget) {
    u64 least = keys[0];
#pragma unroll
    for (int s = 1; s < SLOTS; ++s) least = min(least, keys[s]);
    least = least_of_warp(least);
    if (least >= kNever) break;
    u32 equal = 0;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) equal |= static_cast<u32>(keys[s] == least) << s;
    const u32 owners = __ballot_sync(kAll, equal != 0);
    const int owner = __ffs(owners) - 1;
    const u32 owned = __shfl_sync(kAll, equal, owner);
    int slot = (__ffs(owned) - 1) * kLanes + owner;
    if (owners & (owners - 1) || owned & (owned - 1)) slot = first_of_equals(tree, equal, lane);

    const int before = tree.depths[slot], rank = tree.slot_ranks[slot];
    const double cost = tree.slot_costs[slot];
    const float* here = tree.costs + before * tree.row + rank;
    const double sibling = __dadd_rn(__dsub_rn(cost, here[0]), here[1]);
    const double child = __dadd_rn(cost, tree.costs[(before + 1) * tree.row]);
    const int node = ++count;
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      if (s * kLanes + lane == slot) keys[s] = key_of(sibling);
      if (s * kLanes + lane == node) keys[s] = key_of(child);
    }
    for (int index = lane; index < tree.num_words; index += kLanes)
      tree.words[node * tree.num_words + index] = tree.word(slot, index);
    __syncwarp();  // all have read the slot
    if (lane == 0) {
      tree.slot_costs[slot] = sibling;
      tree.slot_ranks[slot] = rank + 1;
      tree.slot_costs[node] = child;
      tree.slot_ranks[node] = 0;
      tree.node_costs[node] = cost;
      tree.node_ranks[node] = rank;
      tree.parents[node] = slot;
      tree.depths[node] = before + 1;
    }
    __syncwarp();
  }
  return count;
}

// Bring the costs in; returns whether they are of a distribution, the same to all threads.
__device__ bool bring(const Tree& tree, const Params& p, int n) {
  const float* log_probs = p.log_probs + n * p.log_probs_sequence;
  const i64* candidates = p.candidates + n * p.candidates_sequence;
  bool is_sound = true;
  for (int i = threadIdx.x; i < (p.horizon + 1) * tree.row; i += kThreads) {
    const int depth = i / tree.row, rank = i - depth * tree.row;
    float cost = kInfinity;
    if (depth < p.horizon && rank < p.K) {
      const float log_prob = log_probs[depth * p.log_probs_depth + rank];
      is_sound &= log_prob < kInfinity;  // false for NaN as well
      is_sound &= candidates[depth * p.candidates_depth + rank] >= 0;
      cost = -log_prob;
    }
    tree.costs[i] = cost;
  }
  return !__syncthreads_or(!is_sound);
}

// Write all T rows: the root, `count` nodes, and children of the root that fill the tree up.
__device__ void write(const Tree& tree, const Params& p, int n, int count) {
  const i64 first = static_cast<i64>(n) * p.T, position = p.root_positions[n];
  const i64* candidates = p.candidates + n * p.candidates_sequence;
  for (int i = threadIdx.x; i < p.T; i += kThreads) {
    const bool is_node = 0 < i && i <= count;
    const int depth = is_node ? tree.depths[i] : i > 0;
    p.token_ids[first + i] =
        is_node ? candidates[(depth - 1) * p.candidates_depth + tree.node_ranks[i]]
                : p.root_tokens[n];
    p.positions[first + i] = position + depth;
    p.parents[first + i] = is_node ? tree.parents[i] : i > 0 ? 0 : -1;
    p.depths[first + i] = depth;
    p.path_log_probs[first + i] = is_node ? -tree.node_costs[i] : i > 0 ? -kInfinity : 0.0;
  }
  for (int i = threadIdx.x; i < p.T * p.W; i += kThreads) {
    const int row = i / p.W, word = i - row * p.W;
    u32 bits = word == 0;
    for (int node = row; node > 0; node = node <= count ? tree.parents[node] : 0)
      if (node / 32 == word) bits |= 1u << node % 32;
    p.ancestor_bits[first * p.W + i] = bits;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    draft_tree(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ int chosen;
  const int n = blockIdx.x;
  const Tree tree(memory, p);
  const bool is_sound = bring(tree, p, n);
  if (threadIdx.x < kLanes) {
    const int count = is_sound ? choose(tree, p, threadIdx.x) : 0;
    if (threadIdx.x == 0) {
      chosen = count;
      p.tree_sizes[n] = is_sound ? 1 + count : 0;
    }
  }
  __syncthreads();
  write(tree, p, n, chosen);
}
