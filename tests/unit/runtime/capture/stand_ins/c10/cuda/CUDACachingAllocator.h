// torch's interface of allocators, as far as arena.cpp knows it.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
namespace c10::CachingDeviceAllocator {
struct DeviceStats {
  int asked = 0;
};
}  // namespace c10::CachingDeviceAllocator
namespace c10::cuda {
using MempoolId_t = std::pair<unsigned long long, unsigned long long>;
}
namespace c10::cuda::CUDACachingAllocator {
struct ShareableHandle {};
struct CUDAAllocator : public c10::Allocator {
  virtual void* raw_alloc(size_t) = 0;
  virtual void* raw_alloc_with_stream(size_t, cudaStream_t) = 0;
  virtual void raw_delete(void*) = 0;
  virtual void recordStream(const c10::DataPtr&, CUDAStream) = 0;
  virtual void emptyCache(MempoolId_t) = 0;
  virtual c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) = 0;
  virtual void cacheInfo(c10::DeviceIndex, size_t*) = 0;
  virtual void init(int) {}
  virtual bool initialized() { return true; }
  virtual bool isEnabled() const { return true; }
  virtual void enable(bool) {}
  virtual double getMemoryFraction(c10::DeviceIndex) { return 1; }
  virtual void setMemoryFraction(double, c10::DeviceIndex) {}
  virtual void* getBaseAllocation(void* memory, size_t*) { return memory; }
  virtual void resetAccumulatedStats(c10::DeviceIndex) {}
  virtual void resetPeakStats(c10::DeviceIndex) {}
  virtual void beginAllocateToPool(c10::DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) {}
  virtual void endAllocateToPool(c10::DeviceIndex, MempoolId_t) {}
  virtual void releasePool(c10::DeviceIndex, MempoolId_t) {}
  virtual std::shared_ptr<void> getIpcDevPtr(std::string) { return nullptr; }
  virtual ShareableHandle shareIpcHandle(void*) { return {}; }
  virtual void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) {}
  virtual cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) { return 0; }
  virtual std::string name() = 0;
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
inline std::atomic<CUDAAllocator*> allocator;
}  // namespace c10::cuda::CUDACachingAllocator
