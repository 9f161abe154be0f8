#include "step/hypers.hpp"

#include <cstring>
#include <stdexcept>

#include "kernels/update_table.inl"

namespace zero_opt {
namespace {

template <typename Kind>
constexpr int hypers_count = sizeof(Kind::kHypers) / sizeof(*Kind::kHypers);

template <typename Kind>
typename Kind::Hypers hypers_in(const Hypers& hypers) {
  using Own = typename Kind::Hypers;
  static_assert(sizeof(Own) == hypers_count<Kind> * sizeof(double) && hypers_count<Kind> <= kMostHypers);
  Own own;
  std::memcpy(&own, hypers.values, sizeof(own));
  return own;
}

template <typename Scalars>
Numbers numbers_of(const Scalars& scalars) {
  Numbers numbers = {};
  std::memcpy(numbers.values, &scalars, sizeof(scalars));
  return numbers;
}

std::int32_t kind_named(const std::string& name) {
  for (std::int32_t kind = 0; kind < Updates::kCount; ++kind) {
    if (Updates::with_kind(kind, [](auto own) { return std::string(decltype(own)::kName); }) == name) return kind;
  }
  throw std::invalid_argument("there is no update '" + name + "'");
}

}  // namespace

Hypers make_hypers(const std::string& name, const std::map<std::string, double>& values) {
  Hypers hypers = {};
  hypers.kind = kind_named(name);
  hypers.grad_scale = 1.0;
  const int count = Updates::with_kind(hypers.kind, [&](auto own) {
    using Kind = decltype(own);
    for (int i = 0; i < hypers_count<Kind>; ++i) {
      const auto found = values.find(Kind::kHypers[i]);
      if (found == values.end()) throw std::invalid_argument(name + " needs " + Kind::kHypers[i]);
      hypers.values[i] = found->second;
    }
    return hypers_count<Kind>;
  });
  if (values.size() != static_cast<std::size_t>(count)) {
    throw std::invalid_argument(name + " has no more than " + std::to_string(count) + " hyperparameters");
  }
  return hypers;
}

int arrays_needed(const Hypers& hypers) {
  return Updates::with_kind(hypers.kind, [&](auto own) {
    using Kind = decltype(own);
    return Kind::arrays(hypers_in<Kind>(hypers));
  });
}

std::vector<std::string> names_of_array(int number) {
  std::vector<std::string> names;
  for (std::int32_t kind = 0; kind < Updates::kCount; ++kind) {
    Updates::with_kind(kind, [&](auto own) {
      using Kind = decltype(own);
      constexpr int kCount = sizeof(Kind::kArrays) / sizeof(*Kind::kArrays);
      if (number < kCount) names.emplace_back(Kind::kArrays[number]);
    });
  }
  return names;
}

StepScalars scalars_of(const Hypers& hypers, double step) {
  StepScalars scalars = {};
  scalars.kind = hypers.kind;
  scalars.grad_factor = static_cast<float>(hypers.maximize ? -hypers.grad_scale : hypers.grad_scale);
  scalars.dither = dither_of(step);
  scalars.prediction = static_cast<float>(hypers.prediction);
  Updates::with_kind(hypers.kind, [&](auto own) {
    using Kind = decltype(own);
    const auto values = hypers_in<Kind>(hypers);
    scalars.now = numbers_of(Kind::scalars(values, step));
    scalars.next = numbers_of(Kind::scalars(values, step + 1.0));
  });
  return scalars;
}

std::uint32_t dither_of(double step) {
  // One round of splitmix64 (Steele, Lea and Flood 2014).
  constexpr double kEnd = 18446744073709551616.0;  // 2^64: larger counts fit no integer, and NaN fails both comparisons
  const std::uint64_t number = step >= 0.0 && step < kEnd ? static_cast<std::uint64_t>(step) : 0;
  std::uint64_t mixed = number * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(mixed >> 32);
}

}  // namespace zero_opt
