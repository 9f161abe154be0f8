// For AddressSanitizer and UndefinedBehaviorSanitizer: the kernels on arrays that have not a byte more than they need
// and begin anywhere, steps through the redo log and in threads, and what the control area refuses.
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/eventfd.h>
#include <unistd.h>

#include "kernels/dispatch.hpp"
#include "scenario.hpp"
#include "step/step.hpp"
#include "threads/thread_pool.hpp"

namespace {

using zero_opt::UpdateRun;
using zero_opt::Format;
using zero_opt::Kernels;

const std::int64_t kNumels[] = {0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 255, 257, 300, 1023, 1024, 1025, 2500};
constexpr std::uint16_t kBase = 0x300;  // of a block: the upper 12 bits of numbers from 2^-31 to 2
constexpr Format kGradFormats[] = {Format::kFloat32, Format::kBfloat16, Format::kFloat16};
// An update, and the number of its step: SGD's first makes its momentum.
struct Stepped {
  crash::Update update;
  double number;
};
const crash::Update kAdam = {"adam", 2};
const Stepped kSteps[] = {{kAdam, 3.0},       {{"adam", 2, false}, 3.0}, {{"adam", 3}, 3.0}, {{"adagrad", 1}, 3.0},
                          {{"lion", 1}, 3.0}, {{"sgd", 1}, 1.0},         {{"sgd", 1}, 3.0},  {{"sgd", 0}, 3.0}};
// Steps through the redo log: see crash::scenario_named.
const char* const kLogged[] = {"plain",   "bf16",       "amsgrad",   "compact",
                               "adagrad", "lion-split", "sgd-first", "sgd-plain"};
// How arrays are stored.
struct Stored {
  Format grad, moments;
  bool remainder;
};
std::uint64_t checks = 0;

void require(bool holds, const std::string& what) {
  ++checks;
  if (!holds) throw std::runtime_error(what);
}

// ``numel`` elements of some bytes each, an element behind the start of an allocation that ends with them.
class Array {
 public:
  Array(std::int64_t numel, std::int64_t width, std::uint32_t seed)
      : skip_(static_cast<std::size_t>(width)), bytes_(skip_ + static_cast<std::size_t>(numel * width)),
        data_(new char[bytes_]) {
    for (std::size_t i = 0; i < bytes_; ++i) data_[i] = static_cast<char>((i * 37 + seed) % 61);
  }

  template <typename T>
  T* as() { return reinterpret_cast<T*>(data_.get() + skip_); }
  bool same(const Array& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_.get(), other.data_.get(), bytes_) == 0;
  }

 private:
  std::size_t skip_, bytes_;
  std::unique_ptr<char[]> data_;
};

// A run over arrays of its own; the result goes out unless gradients are fp32.
class Run {
 public:
  Run(std::int64_t numel, const crash::Update& update, const Stored& stored) {
    const std::int64_t bases = (numel + zero_opt::kCutNumel - 1) / zero_opt::kCutNumel;
    const std::int64_t moment = zero_opt::bytes_of(stored.moments);
    const bool blocks = stored.moments == Format::kBlock8;
    run.numel = numel;
    run.grad_format = stored.grad;
    run.moment_format = stored.moments;
    run.out_format = Format::kBfloat16;
    run.from.param = add(numel, stored.remainder ? 2 : 4)->as<void>();
    if (stored.remainder) run.from.remainder = add(numel, 2)->as<std::int16_t>();
    if (update.arrays > 0) run.from.exp_avg = add(numel, moment)->as<void>();
    if (update.arrays > 1) run.from.exp_avg_sq = add(numel, moment)->as<void>();
    if (update.arrays > 2) run.from.max_exp_avg_sq = add(numel, 4)->as<float>();
    if (blocks) run.from.exp_avg_base = add_bases(bases);
    if (blocks) run.from.exp_avg_sq_base = add_bases(bases);
    run.to = run.from;
    run.grad = add(numel, zero_opt::bytes_of(stored.grad))->as<void>();
    if (stored.grad != Format::kFloat32) run.out = add(numel, 2)->as<void>();
  }

  bool same(const Run& other) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      if (!arrays_[i]->same(*other.arrays_[i])) return false;
    }
    return true;
  }

  UpdateRun run = {};

 private:
  Array* add(std::int64_t numel, std::int64_t width) {
    arrays_.push_back(std::make_unique<Array>(numel, width, static_cast<std::uint32_t>(arrays_.size() * 7)));
    return arrays_.back().get();
  }

  // Not just any: from some, codes decode to negative numbers, which are no exp_avg_sq.
  std::uint16_t* add_bases(std::int64_t count) {
    std::uint16_t* const bases = add(count, 2)->as<std::uint16_t>();
    for (std::int64_t i = 0; i < count; ++i) bases[i] = kBase;
    return bases;
  }

  std::vector<std::unique_ptr<Array>> arrays_;
};

std::vector<zero_opt::UpdateBatch> batch_of(const Run& run, const Stepped& step) {
  return {{crash::hypers_of(step.update, 0.01), {{run.run, step.number, nullptr}}}};
}

// Every kernel table gives the bits of the first.
void check_step(std::int64_t numel, const Stepped& step, const Stored& stored) {
  const std::vector<const Kernels*> tables = zero_opt::available_kernels();
  Run expected(numel, step.update, stored);
  const std::int64_t found = zero_opt::update_step(*tables[0], batch_of(expected, step), {1, false});
  for (const Kernels* table : tables) {
    Run run(numel, step.update, stored);
    require(zero_opt::update_step(*table, batch_of(run, step), {1, false}) == found, "another count");
    require(run.same(expected), "other bits of " + step.update.name + " by " + table->name);
  }
}

void check_steps(std::int64_t numel) {
  for (const Format grad : kGradFormats) {
    for (const bool remainder : {false, true}) {
      for (const Stepped& step : kSteps) check_step(numel, step, {grad, Format::kFloat32, remainder});
      for (const Format moments : {Format::kBfloat16, Format::kBlock8}) {
        check_step(numel, {kAdam, 3.0}, {grad, moments, remainder});
      }
    }
  }
}

void check_other_kernels(const Kernels& kernels, std::int64_t numel) {
  for (const Format format : kGradFormats) {
    const std::int64_t width = zero_opt::bytes_of(format);
    Array from(numel, width, 1), other(numel, width, 2), to(numel, width, 3), floats(numel, 4, 4);
    const zero_opt::GradSum sum = kernels.grad_sum(from.as<void>(), format, numel);
    require(sum.nonfinite >= 0, "a negative count");
    kernels.convert({numel, from.as<void>(), floats.as<void>(), format, Format::kFloat32});
    kernels.convert({numel, floats.as<void>(), to.as<void>(), Format::kFloat32, format});
    require(format == Format::kFloat16 || to.same(to), "no value");
    const void* sources[] = {from.as<void>(), other.as<void>(), from.as<void>()};
    kernels.mean({numel, 3, 3, format, false, sources, to.as<void>()});
    kernels.mean({numel, 2, 2, format, true, sources, to.as<void>()});
  }
  Array a(numel, 4, 1), b(numel, 4, 2), c(numel, 4, 3), d(numel, 4, 4);
  kernels.fma({numel, a.as<float>(), b.as<float>(), c.as<float>(), d.as<float>()});
  for (const Format format : {Format::kBfloat16, Format::kBlock8}) {
    const std::int64_t width = zero_opt::bytes_of(format), bases = (numel + 63) / 64;
    Array m(numel, width, 1), v(numel, width, 2), m_base(bases, 2, 3), v_base(bases, 2, 4);
    const zero_opt::MomentRun run = {numel,
                                     format,
                                     12345u,
                                     m.as<void>(),
                                     v.as<void>(),
                                     m_base.as<std::uint16_t>(),
                                     v_base.as<std::uint16_t>(),
                                     a.as<float>(),
                                     b.as<float>()};
    kernels.pack_moments(run);
    kernels.unpack_moments(run);
  }
}

void check_redo_log(const std::string& isa) {
  for (const char* name : kLogged) {
    for (const char* shape : {"short", "cut"}) {
      for (std::size_t lanes = 1; lanes <= 4; ++lanes) {
        const crash::Case step(crash::scenario_named(name, shape, lanes), isa);
        crash::Arena arena(step.bytes());
        arena.load(step.begun());
        std::string what;
        require(!step.finished(arena.base(), what), "done before it is");
        for (int again = 0; again < 2; ++again) {
          step.finish(arena.base());
          const bool finished = step.finished(arena.base(), what);
          require(finished, std::string(name) + ": " + what);
        }
      }
    }
  }
}

// A step of an arena on the heap, on several threads: its ends are watched.
void check_threads(std::int64_t numel, const crash::Update& update) {
  constexpr std::size_t kLanes = 3, kMaxRuns = 2;
  const std::size_t control_bytes = zero_opt::ArenaView(nullptr, kLanes, kMaxRuns).control_bytes();
  const std::size_t bytes = control_bytes + static_cast<std::size_t>(numel * (2 + update.arrays)) * sizeof(float);
  std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), std::free);
  std::memset(memory.get(), 0, bytes);
  zero_opt::Control control(memory.get(), bytes, kLanes, kMaxRuns);
  float* first = reinterpret_cast<float*>(memory.get() + control_bytes);
  const UpdateRun run = crash::plain_run(update, first, numel);
  for (std::int64_t i = 0; i < numel; ++i) first[(1 + update.arrays) * numel + i] = static_cast<float>(i % 11) - 5;
  const int wake = eventfd(0, EFD_NONBLOCK);
  zero_opt::Hypers hypers = crash::hypers_of(update, 0.01);
  hypers.maximize = true;
  for (int step = 1; step <= 2; ++step) {
    control.submit({{hypers, {{run, static_cast<double>(step), nullptr}}}}, wake, true, false, "baseline");
    control.finish(kLanes);
    require(control.completed() == static_cast<std::uint64_t>(step), "not completed");
  }
  close(wake);
}

bool refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void check_refusals() {
  constexpr std::size_t kLanes = 2, kMaxRuns = 1;
  const std::size_t control_bytes = zero_opt::ArenaView(nullptr, kLanes, kMaxRuns).control_bytes();
  crash::Arena arena(control_bytes + 4096);
  const auto made = [&](std::size_t bytes, std::size_t lanes, std::size_t runs) {
    return refused([&] { zero_opt::Control(arena.base(), bytes, lanes, runs); });
  };
  require(made(control_bytes - 1, kLanes, kMaxRuns) && made(arena.bytes(), 0, kMaxRuns), "too small an arena");
  zero_opt::Control control(arena.base(), arena.bytes(), kLanes, kMaxRuns);
  require(made(arena.bytes(), kLanes, 1 + kMaxRuns) && made(arena.bytes(), 1, kMaxRuns), "another format");
  Run outside(10, kAdam, {Format::kFloat32, Format::kFloat32, false});
  const int wake = eventfd(0, EFD_NONBLOCK);
  const auto submitted = [&](const UpdateRun& run, int count) {
    const std::vector<zero_opt::CountedRun> runs(static_cast<std::size_t>(count), {run, 1.0, nullptr});
    return [&, runs] { control.submit({{{}, runs}}, wake, false, false, "baseline"); };
  };
  require(refused(submitted(outside.run, 1)), "an array outside");
  float* first = reinterpret_cast<float*>(arena.base() + control_bytes);
  UpdateRun inside = crash::plain_run(kAdam, first, 200);
  require(refused(submitted(inside, 2)), "too many runs");
  inside.out = first + 799;
  require(refused(submitted(inside, 1)), "the output over the gradient");
  inside.out = nullptr;
  require(!refused(submitted(inside, 1)) && refused(submitted(inside, 1)), "an unfinished step");
  require(control.wait(1, wake, wake, 0.0) != zero_opt::Waited::kDone, "done before it is");
  control.finish(kLanes);
  require(control.wait(1, wake, wake, 0.0) == zero_opt::Waited::kDone, "not done");
  require(control.error().empty() && control.progress().size() == kLanes + 1, "a word of each lane, and one of drafts");
  close(wake);
}

void check_pool() {
  for (int count = 0; count < 6; ++count) {
    std::vector<int> calls(static_cast<std::size_t>(count));
    zero_opt::run_parallel(count, [&](int index) { ++calls[static_cast<std::size_t>(index)]; });
    require(calls == std::vector<int>(calls.size(), 1), "a task that was not called once");
  }
  require(zero_opt::usable_threads(1 << 20) >= 1 && zero_opt::cgroup_cpus("/nowhere", "/nowhere") > 1e9, "no CPU");
}

}  // namespace

int main() {
  try {
    for (const std::int64_t numel : kNumels) {
      check_steps(numel);
      for (const Kernels* table : zero_opt::available_kernels()) check_other_kernels(*table, numel);
    }
    for (const Stepped& step : kSteps) {  // long enough to be written past the caches
      check_step((1 << 20) + 65, step, {Format::kBfloat16, Format::kFloat32, false});
    }
    for (const Kernels* table : zero_opt::available_kernels()) check_redo_log(table->name);
    for (const std::int64_t numel : {1, 1025, 65537, 100'000}) {
      for (const Stepped& step : kSteps) check_threads(numel, step.update);
    }
    check_refusals();
    check_pool();
    std::printf("%llu checks\n", static_cast<unsigned long long>(checks));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
