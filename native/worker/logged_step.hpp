// The submitted step of an arena, finished by several threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker/control_block.hpp"

namespace zero_opt {

// The blocks of one of several lanes.
BlockRange blocks_of_lane(std::int64_t blocks, std::int64_t lane, std::int64_t lanes);

// Finishes the step that was submitted, if it is not finished; the threads take its lanes as they come to them. Throws
// std::runtime_error, with nothing written, if the step needs more of the arena than is mapped here or kernels that there
// are none of.
void finish_step(const ArenaView& arena, std::size_t mapped_bytes, int threads);

}  // namespace zero_opt
