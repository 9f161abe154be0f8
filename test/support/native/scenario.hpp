// A small step in an arena of its own, for programs that disturb it: what is stepped, and what has to come of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "worker/control.hpp"

namespace crash {

using Image = std::vector<char>;

constexpr std::size_t kMaxRuns = 16;

// An update by its name, and how many arrays of state it has: SGD without any has no momentum.
struct Update {
  std::string name;
  int arrays;
  bool decoupled = true;  // Adam's weight decay
};

// How the state is stored, and how many elements the runs have.
struct Scenario {
  std::string name;
  zero_opt::Format grad, moments, out;
  bool has_out, has_remainder, amsgrad;
  std::vector<std::int64_t> numels;
  std::size_t lanes;
  bool drafted;  // the step is a draft, to another bank, and so are sums
  bool past_caches;
  double prediction;  // see zero_opt::StepScalars
  Update update = {"adam", 2};
  int before = 1;  // steps that are done before the one to be made
};

// The scenario of that name with runs that are short, or cut within ("cut", "drafted"). A name that ends with
// "-first" is of the first step of all. Throws std::invalid_argument for another.
Scenario scenario_named(const std::string& name, const std::string& shape, std::size_t lanes);

// With weight decay of 0.1. Throws std::invalid_argument for an update that there is not.
zero_opt::Hypers hypers_of(const Update& update, double lr);

// A run over arrays of floats, one after the other: param, those of state, gradient.
zero_opt::UpdateRun plain_run(const Update& update, float* first, std::int64_t numel);

// Memory that a fork shares with this process.
class Arena {
 public:
  explicit Arena(std::size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  Image image() const { return Image(base_, base_ + bytes_); }
  void load(const Image& image);
  void load(const Arena& other);

 private:
  char* base_;
  std::size_t bytes_;
};

// A step of a scenario, submitted and to be made, and one done before it unless it is the first.
class Case {
 public:
  Case(const Scenario& scenario, const std::string& isa);

  std::size_t bytes() const { return begun_.size(); }
  std::size_t lanes() const { return scenario_.lanes; }
  std::uint64_t blocks() const;
  const Image& begun() const { return begun_; }

  // What a worker does with the step, or with what is left of it. Throws what finish_step and finish_drafts throw.
  void finish(char* base) const;
  // Whether all that counts is there: the bits of a plain step in all arrays, how many gradients were not finite, and
  // the words. If not, ``what`` says where.
  bool finished(const char* base, std::string& what) const;

 private:
  // The number of the step to be made.
  int number() const { return scenario_.before + 1; }
  // Of that step, or of one before it, in place.
  std::vector<zero_opt::UpdateBatch> batches(char* base, int step) const;
  // What sums are drafted of, which is the parameters: not all gradients are finite.
  std::vector<zero_opt::GradArray> sums(char* base) const;
  bool words_finished(const char* base, std::string& what) const;
  void fill(char* base) const;
  void fill_gradients(char* base, int step) const;
  void make_reference();
  char* data(char* base) const { return base + control_bytes_; }

  Scenario scenario_;
  std::string isa_;
  std::size_t control_bytes_, bytes_;
  Image begun_, reference_;
  std::int64_t nonfinite_ = 0;
};

}  // namespace crash
