// Memory for stream captures, and the captures themselves.
//
// With CUDA's asynchronous allocator (ComfyUI's default) torch allocates inside a stream capture by adding nodes to the
// graph. If the capture fails, CUDA refuses to free what these nodes stand for, torch's destructors throw, and the
// process ends. So nothing is allocated inside a capture: while a thread is in an `Arena`, what torch allocates for that
// thread comes from memory that was allocated before. torch is told by putting an allocator of ours in front of its own
// (`c10::cuda::CUDACachingAllocator::allocator`) for as long as any thread is in an arena; it hands all other calls,
// and those of all other threads, to torch's own allocator.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#ifdef _WIN32
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::cuda::CUDAStream;
using c10::cuda::MempoolId_t;

constexpr size_t kAlignment = 512;
constexpr size_t kChunk = size_t(32) << 20;

CUDAAllocator* own_allocator();
void leave_behind(const std::vector<void*>& chunks);
void check(cudaError_t result, const char* what);

// Blocks of memory that torch allocated. Freed blocks are used again by the same stream, in whose order they are used.
struct Arena {
  struct Block {
    size_t size;
    size_t chunk;
    cudaStream_t stream;
    bool is_free;
  };

  explicit Arena(DeviceIndex device) : device(device) {}

  ~Arena() { leave_behind(chunks); }

  // Throws where no free block is large enough and the arena may not grow.
  void* take(size_t wanted, cudaStream_t stream, bool may_grow) {
    const size_t size = (wanted + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard<std::mutex> hold(mutex);
    auto found = smallest(size, stream);
    if (found == blocks.end()) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, may_grow, "a stream capture asks for ", wanted, " bytes that were not set aside for it");
      found = grow(size, stream);
    }
    Block& block = found->second;
    if (block.size - size >= kAlignment) {
      blocks.emplace(found->first + size, Block{block.size - size, block.chunk, stream, true});
      block.size = size;
    }
    block.is_free = false;
    live += 1;
    return found->first;
  }

  void give_back(void* memory) {
    std::lock_guard<std::mutex> hold(mutex);
    auto block = blocks.find(static_cast<char*>(memory));
    if (block == blocks.end() || block->second.is_free) {
      return;
    }
    block->second.is_free = true;
    live -= 1;
    join_with_next(block);
    if (block != blocks.begin()) {
      join_with_next(std::prev(block));
    }
  }

  size_t count_live() {
    std::lock_guard<std::mutex> hold(mutex);
    return live;
  }

  size_t count_bytes() {
    std::lock_guard<std::mutex> hold(mutex);
    return bytes;
  }

  const DeviceIndex device;

 private:
  using Blocks = std::map<char*, Block>;

  Blocks::iterator smallest(size_t size, cudaStream_t stream) {
    auto best = blocks.end();
    for (auto it = blocks.begin(); it != blocks.end(); ++it) {
      const Block& block = it->second;
      const bool fits = block.is_free && block.stream == stream && block.size >= size;
      if (fits && (best == blocks.end() || block.size < best->second.size)) {
        best = it;
      }
    }
    return best;
  }

  Blocks::iterator grow(size_t size, cudaStream_t stream) {
    const size_t chunk = (size + kChunk - 1) / kChunk * kChunk;
    // Of the default stream, so that freeing it never has to do with a stream on which something is captured.
    chunks.push_back(own_allocator()->raw_alloc_with_stream(chunk, nullptr));
    check(cudaStreamSynchronize(nullptr), "waiting for memory");
    bytes += chunk;
    auto* start = static_cast<char*>(chunks.back());
    return blocks.emplace(start, Block{chunk, chunks.size() - 1, stream, true}).first;
  }

  void join_with_next(Blocks::iterator block) {
    auto next = std::next(block);
    if (next == blocks.end() || !block->second.is_free || !next->second.is_free) {
      return;
    }
    if (next->second.chunk == block->second.chunk && block->first + block->second.size == next->first) {
      block->second.size += next->second.size;
      blocks.erase(next);
    }
  }

  std::mutex mutex;
  std::vector<void*> chunks;
  Blocks blocks;
  size_t bytes = 0;
  size_t live = 0;
};

using Shared = std::shared_ptr<Arena>;

std::mutex owners_mutex;
std::unordered_map<void*, Shared>& owners() {
  static auto* map = new std::unordered_map<void*, Shared>();  // tensors may be freed while the process ends
  return *map;
}

// What this thread allocates from.
thread_local Arena* inside = nullptr;
thread_local const Shared* inside_shared = nullptr;
thread_local bool may_grow = false;

Shared owner_of(void* memory, bool forget) {
  std::lock_guard<std::mutex> hold(owners_mutex);
  auto found = owners().find(memory);
  if (found == owners().end()) {
    return nullptr;
  }
  Shared arena = found->second;
  if (forget) {
    owners().erase(found);
  }
  return arena;
}

// The deleter of tensors' memory: an arena lives for as long as one of them does.
void free_memory(void* memory) {
  if (memory == nullptr) {
    return;
  }
  if (Shared arena = owner_of(memory, true)) {
    arena->give_back(memory);
  } else {
    own_allocator()->raw_delete(memory);
  }
}

void* take_from_arena(size_t size, cudaStream_t stream) {
  void* memory = inside->take(size, stream, may_grow);
  std::lock_guard<std::mutex> hold(owners_mutex);
  owners()[memory] = *inside_shared;
  return memory;
}

bool is_inside() {
  return inside != nullptr && c10::cuda::current_device() == inside->device;
}

// Stands in front of torch's own allocator, and hands on every call that has nothing to do with arenas.
class Front final : public CUDAAllocator {
 public:
  CUDAAllocator* own = nullptr;

  c10::DataPtr allocate(size_t size) override {
    if (!is_inside()) {
      return own->allocate(size);
    }
    const c10::Device device(c10::DeviceType::CUDA, inside->device);
    void* memory = size == 0 ? nullptr : take_from_arena(size, c10::cuda::getCurrentCUDAStream());
    return {memory, memory, &free_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void* raw_alloc(size_t size) override {
    return is_inside() && size ? take_from_arena(size, c10::cuda::getCurrentCUDAStream()) : own->raw_alloc(size);
  }
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return is_inside() && size ? take_from_arena(size, stream) : own->raw_alloc_with_stream(size, stream);
  }
  void raw_delete(void* memory) override { free_memory(memory); }
  void recordStream(const c10::DataPtr& data, CUDAStream stream) override {
    if (owner_of(data.get(), false) == nullptr) {
      own->recordStream(data, stream);
    }
  }

  // What a capture forbids is left out inside.
  void emptyCache(MempoolId_t pool) override {
    if (!is_inside()) {
      own->emptyCache(pool);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return is_inside() ? c10::CachingDeviceAllocator::DeviceStats{} : own->getDeviceStats(device);
  }
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    if (is_inside()) {
      *largest = kChunk;
    } else {
      own->cacheInfo(device, largest);
    }
  }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return own->is_simple_data_ptr(data); }
  void copy_data(void* to, const void* from, std::size_t count) const override { own->copy_data(to, from, count); }
  void init(int count) override { own->init(count); }
  bool initialized() override { return own->initialized(); }
  bool isEnabled() const override { return own->isEnabled(); }
  void enable(bool value) override { own->enable(value); }
  double getMemoryFraction(DeviceIndex device) override { return own->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override { own->setMemoryFraction(fraction, device); }
  void* getBaseAllocation(void* memory, size_t* size) override { return own->getBaseAllocation(memory, size); }
  void resetAccumulatedStats(DeviceIndex device) override { own->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { own->resetPeakStats(device); }
  void beginAllocateToPool(
      DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    own->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override { own->endAllocateToPool(device, pool); }
  void releasePool(DeviceIndex device, MempoolId_t pool) override { own->releasePool(device, pool); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override { return own->getPoolUseCount(device, pool); }
  bool checkPoolLiveAllocations(
      DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    return own->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return own->getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
    return own->setCheckpointPoolState(device, std::move(state));
  }
  bool isHistoryEnabled() override { return own->isHistoryEnabled(); }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    own->recordAnnotation(values);
  }
  void pushCompileContext(std::string& context) override { own->pushCompileContext(context); }
  void popCompileContext() override { own->popCompileContext(); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    own->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    own->attachAllocatorTraceTracker(std::move(tracker));
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return own->getIpcDevPtr(std::move(handle)); }
  ShareableHandle shareIpcHandle(void* memory) override { return own->shareIpcHandle(memory); }
  void enablePeerAccess(DeviceIndex from, DeviceIndex to) override { own->enablePeerAccess(from, to); }
  cudaError_t memcpyAsync(
      void* to, int to_device, const void* from, int from_device, size_t count, cudaStream_t stream,
      bool has_peer_access) override {
    return own->memcpyAsync(to, to_device, from, from_device, count, stream, has_peer_access);
  }
  std::string name() override { return own->name(); }

  // What differs between versions of torch; TORCH is 211 for 2.11.
#if TORCH >= 210
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return own->getExpandableSegmentSizes(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return own->getMemoryInfo(device); }
  std::string getUserMetadata() override { return own->getUserMetadata(); }
  void setUserMetadata(const std::string& metadata) override { own->setUserMetadata(metadata); }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { own->setNoSplit(device, pool); }
#endif
#if TORCH >= 211
  SnapshotInfo snapshot(MempoolId_t pool, bool with_traces) override { return own->snapshot(pool, with_traces); }
  void createOrIncrefPool(
      DeviceIndex device, MempoolId_t pool, std::shared_ptr<CUDAAllocator> allocator) override {
    own->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override { own->setUseOnOOM(device, pool, use); }
  void recordHistory(
      bool enabled, CreateContextFn context, size_t most, RecordContext when, bool clears,
      const std::vector<std::string>& skipped) override {
    own->recordHistory(enabled, context, most, when, clears, skipped);
  }
#else
  SnapshotInfo snapshot(MempoolId_t pool) override { return own->snapshot(pool); }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, CUDAAllocator* allocator) override {
    own->createOrIncrefPool(device, pool, allocator);
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool) override { own->setUseOnOOM(device, pool); }
  void recordHistory(
      bool enabled, CreateContextFn context, size_t most, RecordContext when, bool clears) override {
    own->recordHistory(enabled, context, most, when, clears);
  }
#endif
#if TORCH >= 212
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* memory) override {
    return own->getContextForPointer(memory);
  }
  void attachOomRejectionObserver(OomRejectionObserver observer) override {
    own->attachOomRejectionObserver(std::move(observer));
  }
#endif
#if TORCH >= 213
  void markCaptureBegin(DeviceIndex device) override { own->markCaptureBegin(device); }
  void markCaptureEnd(DeviceIndex device) override { own->markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return own->allocateWithAddress(size, address);
  }
#endif
#if TORCH >= 214
  bool supportsUserMetadata() override { return own->supportsUserMetadata(); }
  void annotateMemory(const void* memory, const std::string& metadata) override {
    own->annotateMemory(memory, metadata);
  }
#endif
};

// Memory of arenas that are gone, which nobody has given back yet: the last tensor in an arena may be freed by any thread
// at any time, also while the device works on it, or in a capture.
std::mutex left_behind_mutex;
std::vector<void*>& left_behind() {
  static auto* chunks = new std::vector<void*>();
  return *chunks;
}

void leave_behind(const std::vector<void*>& chunks) {
  std::lock_guard<std::mutex> hold(left_behind_mutex);
  left_behind().insert(left_behind().end(), chunks.begin(), chunks.end());
}

std::mutex front_mutex;
size_t threads_inside = 0;

Front& front() {
  static auto* made = new Front();  // other threads may be on their way through it at any time
  return *made;
}

CUDAAllocator* own_allocator() {
  CUDAAllocator* now = c10::cuda::CUDACachingAllocator::allocator.load();
  return now == &front() ? front().own : now;
}

// Throws where another allocator than ever has come in front of torch's: which would call which is not to be known.
void put_front() {
  std::lock_guard<std::mutex> hold(front_mutex);
  CUDAAllocator* now = c10::cuda::CUDACachingAllocator::allocator.load();
  if (now != &front()) {
    if (front().own != nullptr && front().own != now) {
      throw std::runtime_error("another extension changed torch's allocator");
    }
    front().own = now;
    c10::cuda::CUDACachingAllocator::allocator.store(&front());
  }
  threads_inside += 1;
}

void take_front_away() {
  std::lock_guard<std::mutex> hold(front_mutex);
  threads_inside -= 1;
  if (threads_inside == 0) {
    CUDAAllocator* expected = &front();  // another extension's that came in front of ours stays
    c10::cuda::CUDACachingAllocator::allocator.compare_exchange_strong(expected, front().own);
  }
}

thread_local std::string last_error;

template <typename Work>
int reporting(Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an unknown C++ exception";
  }
  return 1;
}

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) {
    cudaGetLastError();  // else torch would take it for an error of its next call
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
  }
}

}  // namespace

// All of these return 0, or 1 with a message in `slipstream_error`, unless they say otherwise.

EXPORTED const char* slipstream_error() {
  return last_error.c_str();
}

// Returns an arena of this device, which has no memory yet.
EXPORTED void* slipstream_arena_new(int device) {
  return new Shared(std::make_shared<Arena>(static_cast<c10::DeviceIndex>(device)));
}

// Its memory is left behind when the last tensor in it goes.
EXPORTED void slipstream_arena_delete(void* arena) {
  delete static_cast<Shared*>(arena);
}

// Gives back what arenas left behind. The device must be done with it.
EXPORTED int slipstream_give_back() {
  return reporting([&] {
    std::vector<void*> chunks;
    {
      std::lock_guard<std::mutex> hold(left_behind_mutex);
      chunks.swap(left_behind());
    }
    cudaGetLastError();  // with the asynchronous allocator an old error would be taken for one of freeing
    for (void* chunk : chunks) {
      own_allocator()->raw_delete(chunk);
    }
  });
}

EXPORTED size_t slipstream_arena_bytes(void* arena) {
  return (*static_cast<Shared*>(arena))->count_bytes();
}

// Returns how many tensors lie in it.
EXPORTED size_t slipstream_arena_live(void* arena) {
  return (*static_cast<Shared*>(arena))->count_live();
}

// From here on this thread allocates from `arena`.
EXPORTED int slipstream_arena_enter(void* arena, int grows) {
  return reporting([&] {
    if (inside != nullptr || arena == nullptr) {
      throw std::runtime_error(arena ? "this thread is in an arena already" : "the arena was closed");
    }
    put_front();
    inside_shared = static_cast<Shared*>(arena);
    inside = inside_shared->get();
    may_grow = grows != 0;
  });
}

EXPORTED void slipstream_arena_leave() {
  if (inside != nullptr) {
    inside = nullptr;
    inside_shared = nullptr;
    take_front_away();
  }
}

// Other threads may go on using the GPU meanwhile: what they do is no part of the capture and cannot void it.
EXPORTED int slipstream_capture_begin(void* stream) {
  return reporting([&] {
    check(
        cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeThreadLocal),
        "beginning a stream capture");
  });
}

// Ends a capture, failed or not. `made` gets a graph that can be launched, where `wanted` is not 0.
EXPORTED int slipstream_capture_end(void* stream, int wanted, void** made) {
  return reporting([&] {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph), "ending a stream capture");
    if (graph == nullptr) {
      throw std::runtime_error("the stream capture was void");
    }
    cudaGraphExec_t ready = nullptr;
    const cudaError_t result = wanted ? cudaGraphInstantiateWithFlags(&ready, graph, 0) : cudaSuccess;
    cudaGraphDestroy(graph);
    check(result, "making a graph of a stream capture");
    *made = ready;
  });
}

EXPORTED int slipstream_graph_launch(void* graph, void* stream) {
  return reporting([&] {
    check(
        cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream)), "launching a graph");
  });
}

EXPORTED int slipstream_graph_delete(void* graph) {
  return reporting([&] { check(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "deleting a graph"); });
}
