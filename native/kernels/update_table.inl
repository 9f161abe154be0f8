// The updates that there are: included once by each isa_*.cpp, by step_loop.inl, and by hypers.cpp.
//
// An update is a file beside this one and a name in the list below. It is a class with
//   kName, kHypers, kArrays   what Python calls it, its hyperparameters, and its arrays of state
//   Hypers                    the hyperparameters as the user wrote them: doubles, in the order of kHypers
//   arrays(hypers)            how many of its arrays a step needs
//   Scalars, scalars(h, t)    what step t, counted from 1, takes of them: floats
//   with_update(s, n, use)    calls ``use`` with the one of its variants that has n arrays: classes with Scalars, kArrays
//                             and step(scalars, gradient, element), which returns the new element
#pragma once

#include "kernels/update_adagrad.inl"
#include "kernels/update_adam.inl"
#include "kernels/update_lion.inl"
#include "kernels/update_sgd.inl"

namespace zero_opt {
namespace {

template <typename First, typename... Rest, typename Use>
inline auto with_kind_of(std::int32_t kind, const Use& use) {
  if constexpr (sizeof...(Rest) == 0) {
    (void)kind;
    return use(First());
  } else {
    return kind == 0 ? use(First()) : with_kind_of<Rest...>(kind - 1, use);
  }
}

template <typename... Kinds>
struct Table {
  static constexpr std::int32_t kCount = sizeof...(Kinds);
  static_assert(((sizeof(typename Kinds::Scalars) <= sizeof(Numbers)) && ...), "there is room for an update's scalars");

  template <typename Use>
  static inline auto with_kind(std::int32_t kind, const Use& use) {
    return with_kind_of<Kinds...>(kind, use);
  }
};

// Adam is the first: it alone has loops for formats of its own.
using Updates = Table<Adam, Adagrad, Lion, SGD>;

template <typename Scalars>
inline Scalars scalars_in(const Numbers& numbers) {
  Scalars scalars;
  __builtin_memcpy(&scalars, numbers.values, sizeof(scalars));
  return scalars;
}

inline AdamScalars adam_in(const StepScalars& scalars) { return scalars_in<AdamScalars>(scalars.now); }

inline bool is_adam(const StepScalars& scalars) { return scalars.kind == 0; }

inline bool is_usual(const StepScalars& scalars, bool maximum) {
  if (!is_adam(scalars) || maximum) return false;
  const AdamScalars s = adam_in(scalars);
  return s.has_l2 == 0.0f && starts_from_moment(s);
}

// Calls ``use`` with the step's update.
template <typename Use>
inline auto with_update(const StepScalars& scalars, int arrays, const Use& use) {
  return Updates::with_kind(scalars.kind, [&](auto kind) {
    using Kind = decltype(kind);
    return Kind::with_update(scalars_in<typename Kind::Scalars>(scalars.now), arrays, use);
  });
}

}  // namespace
}  // namespace zero_opt
