// Threads that must not abort the process while it exits.
#pragma once

#include <cstdint>
#include <vector>

namespace zero_opt {

// From now on these threads sleep for ever where the C++ runtime would terminate the process; all others do what the
// handler before does. For the exit of an interpreter before Python 3.14: it ends a thread that asks for its lock by
// pthread_exit, which terminates the process if it unwinds a destructor. Later interpreters let the thread sleep.
// ``threads`` are pthread_t as numbers. Call it with the interpreter's lock held.
void hold_threads(const std::vector<std::uintptr_t>& threads);

}  // namespace zero_opt
