// What a kernel says in PTX of barriers in shared memory, of the copies that arrive on them, and of the
// barriers of the hardware.
#pragma once

#include "ptx.cuh"

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

// Barriers that were initialised are there for all that arrive on them.
__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// True in all `kThreads` threads that meet at the hardware barrier `kBarrier` iff `mine` is in one of them.
template <int kBarrier, int kThreads>
__device__ __forceinline__ bool any_at_barrier(bool mine) {
  int result;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, mine;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}"
      : "=r"(result)
      : "r"(static_cast<int>(mine)), "n"(kBarrier), "n"(kThreads)
      : "memory");
  return result != 0;
}
