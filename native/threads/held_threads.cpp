#include "threads/held_threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

namespace zero_opt {
namespace {

// Never freed: a thread may read it until the process has ended.
std::atomic<const std::vector<std::uintptr_t>*> held{nullptr};
std::terminate_handler previous = nullptr;

// Runs on the thread that the interpreter ends, and unwinds nothing: locks that the thread holds stay held.
[[noreturn]] void sleep_if_held() {
  const std::vector<std::uintptr_t>& threads = *held.load();
  if (std::find(threads.begin(), threads.end(), (std::uintptr_t)pthread_self()) != threads.end()) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

void hold_threads(const std::vector<std::uintptr_t>& threads) {
  if (threads.empty()) return;
  auto* all = new std::vector<std::uintptr_t>(threads);
  if (const auto* earlier = held.load()) all->insert(all->end(), earlier->begin(), earlier->end());
  const bool first = held.exchange(all) == nullptr;
  if (first) previous = std::set_terminate(sleep_if_held);
}

}  // namespace zero_opt
