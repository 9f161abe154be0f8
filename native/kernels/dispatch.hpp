// Which kernels to run: a table chosen once, at run time.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace zero_opt {

// The tables that are compiled in, slowest first; never empty.
std::vector<const Kernels*> compiled_kernels();

// Those of them that this processor can run, slowest first; never empty.
std::vector<const Kernels*> available_kernels();

// The name of the fastest table that this processor could run, compiled in or not.
const char* processor_isa();

// The table of that name. Throws std::runtime_error naming the available ones if there is none.
const Kernels& kernels_named(const std::string& name);

// The table of ZERO_OPT_ISA if that is set and not empty, else the fastest one. Chosen at the first call.
const Kernels& chosen_kernels();

}  // namespace zero_opt
