#include "kernels/dispatch.hpp"

#include <cstdlib>
#include <stdexcept>

#include "kernels/processor.hpp"

namespace zero_opt {

extern const Kernels kKernelsBaseline;
#if defined(ZERO_OPT_X86_ISAS)
extern const Kernels kKernelsV3;
extern const Kernels kKernelsV4;
#endif

namespace {

// Asked once: under a hypervisor each CPUID leaves the guest for tens of microseconds, as long as a small draft takes.
int processor_level() {
  static const int level = x86_64_level();
  return level;
}

}  // namespace

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
  const int level = processor_level();
  tables.resize(level >= 4 ? 3 : level >= 3 ? 2 : 1);
#endif
  return tables;
}

const char* processor_isa() {
  const int level = processor_level();
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

}  // namespace zero_opt
