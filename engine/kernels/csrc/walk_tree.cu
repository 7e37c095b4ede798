// The walk through draft trees along what the target says.
//
// One block a sequence. Every thread asks for its nodes whether the target says the node's token
// after its parent, and if so enters the node as its parent's next one; the last of siblings with
// one token counts, as in a table that is filled in order. Then thread 0 follows the entries, and
// the threads write the path. Shared memory: 8 T bytes.

typedef unsigned int u32;
typedef long long i64;

constexpr int kThreads = 128;
constexpr int kNoToken = -1, kNoWalk = -1;

struct Params {
  const i64* target_tokens;  // [N, T]
  const i64* token_ids;      // [N, T]
  const int* parents;        // [N, T]
  const int* tree_sizes;     // [N]
  const i64* slots;          // [N, T]
  int* num_accepted;         // [N]
  i64* path;                 // [N, width]
  i64* tokens;               // [N, width]
  i64* sources;              // [N, width]
  i64 target_sequence;
  int T, width;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    walk_tree(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ int kept;
  int* next = reinterpret_cast<int*>(memory);  // of each node: the one walked to from it, or 0
  int* path = next + p.T;
  const int n = blockIdx.x, size = p.tree_sizes[n];
  const i64* said = p.target_tokens + n * p.target_sequence;
  const i64 first = static_cast<i64>(n) * p.T, begin = static_cast<i64>(n) * p.width;
  const i64* token_ids = p.token_ids + first;
  bool is_sound = 1 <= size && size <= p.T;
  const int rows = is_sound ? size : 0;
  for (int node = threadIdx.x; node < rows; node += kThreads) {
    next[node] = 0;
    is_sound &= said[node] >= 0;
  }
  is_sound = !__syncthreads_or(!is_sound);
  for (int node = 1 + threadIdx.x; node < rows; node += kThreads) {
    const int parent = p.parents[first + node];
    if (said[parent] == token_ids[node]) atomicMax(next + parent, node);
  }
  __syncthreads();

  if (threadIdx.x == 0) {
    int count = 1, node = 0;
    path[0] = 0;
    while (is_sound && count < p.width && (node = next[node]) != 0) path[count++] = node;
    kept = count;
    p.num_accepted[n] = is_sound ? count - 1 : kNoWalk;
  }
  __syncthreads();
  const int count = kept;
  for (int i = threadIdx.x; i < p.width; i += kThreads) {
    const int node = i < count ? path[i] : i;
    p.path[begin + i] = node;
    p.tokens[begin + i] = is_sound && i < count ? said[node] : kNoToken;
    p.sources[begin + i] = p.slots[first + node];
  }
}
