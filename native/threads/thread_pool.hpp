// A fork-join pool of our own, so that no second OpenMP runtime comes into the process.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero_opt {

// How many threads a request gets: no more than the CPUs this thread may run on or than the cgroups' CPU quota
// (rounded up), and at least 1.
int usable_threads(int requested);

// CPUs' worth of time that the cgroups grant, the least among those in ``listing`` (as /proc/self/cgroup) and all
// above them, mounted at ``root``; infinite without a limit.
double cgroup_cpus(const std::string& listing, const std::string& root);

// Lets a thread run on these CPUs only; returns an error number, 0 where that is done or cannot be asked for.
int set_cpus(pthread_t thread, const std::vector<int>& cpus);

// Waking the threads takes about as long as stepping this many elements.
constexpr std::int64_t kAloneNumel = 65536;

// Calls task(index) for every index in [0, count), each on its own thread, and returns when all are done. One is the
// caller, which takes the place of the pool's thread on its CPU; the others are the pool's. With count 1, where threads
// cannot be had, or while another thread has the pool, the caller makes all the calls itself, one after the other:
// tasks must not wait for each other, nor throw.
//
// Threads start at first use, sleep in between, and are started afresh in a forked child. They are pinned, one per
// CPU, when there is one for each CPU that the process may use; fewer are not, since another process on the host
// would choose the same CPUs.
void run_parallel(int count, const std::function<void(int)>& task);

// Calls task(index) for every index in [0, count), on so many threads of the pool; likewise. Every thread has a range of
// neighbors, the same for the same numbers, so that it keeps to the memory it touched before; who is done with theirs
// takes from the others.
void share_out(std::int64_t count, int threads, const std::function<void(std::int64_t)>& task);

}  // namespace zero_opt
