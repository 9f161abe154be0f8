// One call for everything that a step has to do, cut into blocks over the threads of the pool.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "step/hypers.hpp"

namespace zero_opt {

struct Parallel {
  int threads;           // wanted; at most usable_threads() are had
  bool flush_denormals;  // on the threads that work, while they work
};

// A run and its step number t, counted from 1. A step that is kept in memory (as fp32) is the number of steps
// done: t is one more, added in fp32, and it is stored when the step is over. So both stop at 2^24, as torch's do.
struct CountedRun {
  UpdateRun run;
  double step;
  float* kept_step;  // null if ``step`` is it
};

double step_of(const CountedRun& counted);

// Runs that share hyperparameters.
struct UpdateBatch {
  Hypers hypers;
  std::vector<CountedRun> runs;
};

// Calls work(run, scalars) for every run that has elements; scalars is null if they are those of the run before.
template <typename Work>
void for_runs(const std::vector<UpdateBatch>& batches, const Work& work) {
  for (const UpdateBatch& batch : batches) {
    std::optional<double> last;  // step of the last scalars; any number, for users may write to a kept one
    for (const CountedRun& counted : batch.runs) {
      if (counted.run.numel == 0) continue;
      const double step = step_of(counted);
      if (step == last) {
        work(counted.run, nullptr);
      } else {
        const StepScalars scalars = scalars_of(batch.hypers, step);
        work(counted.run, &scalars);
      }
      last = step;
    }
  }
}

// Steps every run; returns how many gradient elements, after the factor, were not finite. The bits do not depend
// on the threads.
std::int64_t update_step(const Kernels& kernels, const std::vector<UpdateBatch>& batches, const Parallel& parallel);

// An array of gradient elements.
struct GradArray {
  const void* data;
  Format format;
  std::int64_t numel;
  double* squares;  // null, or a place for one sum per kSumNumel elements, rounded up
};

// Sum of the squares of all elements, and how many are not finite. Every kSumNumel elements of an array, counted
// from its start, are summed in lanes, and those sums pairwise in order; so the result does not depend on threads
// or instruction set, and on cutting arrays elsewhere only by rounding: all terms are non-negative and none goes
// through more than kSumNumel / 32 + 5 + ceil(log2(number of sums)) additions of relative error 2^-53.
// Where an array has ``squares``, those are what its sums were found to be.
GradSum grad_sum(const Kernels& kernels, const std::vector<GradArray>& grads, const Parallel& parallel);

// Bytes to be copied; no two such runs overlap.
struct CopyRun {
  void* to;
  const void* from;
  std::int64_t bytes;
  Format format;    // of the elements, if there are squares
  double* squares;  // null, or a place for their sums, which grad_sum takes, found while they are in the cache
};

// Copies every run; past the caches if together they would fill those, for then whoever reads first finds the rest gone.
void copy_runs(const Kernels& kernels, const std::vector<CopyRun>& runs, int threads);

}  // namespace zero_opt
