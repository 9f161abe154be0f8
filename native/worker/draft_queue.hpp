// The drafts that were submitted to an arena, made by several threads.
#pragma once

#include <cstddef>

#include "worker/control_block.hpp"

namespace zero_opt {

// Makes the drafts that are submitted now and not void, in order, several at a time where they are small. Whoever
// submits one that writes where an earlier one does must have voided that one before. Throws std::runtime_error if a
// draft needs more of the arena than is mapped here, or kernels that there are none of.
void finish_drafts(const ArenaView& arena, std::size_t mapped_bytes, int threads);

}  // namespace zero_opt
