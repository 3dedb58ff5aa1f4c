#pragma once
#include <cuda_runtime_api.h>
namespace c10::cuda {
struct CUDAStream {
  cudaStream_t value = nullptr;
  operator cudaStream_t() const { return value; }
};
inline thread_local CUDAStream the_stream{reinterpret_cast<void*>(1)};
inline CUDAStream getCurrentCUDAStream() { return the_stream; }
}  // namespace c10::cuda
