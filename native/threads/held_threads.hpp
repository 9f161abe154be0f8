// Threads that must not abort the process while it exits.
#pragma once

#include <cstdint>
#include <vector>

namespace zero_opt {

// Make these threads sleep forever where the C++ runtime would terminate the process; all others run the previous
// handler. For the exit of interpreters before Python 3.14, which end a thread that asks for their lock with
// pthread_exit; that terminates the process if it unwinds a destructor. Later interpreters let the thread sleep.
// ``threads`` are pthread_t as numbers. Call this with the interpreter's lock held.
void hold_threads(const std::vector<std::uintptr_t>& threads);

}  // namespace zero_opt
