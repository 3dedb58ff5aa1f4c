// torch 2.13's interface of allocators, as far as arena.cpp knows it.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
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
struct AllocatorState {};
struct CheckpointDelta {};
struct SnapshotInfo {};
struct StreamSegmentSize {};
enum class RecordContext { NEVER };
using OutOfMemoryObserver = std::function<void()>;
using OomRejectionObserver = std::function<void()>;
using AllocatorTraceTracker = std::function<void()>;
using CreateContextFn = std::shared_ptr<c10::GatheredContext> (*)();
struct CUDAAllocator : public c10::Allocator {
  virtual void* raw_alloc(size_t) = 0;
  virtual void* raw_alloc_with_stream(size_t, cudaStream_t) = 0;
  virtual void raw_delete(void*) = 0;
  virtual void recordStream(const c10::DataPtr&, CUDAStream) = 0;
  virtual void emptyCache(MempoolId_t) = 0;
  virtual c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) = 0;
  virtual void cacheInfo(c10::DeviceIndex, size_t*) = 0;
  virtual std::string name() = 0;
  virtual void init(int) {}
  virtual bool initialized() { return true; }
  virtual bool isEnabled() const { return true; }
  virtual void enable(bool) {}
  virtual double getMemoryFraction(c10::DeviceIndex) { return 1; }
  virtual void setMemoryFraction(double, c10::DeviceIndex) {}
  virtual void* getBaseAllocation(void* memory, size_t*) { return memory; }
  virtual void resetAccumulatedStats(c10::DeviceIndex) {}
  virtual void resetPeakStats(c10::DeviceIndex) {}
  virtual std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) { return {}; }
  virtual std::vector<StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) { return {}; }
  virtual SnapshotInfo snapshot(MempoolId_t, bool) { return {}; }
  virtual void beginAllocateToPool(c10::DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) {}
  virtual void endAllocateToPool(c10::DeviceIndex, MempoolId_t) {}
  virtual void markCaptureBegin(c10::DeviceIndex) {}
  virtual void markCaptureEnd(c10::DeviceIndex) {}
  virtual void releasePool(c10::DeviceIndex, MempoolId_t) {}
  virtual int getPoolUseCount(c10::DeviceIndex, MempoolId_t) { TORCH_CHECK(false, "not supported"); }
  virtual void createOrIncrefPool(c10::DeviceIndex, MempoolId_t, std::shared_ptr<CUDAAllocator>) {}
  virtual void setUseOnOOM(c10::DeviceIndex, MempoolId_t, bool) {}
  virtual void setNoSplit(c10::DeviceIndex, MempoolId_t) {}
  virtual bool checkPoolLiveAllocations(c10::DeviceIndex, MempoolId_t, const std::unordered_set<void*>&) {
    return true;
  }
  virtual ShareableHandle shareIpcHandle(void*) { return {}; }
  virtual std::shared_ptr<void> getIpcDevPtr(std::string) { return nullptr; }
  virtual bool isHistoryEnabled() { return false; }
  virtual void recordHistory(
      bool, CreateContextFn, size_t, RecordContext, bool, const std::vector<std::string>&) {}
  virtual void recordAnnotation(const std::vector<std::pair<std::string, std::string>>&) {}
  virtual void pushCompileContext(std::string&) {}
  virtual void popCompileContext() {}
  virtual void setUserMetadata(const std::string&) {}
  virtual std::string getUserMetadata() { return ""; }
  virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void*) { return nullptr; }
  virtual void attachOutOfMemoryObserver(OutOfMemoryObserver) {}
  virtual void attachOomRejectionObserver(OomRejectionObserver) {}
  virtual void attachAllocatorTraceTracker(AllocatorTraceTracker) {}
  virtual void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) {}
  virtual cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) { return 0; }
  virtual std::shared_ptr<AllocatorState> getCheckpointState(c10::DeviceIndex, MempoolId_t) { return nullptr; }
  virtual CheckpointDelta setCheckpointPoolState(c10::DeviceIndex, std::shared_ptr<AllocatorState>) { return {}; }
  virtual c10::DataPtr allocateWithAddress(size_t, void*) { return {}; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
inline std::atomic<CUDAAllocator*> allocator;
}  // namespace c10::cuda::CUDACachingAllocator
