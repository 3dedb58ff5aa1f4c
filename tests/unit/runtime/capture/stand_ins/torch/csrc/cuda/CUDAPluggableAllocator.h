#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
namespace torch::cuda::CUDAPluggableAllocator {
struct CUDAPluggableAllocator : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
  CUDAPluggableAllocator(
      std::function<void*(size_t, int, cudaStream_t)>, std::function<void(void*, size_t, int, cudaStream_t)>) {}
};
}  // namespace torch::cuda::CUDAPluggableAllocator
