// What the kernels read and write, as plain data: filled by any caller, in or out of process.
// Included by the per-ISA files, so nothing here may emit code and only <cstdint> may be included.
#pragma once

#include <cstdint>

namespace zero_opt {

// How the elements of an array are stored. kBlock8 is the 8-bit format of compact.inl; kFloat64 is for means only.
enum class Format : std::int32_t { kFloat32, kBfloat16, kFloat16, kBlock8, kFloat64 };

// Of one element. Of each translation unit's own: the linker must not keep one compiled for a newer processor.
static inline constexpr std::int64_t bytes_of(Format format) {
  if (format == Format::kFloat64) return 8;
  if (format == Format::kFloat32) return 4;
  return format == Format::kBlock8 ? 1 : 2;
}

// Every cut inside an array of elements is at a multiple of this, which is also the block of kBlock8.
constexpr std::int64_t kCutNumel = 64;

// What an update takes of one step's hyperparameters: floats in a struct of its own, see kernels/update_table.inl.
struct Numbers {
  float values[12];
};

// One step's scalars. They are computed once, in double, and rounded to float once.
struct StepScalars {
  std::int32_t kind;     // of update, by its place in the table
  float grad_factor;     // unscale and clip factor; negative to maximize
  std::uint32_t dither;  // a number of the step, for formats that round by chance
  float prediction;      // 0, or how many times ``out`` has the update too that the same gradient would make next
  Numbers now;
  Numbers next;  // for that update: those of step t + 1
};

// Where the state of a run's elements lies. Arrays of state have the names of Adam's; an update that calls them otherwise
// has its first in the place of exp_avg, and so on. Those that an update has not are null, and all fp32 but for Adam.
struct StateArrays {
  void* param;              // the fp32 master; bf16 if there is a remainder
  std::int16_t* remainder;  // null, or the other half of a split master
  void* exp_avg;
  void* exp_avg_sq;
  std::uint16_t* exp_avg_base;     // kBlock8 only: a number per block
  std::uint16_t* exp_avg_sq_base;  // likewise
  float* max_exp_avg_sq;           // null without amsgrad
};

// A contiguous run of elements that share one step's scalars. The state is read from one set of arrays and written to
// another; both may be the same, and the same ones of both are null.
struct UpdateRun {
  std::int64_t numel;
  StateArrays from;
  StateArrays to;
  const void* grad;
  void* out;  // null, or where the new param goes in the model's format
  Format grad_format;
  Format moment_format;
  Format out_format;
};

// Squares of the elements of an array are summed this many at a time, counted from its start.
constexpr std::int64_t kSumNumel = 4096;

// What a pass over gradients finds.
struct GradSum {
  double squares;          // infinite or NaN if any element is
  std::int64_t nonfinite;  // how many elements are infinite or NaN
};

// Three arrays of factors and an addend, for the fused multiply-add on its own.
struct FmaRun {
  std::int64_t numel;
  const float* a;
  const float* b;
  const float* c;
  float* out;
};

// An array and the same one in another format; one of the two is fp32.
struct ConvertRun {
  std::int64_t numel;
  const void* from;
  void* to;
  Format from_format;
  Format to_format;
};

// Both moments in a compact format, and the same in fp32. The bases are for kBlock8 only.
struct MomentRun {
  std::int64_t numel;
  Format format;
  std::uint32_t dither;
  void* exp_avg;
  void* exp_avg_sq;
  std::uint16_t* exp_avg_base;
  std::uint16_t* exp_avg_sq_base;
  float* plain_exp_avg;
  float* plain_exp_avg_sq;
};

// count >= 2 chunks of numel elements, one per rank, and where their sum goes, or is added to, once it is divided; one of
// the chunks may be there.
struct MeanRun {
  std::int64_t numel;
  std::int32_t count;
  std::int32_t divisor;  // the count for their mean
  Format format;
  bool add;
  const void* const* sources;
  void* out;
};

struct LoggedStep;
struct BlockRange;
struct Lane;
struct DraftRun;

// The kernels of one instruction set. Every table computes the same bits.
struct Kernels {
  const char* name;
  // Steps the elements from begin, a multiple of kCutNumel, to end; returns how many of their gradients, after
  // the factor, are not finite.
  std::int64_t (*update)(const StepScalars& scalars, const UpdateRun& run, std::int64_t begin, std::int64_t end);
  // The same through the redo log: see redo_log.hpp.
  std::int64_t (*run_lane)(const LoggedStep& step, const BlockRange& range, Lane& lane);
  // Some of its blocks, of one bank, to the other: see draft.hpp.
  void (*run_draft)(char* base, const DraftRun& draft, const BlockRange& range);
  GradSum (*grad_sum)(const void* grad, Format format, std::int64_t numel);
  // As memcpy, for what nobody reads soon.
  void (*stream_copy)(const void* from, void* to, std::int64_t bytes);
  void (*fma)(const FmaRun& run);
  void (*convert)(const ConvertRun& run);
  void (*mean)(const MeanRun& run);
  void (*pack_moments)(const MomentRun& run);
  void (*unpack_moments)(const MomentRun& run);
};

}  // namespace zero_opt
