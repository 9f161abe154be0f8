// A copy past the caches: included once by each isa_*.cpp, like step_loop.inl.
#pragma once

#include "kernels/stream.inl"

namespace zero_opt {
namespace {

// As memcpy; past the caches where both arrays lie alike in lines.
void stream_copy(const void* from, void* to, std::int64_t bytes) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  const std::int64_t past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target) % kLine);
  const bool alike = reinterpret_cast<std::uintptr_t>(source) % kLine == static_cast<std::uintptr_t>(past);
  const std::int64_t before = (kLine - past) % kLine;
  std::int64_t at = alike && before < bytes ? before : bytes;
  __builtin_memcpy(target, source, static_cast<__SIZE_TYPE__>(at));
  for (; at + kLine <= bytes; at += kLine) stream_line(source + at, target + at);
  __builtin_memcpy(target + at, source + at, static_cast<__SIZE_TYPE__>(bytes - at));
  end_streams();
}

}  // namespace
}  // namespace zero_opt
