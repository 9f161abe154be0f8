// The worker's life: a process without anything but this extension, which makes the steps that a trainer submits.
#pragma once

#include <vector>

namespace zero_opt {

// What the worker inherits. The events become non-blocking.
struct WorkerFiles {
  int arena, wake, done;
  int trainer_pidfd;
};

// Serves until the trainer dies or asks it to go, then leaves the process with status 0. First it finishes what a
// predecessor left unfinished and takes the arena's pages, which it then is said to be ready for. On an error the text
// is left in the control area and the process with status 1.
//
// Signals that could be meant for the trainer's whole group are blocked: the worker ends when the trainer does.
[[noreturn]] void worker_run(const WorkerFiles& files, const std::vector<int>& cpus, int threads);

}  // namespace zero_opt
