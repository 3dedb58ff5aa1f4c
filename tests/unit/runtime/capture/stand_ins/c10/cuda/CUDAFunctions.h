#pragma once
#include <c10/core/Device.h>
namespace c10::cuda {
inline c10::DeviceIndex the_device = 0;
inline c10::DeviceIndex current_device() { return the_device; }
}  // namespace c10::cuda
