// What kernels for any of the architectures say in PTX: asynchronous copies, packed numbers.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bf16_bits;

constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity __int_as_float(0x7f800000)

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 live_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(live_bytes)
               : "memory");
}

__device__ __forceinline__ void copy_16_always(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ uint4 shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
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

// Copies this thread has started since the last call are a group.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `kPending` of this thread's groups of copies are under way.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Programmatic launches: what the grid before has written is there; the grid behind may start.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void grid_let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
