#include "scenario.hpp"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>

#include "kernels/dispatch.hpp"
#include "step/step.hpp"
#include "worker/logged_step.hpp"

namespace crash {
namespace {

using zero_opt::ArenaView;
using zero_opt::Format;
using zero_opt::kCutNumel;
using zero_opt::UpdateRun;

constexpr std::size_t kAlign = 64;

zero_opt::Hypers scaled_hypers(const Scenario& scenario, double lr) {
  zero_opt::Hypers hypers = hypers_of(scenario.update, lr);
  hypers.grad_scale = 0.5;
  hypers.prediction = scenario.prediction;
  return hypers;
}

std::uint64_t mixed(std::uint64_t number) {
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9ull;
  number = (number ^ (number >> 27)) * 0x94d049bb133111ebull;
  return number ^ (number >> 31);
}

// From -1 to 1.
float random_value(std::uint64_t seed, std::int64_t i) {
  const std::uint64_t bits = mixed(seed * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(i) + 1);
  return static_cast<float>(static_cast<std::int64_t>(bits >> 40) - (1 << 23)) / (1 << 23);
}

void write_floats(const float* values, std::int64_t numel, Format format, void* to) {
  if (format == Format::kFloat32) {
    std::memcpy(to, values, static_cast<std::size_t>(numel) * 4);
  } else {
    zero_opt::kernels_named("baseline").convert({numel, values, to, Format::kFloat32, format});
  }
}

// Hands out addresses one behind the other.
class Places {
 public:
  explicit Places(char* next) : next_(next) {}

  template <typename T>
  T* take(std::int64_t bytes, bool wanted = true) {
    if (!wanted) return nullptr;
    char* found = next_;
    next_ += (static_cast<std::size_t>(bytes) + kAlign - 1) / kAlign * kAlign;
    return reinterpret_cast<T*>(found);
  }
  char* next() const { return next_; }

 private:
  char* next_;
};

zero_opt::StateArrays bank(const Scenario& scenario, std::int64_t n, Places& places) {
  const bool blocks = scenario.moments == Format::kBlock8;
  const std::int64_t moment = n * zero_opt::bytes_of(scenario.moments);
  const std::int64_t bases = (n + kCutNumel - 1) / kCutNumel * 2;
  zero_opt::StateArrays arrays = {};
  arrays.param = places.take<void>(n * (scenario.has_remainder ? 2 : 4));
  arrays.remainder = places.take<std::int16_t>(n * 2, scenario.has_remainder);
  arrays.exp_avg = places.take<void>(moment, scenario.update.arrays > 0);
  arrays.exp_avg_sq = places.take<void>(moment, scenario.update.arrays > 1);
  arrays.exp_avg_base = places.take<std::uint16_t>(bases, blocks);
  arrays.exp_avg_sq_base = places.take<std::uint16_t>(bases, blocks);
  arrays.max_exp_avg_sq = places.take<float>(n * 4, scenario.amsgrad);
  return arrays;
}

UpdateRun placed(const Scenario& scenario, std::int64_t n, Places& places) {
  UpdateRun run = {};
  run.numel = n;
  run.from = bank(scenario, n, places);
  run.to = scenario.drafted ? bank(scenario, n, places) : run.from;
  run.grad = places.take<void>(n * zero_opt::bytes_of(scenario.grad));
  run.out = places.take<void>(n * zero_opt::bytes_of(scenario.out), scenario.has_out);
  run.grad_format = scenario.grad;
  run.moment_format = scenario.moments;
  run.out_format = scenario.out;
  return run;
}

// Sums of squares, which are drafted too.
double* placed_sums(const Scenario& scenario, std::int64_t n, Places& places) {
  const std::int64_t sums = (n + zero_opt::kSumNumel - 1) / zero_opt::kSumNumel;
  return places.take<double>(sums * static_cast<std::int64_t>(sizeof(double)), scenario.drafted);
}

std::size_t data_bytes(const Scenario& scenario) {
  Places places(nullptr);
  for (const std::int64_t numel : scenario.numels) {
    placed(scenario, numel, places);
    placed_sums(scenario, numel, places);
  }
  return reinterpret_cast<std::uintptr_t>(places.next());
}

// 8-bit moments ("blocks") or bf16 ones ("halves"), as the usual loops take them: with split masters, or as what follows
// the name says. False for another name.
bool has_compact_moments(const std::string& name, Scenario& found) {
  const std::string moments = name.substr(0, 6), rest = name.substr(moments.size());
  if (moments != "blocks" && moments != "halves") return false;
  found.moments = moments == "blocks" ? Format::kBlock8 : Format::kBfloat16;
  if (rest == "-fp32") return true;
  found.grad = Format::kBfloat16;
  if (rest == "-master") {
    found.out = Format::kBfloat16;
    found.has_out = true;
    return true;
  }
  found.has_remainder = true;
  found.amsgrad = rest == "-amsgrad";
  return found.amsgrad || rest.empty();
}

// An update other than Adam, and what follows its name: gradients and results in bf16, a split master, a prediction, or
// no state.
bool is_other_update(const std::string& name, Scenario& found) {
  const std::size_t dash = std::min(name.find('-'), name.size());
  const std::string rest = name.substr(dash);
  const std::string update = name.substr(0, dash);
  if (update != "adagrad" && update != "lion" && update != "sgd") return false;
  found.update = {update, rest == "-plain" && update == "sgd" ? 0 : 1};
  if (rest == "-bf16" || rest == "-split") found.grad = Format::kBfloat16;
  if (rest == "-bf16") found.out = Format::kBfloat16;
  found.has_out = rest == "-bf16" || rest == "-predicted";
  found.has_remainder = rest == "-split";
  if (rest == "-predicted") found.prediction = 1.5;
  return rest.empty() || found.has_out || found.has_remainder || found.update.arrays == 0;
}

class Event {
 public:
  Event() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~Event() { close(fd_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

Scenario scenario_named(const std::string& name, const std::string& shape, std::size_t lanes) {
  const std::string first = "-first";
  if (name.size() > first.size() && name.compare(name.size() - first.size(), first.size(), first) == 0) {
    Scenario found = scenario_named(name.substr(0, name.size() - first.size()), shape, lanes);
    found.name = name;
    found.before = 0;
    return found;
  }
  Scenario found = {name, Format::kFloat32, Format::kFloat32, Format::kFloat32, false, false, false, {}, lanes,
                    shape == "drafted", shape == "cut", 0.0};
  if (name == "bf16") {
    found.grad = found.out = Format::kBfloat16;
    found.has_out = true;
  } else if (name == "amsgrad") {
    found.out = Format::kFloat16;
    found.has_out = found.amsgrad = true;
  } else if (name == "predicted") {
    found.has_out = true;
    found.prediction = 1.5;
  } else if (name == "split") {
    found.grad = Format::kBfloat16;
    found.has_remainder = true;
  } else if (name == "compact") {
    found.grad = Format::kFloat16;
    found.moments = Format::kBlock8;
    found.has_remainder = true;
  } else if (name != "plain" && !has_compact_moments(name, found) && !is_other_update(name, found)) {
    throw std::invalid_argument("there is no scenario " + name);
  }
  const std::int64_t block = zero_opt::kLogNumel;
  found.numels = shape == "short" ? std::vector<std::int64_t>{2 * block + 6, block, 7, block + 33, 1}
                                  : std::vector<std::int64_t>{block + 70, 20, 2 * block, 7};
  return found;
}

zero_opt::Hypers hypers_of(const Update& update, double lr) {
  const std::string& name = update.name;
  std::map<std::string, double> values = {{"lr", lr}, {"weight_decay", 0.1}};
  if (name == "adam" || name == "lion") values.insert({{"beta1", 0.9}, {"beta2", 0.99}});
  if (name == "adam") values.insert({{"eps", 1e-8}, {"decoupled", update.decoupled ? 1.0 : 0.0}});
  if (name == "adagrad") values.insert({{"lr_decay", 0.1}, {"eps", 1e-10}});
  const double momentum = update.arrays > 0 ? 0.9 : 0.0;
  if (name == "sgd") values.insert({{"momentum", momentum}, {"dampening", 0.1}, {"nesterov", 0.0}});
  return zero_opt::make_hypers(name, values);
}

UpdateRun plain_run(const Update& update, float* first, std::int64_t numel) {
  UpdateRun run = {};
  run.numel = numel;
  run.from.param = first;
  if (update.arrays > 0) run.from.exp_avg = first + numel;
  if (update.arrays > 1) run.from.exp_avg_sq = first + 2 * numel;
  if (update.arrays > 2) run.from.max_exp_avg_sq = first + 3 * numel;
  run.to = run.from;
  run.grad = first + (1 + update.arrays) * numel;
  return run;
}

Arena::Arena(std::size_t bytes) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(base);
}

Arena::~Arena() { munmap(base_, bytes_); }

void Arena::load(const Image& image) { std::memcpy(base_, image.data(), bytes_); }

void Arena::load(const Arena& other) { std::memcpy(base_, other.base_, bytes_); }

Case::Case(const Scenario& scenario, const std::string& isa)
    : scenario_(scenario),
      isa_(isa),
      control_bytes_(ArenaView(nullptr, scenario.lanes, kMaxRuns).control_bytes()),
      bytes_(control_bytes_ + data_bytes(scenario)) {
  make_reference();
  const Event wake;
  Arena arena(bytes_);
  fill(arena.base());
  zero_opt::Control control(arena.base(), bytes_, scenario_.lanes, kMaxRuns);
  for (int step = 1; step < number(); ++step) {
    fill_gradients(arena.base(), step);
    control.submit(batches(arena.base(), step), wake.fd(), false, scenario_.past_caches, isa_);
    control.finish(static_cast<int>(scenario_.lanes));
  }
  fill_gradients(arena.base(), number());
  if (scenario_.drafted) {
    control.draft_sums(sums(arena.base()), wake.fd(), false, isa_);
    control.draft(batches(arena.base(), number()), wake.fd(), false, isa_);
  } else {
    control.submit(batches(arena.base(), number()), wake.fd(), false, scenario_.past_caches, isa_);
  }
  begun_ = arena.image();
}

void Case::make_reference() {
  Arena arena(bytes_);
  fill(arena.base());
  const zero_opt::Kernels& kernels = zero_opt::kernels_named(isa_);
  for (int step = 1; step <= number(); ++step) {
    fill_gradients(arena.base(), step);
    nonfinite_ = zero_opt::update_step(kernels, batches(arena.base(), step), {1, false});
  }
  for (const zero_opt::GradArray& grad : sums(arena.base())) {
    for (std::int64_t at = 0; at < grad.numel; at += zero_opt::kSumNumel) {
      const char* from = static_cast<const char*>(grad.data) + at * zero_opt::bytes_of(grad.format);
      const std::int64_t n = std::min(zero_opt::kSumNumel, grad.numel - at);
      grad.squares[at / zero_opt::kSumNumel] = kernels.grad_sum(from, grad.format, n).squares;
    }
  }
  reference_ = arena.image();
}

std::vector<zero_opt::UpdateBatch> Case::batches(char* base, int step) const {
  Places places(data(base));
  std::vector<zero_opt::UpdateBatch> found;
  for (const std::int64_t numel : scenario_.numels) {
    const zero_opt::Hypers hypers = scaled_hypers(scenario_, 0.01 * static_cast<double>(found.size() + 1));
    UpdateRun run = placed(scenario_, numel, places);
    if (step < number()) run.to = run.from;
    placed_sums(scenario_, numel, places);
    found.push_back({hypers, {{run, static_cast<double>(step), nullptr}}});
  }
  return found;
}

std::vector<zero_opt::GradArray> Case::sums(char* base) const {
  if (!scenario_.drafted) return {};
  Places places(data(base));
  std::vector<zero_opt::GradArray> found;
  for (const std::int64_t numel : scenario_.numels) {
    const UpdateRun run = placed(scenario_, numel, places);
    const Format format = scenario_.has_remainder ? Format::kBfloat16 : Format::kFloat32;
    found.push_back({run.from.param, format, numel, placed_sums(scenario_, numel, places)});
  }
  return found;
}

void Case::fill(char* base) const {
  for (const zero_opt::UpdateBatch& batch : batches(base, 1)) {
    const UpdateRun& run = batch.runs[0].run;
    std::vector<float> values(static_cast<std::size_t>(run.numel));
    for (std::int64_t i = 0; i < run.numel; ++i) values[static_cast<std::size_t>(i)] = random_value(7, i + run.numel);
    write_floats(values.data(), run.numel, scenario_.has_remainder ? Format::kBfloat16 : Format::kFloat32,
                 run.from.param);
  }
}

void Case::fill_gradients(char* base, int step) const {
  std::uint64_t run_number = 0;
  for (const zero_opt::UpdateBatch& batch : batches(base, 1)) {
    const UpdateRun& run = batch.runs[0].run;
    std::vector<float> values(static_cast<std::size_t>(run.numel));
    for (std::int64_t i = 0; i < run.numel; ++i) {
      // In another number of places in every run; the steps before it have all gradients finite.
      const bool bad = i % 31 == 5 && static_cast<std::uint64_t>(i / 31) <= run_number;
      const std::uint64_t seed = static_cast<std::uint64_t>(step) * 100 + run_number;
      values[static_cast<std::size_t>(i)] = bad && step == number() ? INFINITY : random_value(seed, i);
    }
    write_floats(values.data(), run.numel, scenario_.grad, const_cast<void*>(run.grad));
    ++run_number;
  }
}

std::uint64_t Case::blocks() const {
  std::uint64_t blocks = 0;
  for (const std::int64_t numel : scenario_.numels) blocks += static_cast<std::uint64_t>(zero_opt::log_blocks(numel));
  return blocks;
}

void Case::finish(char* base) const {
  const ArenaView view(base, scenario_.lanes, kMaxRuns);
  zero_opt::finish_step(view, bytes_, static_cast<int>(scenario_.lanes));
  zero_opt::finish_drafts(view, bytes_, static_cast<int>(scenario_.lanes));
}

bool Case::finished(const char* base, std::string& what) const {
  what.clear();
  for (std::size_t at = control_bytes_; at < bytes_ && what.empty(); ++at) {
    if (std::memcmp(base + at, reference_.data() + at, bytes_ - at) == 0) break;
    if (base[at] != reference_[at]) what = "byte " + std::to_string(at - control_bytes_) + " of the data";
  }
  return words_finished(base, what) && what.empty();
}

bool Case::words_finished(const char* base, std::string& what) const {
  const ArenaView view(const_cast<char*>(base), scenario_.lanes, kMaxRuns);
  const zero_opt::ControlBlock& control = view.control();
  if (scenario_.drafted) {
    if (control.drafts_done.load() != 2 * scenario_.numels.size()) what += " number of drafts";
    return what.empty();
  }
  const auto last = static_cast<std::uint64_t>(number());
  if (control.submitted.load() != last || control.completed.load() != last) what += " sequence numbers";
  const std::uint64_t counted = control.nonfinite.load();
  if (counted != static_cast<std::uint64_t>(nonfinite_)) what += " " + std::to_string(counted) + " not finite";
  for (std::size_t lane = 0; lane < scenario_.lanes; ++lane) {
    if (view.lanes()[lane].progress == 0) what += " no progress of lane " + std::to_string(lane);
  }
  return what.empty();
}

}  // namespace crash
