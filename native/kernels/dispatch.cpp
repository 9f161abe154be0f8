#include "kernels/dispatch.hpp"

#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "kernels/processor.hpp"

namespace zero_opt {

extern const Kernels kKernelsBaseline;
#if defined(ZERO_OPT_X86_ISAS)
extern const Kernels kKernelsV3;
extern const Kernels kKernelsV4;
#endif

std::vector<const Kernels*> compiled_kernels() {
#if defined(ZERO_OPT_X86_ISAS)
  return {&kKernelsBaseline, &kKernelsV3, &kKernelsV4};
#else
  return {&kKernelsBaseline};
#endif
}

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> tables = compiled_kernels();
#if defined(ZERO_OPT_X86_ISAS)
  const int level = x86_64_level();
  tables.resize(level >= 4 ? 3 : level >= 3 ? 2 : 1);
#endif
  return tables;
}

const char* processor_isa() {
  const int level = x86_64_level();
  return level >= 4 ? "v4" : level >= 3 ? "v3" : "baseline";
}

const Kernels& kernels_named(const std::string& name) {
  std::string known;
  for (const Kernels* table : available_kernels()) {
    if (name == table->name) return *table;
    known += known.empty() ? "" : ", ";
    known += table->name;
  }
  throw std::runtime_error("no kernels for the instruction set '" + name + "'; this processor runs: " + known);
}

const Kernels& chosen_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* forced = std::getenv("ZERO_OPT_ISA");
    if (forced != nullptr && forced[0] != '\0') return kernels_named(forced);
    return *available_kernels().back();
  }();
  return chosen;
}

std::uint32_t dither_of(double step) {
  // One round of splitmix64 (Steele, Lea and Flood 2014).
  std::uint64_t mixed = static_cast<std::uint64_t>(step) * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(mixed >> 32);
}

AdamScalars adam_scalars(const AdamHypers& hypers, double step) {
  const double bias_correction1 = 1.0 - std::pow(hypers.beta1, step);
  const double bias_correction2 = 1.0 - std::pow(hypers.beta2, step);
  AdamScalars scalars;
  scalars.step_size = static_cast<float>(hypers.lr / bias_correction1);
  scalars.bias_correction2_sqrt = static_cast<float>(std::sqrt(bias_correction2));
  scalars.reciprocal = 1.0f / scalars.bias_correction2_sqrt;
  scalars.decay = hypers.decoupled ? static_cast<float>(1.0 - hypers.lr * hypers.weight_decay) : 1.0f;
  scalars.has_l2 = !hypers.decoupled && hypers.weight_decay != 0.0;
  scalars.l2 = static_cast<float>(hypers.weight_decay);
  scalars.weight1 = static_cast<float>(1.0 - hypers.beta1);
  scalars.weight2 = static_cast<float>(1.0 - hypers.beta2);
  scalars.beta2 = static_cast<float>(hypers.beta2);
  scalars.eps = static_cast<float>(hypers.eps);
  scalars.grad_factor = static_cast<float>(hypers.maximize ? -hypers.grad_scale : hypers.grad_scale);
  scalars.dither = dither_of(step);
  return scalars;
}

}  // namespace zero_opt
