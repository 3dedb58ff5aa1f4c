// As much of CUDA's runtime as arena.cpp calls, on a machine without a GPU: captures only count.
#pragma once
using cudaError_t = int;
using cudaStream_t = void*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;
constexpr int cudaSuccess = 0;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
inline bool capture_is_void = false;
inline const char* cudaGetErrorString(cudaError_t) { return "operation failed due to a previous error during capture"; }
inline cudaError_t cudaGetLastError() { return 0; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return 0; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) { return stream ? 0 : 900; }
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = capture_is_void ? nullptr : stream;
  return capture_is_void ? 901 : 0;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = graph;
  return 0;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return 0; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return 0; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return 0; }
