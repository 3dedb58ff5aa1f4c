// What a test calls: torch's allocator, which here is the C library's, and what the library puts in front of it.
#include "arena.cpp"

#include <cstdlib>
#include <set>

namespace {
struct Own final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
  std::set<void*> taken;
  size_t recorded = 0;
  size_t emptied = 0;
  static Own& get() {
    static auto* made = new Own();
    return *made;
  }
  static void free_own(void* memory) {
    get().taken.erase(memory);
    std::free(memory);
  }
  void* take(size_t size) {
    void* memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
    taken.insert(memory);
    return memory;
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = take(size);
    return {memory, memory, &free_own, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  void* raw_alloc(size_t size) override { return take(size); }
  void* raw_alloc_with_stream(size_t size, cudaStream_t) override { return take(size); }
  void raw_delete(void* memory) override { free_own(memory); }
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override { recorded += 1; }
  void emptyCache(c10::cuda::MempoolId_t) override { emptied += 1; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {1}; }
  void cacheInfo(c10::DeviceIndex, size_t* largest) override { *largest = size_t(1) << 40; }
  int getPoolUseCount(c10::DeviceIndex, c10::cuda::MempoolId_t) override { return 7; }
  std::string name() override { return "own"; }
};
CUDAAllocator* now() { return c10::cuda::CUDACachingAllocator::allocator.load(); }
}  // namespace

EXPORTED void test_begin() { c10::cuda::CUDACachingAllocator::allocator.store(&Own::get()); }
EXPORTED int test_is_own() { return now() == &Own::get(); }
EXPORTED size_t test_own_blocks() { return Own::get().taken.size(); }
EXPORTED size_t test_emptied() { return Own::get().emptied; }
EXPORTED size_t test_recorded() { return Own::get().recorded; }
EXPORTED int test_uses_of_a_pool() { return now()->getPoolUseCount(0, {0, 1}); }
// Another extension's allocator, in front of what is there or gone again.
EXPORTED void test_other(int is_there) {
  static auto* other = new Own();
  c10::cuda::CUDACachingAllocator::allocator.store(is_there ? other : &Own::get());
}
EXPORTED int test_asked() { return now()->getDeviceStats(0).asked; }
EXPORTED void test_empty() { now()->emptyCache({0, 0}); }
EXPORTED void test_set_stream(size_t stream) { c10::cuda::the_stream.value = reinterpret_cast<void*>(stream); }
EXPORTED void test_set_device(int device) { c10::cuda::the_device = static_cast<c10::DeviceIndex>(device); }
EXPORTED void test_make_void(int is_void) { capture_is_void = is_void != 0; }

// A tensor: its memory and its deleter. Null where there is no memory, with the reason in `slipstream_error`.
EXPORTED void* test_tensor(size_t size) {
  c10::DataPtr* made = nullptr;
  reporting([&] { made = new c10::DataPtr(now()->allocate(size)); });
  return made;
}
EXPORTED void* test_memory(void* tensor) { return static_cast<c10::DataPtr*>(tensor)->get(); }
EXPORTED void test_record(void* tensor) { now()->recordStream(*static_cast<c10::DataPtr*>(tensor), {}); }
EXPORTED void test_drop(void* tensor) { delete static_cast<c10::DataPtr*>(tensor); }
EXPORTED void* test_raw(size_t size) { return now()->raw_alloc(size); }
EXPORTED void test_raw_delete(void* memory) { now()->raw_delete(memory); }
