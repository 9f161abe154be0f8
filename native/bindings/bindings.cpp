// The Python face of the kernels; the only file that knows pybind11. Tensors arrive as raw addresses,
// checked by zero_opt/cpu_adam.py, so that one binary serves every version of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "exchange/host_exchange.hpp"
#include "kernels/dispatch.hpp"
#include "step/step.hpp"
#include "threads/flush_denormals.hpp"
#include "threads/held_threads.hpp"
#include "threads/huge_pages.hpp"
#include "threads/thread_pool.hpp"
#include "worker/control.hpp"
#include "worker/worker.hpp"

namespace py = pybind11;
using zero_opt::AdamArrays;
using zero_opt::AdamBatch;
using zero_opt::AdamHypers;
using zero_opt::AdamRun;
using zero_opt::Control;
using zero_opt::CountedRun;
using zero_opt::Format;
using zero_opt::GradArray;
using zero_opt::HostBucket;
using zero_opt::HostRanks;
using zero_opt::Kernels;
using zero_opt::MomentRun;

namespace {

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }
void* memory(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

const Kernels& table(const std::string& isa) {
  return isa.empty() ? zero_opt::chosen_kernels() : zero_opt::kernels_named(isa);
}

// By torch's name of the dtype; uint8 stands for the 8-bit format of moments.
Format format_named(const std::string& dtype) {
  if (dtype == "float32") return Format::kFloat32;
  if (dtype == "bfloat16") return Format::kBfloat16;
  if (dtype == "float16") return Format::kFloat16;
  if (dtype == "uint8") return Format::kBlock8;
  throw std::invalid_argument("no kernel for dtype '" + dtype + "'");
}

Format float_named(const std::string& dtype) {
  const Format format = format_named(dtype);
  if (format == Format::kBlock8) throw std::invalid_argument("no float dtype: '" + dtype + "'");
  return format;
}

AdamHypers make_hypers(double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                       bool maximize, double grad_scale) {
  return {lr, beta1, beta2, eps, weight_decay, grad_scale, decoupled, maximize};
}

using Addresses = std::map<std::string, std::uintptr_t>;

void check_addresses(std::int64_t numel, const Addresses& addresses, Format moments) {
  static const std::set<std::string> known = {"param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "out",
                                              "remainder", "exp_avg_base", "exp_avg_sq_base", "step"};
  if (numel < 0) throw std::invalid_argument("numel must not be negative, got " + std::to_string(numel));
  for (const auto& [role, address] : addresses) {
    if (known.count(role) == 0) throw std::invalid_argument("no array of a run is called '" + role + "'");
  }
  std::vector<std::string> needed = {"param", "exp_avg", "exp_avg_sq"};
  if (moments == Format::kBlock8) needed.insert(needed.end(), {"exp_avg_base", "exp_avg_sq_base"});
  for (const std::string& role : needed) {
    const auto found = addresses.find(role);
    if (numel > 0 && (found == addresses.end() || found->second == 0)) {
      throw std::invalid_argument("a run of elements needs the address of " + role);
    }
  }
}

void* array_at(const Addresses& addresses, const char* role) {
  const auto found = addresses.find(role);
  return found == addresses.end() ? nullptr : memory(found->second);
}

AdamArrays arrays_at(const Addresses& addresses) {
  return {array_at(addresses, "param"),
          static_cast<std::int16_t*>(array_at(addresses, "remainder")),
          array_at(addresses, "exp_avg"),
          array_at(addresses, "exp_avg_sq"),
          static_cast<std::uint16_t*>(array_at(addresses, "exp_avg_base")),
          static_cast<std::uint16_t*>(array_at(addresses, "exp_avg_sq_base")),
          static_cast<float*>(array_at(addresses, "max_exp_avg_sq"))};
}

// Where a run is written, if not where it is read.
AdamArrays written_at(std::int64_t numel, const Addresses& addresses, const Addresses& to, Format moments) {
  if (to.empty()) return arrays_at(addresses);
  check_addresses(numel, to, moments);
  for (const char* role : {"param", "remainder", "exp_avg", "exp_avg_sq", "exp_avg_base", "exp_avg_sq_base",
                           "max_exp_avg_sq"}) {
    if ((array_at(addresses, role) == nullptr) != (array_at(to, role) == nullptr)) {
      throw std::invalid_argument(std::string("a run must be read and written with or without ") + role);
    }
  }
  if (array_at(to, "out") != nullptr || array_at(to, "step") != nullptr) {
    throw std::invalid_argument("out and step are not state that is written elsewhere");
  }
  return arrays_at(to);
}

CountedRun make_run(std::int64_t numel, const Addresses& addresses, const std::string& grad_dtype,
                    const std::string& moment_dtype, const std::string& out_dtype, double step, const Addresses& to) {
  const Format moments = format_named(moment_dtype);
  check_addresses(numel, addresses, moments);
  if (moments == Format::kFloat16) throw std::invalid_argument("exp_avg_sq does not fit the range of float16");
  const auto at = [&](const char* role) { return array_at(addresses, role); };
  if (at("step") == nullptr && !(step >= 1.0)) {
    throw std::invalid_argument("step counts from 1, got " + std::to_string(step));
  }
  AdamRun run = {};
  run.numel = numel;
  run.from = arrays_at(addresses);
  run.to = written_at(numel, addresses, to, moments);
  run.out = at("out");
  run.grad_format = float_named(grad_dtype);
  run.moment_format = moments;
  run.out_format = float_named(out_dtype);
  return {run, step, static_cast<float*>(at("step"))};
}

using Batch = std::tuple<AdamHypers, std::vector<CountedRun>, std::vector<std::uintptr_t>>;

std::vector<AdamBatch> with_grads(const std::vector<Batch>& batches) {
  std::vector<AdamBatch> work;
  for (const auto& [hypers, runs, grads] : batches) {
    if (runs.size() != grads.size()) throw std::invalid_argument("every run needs the address of its gradient");
    work.push_back({hypers, runs});
    for (std::size_t i = 0; i < grads.size(); ++i) {
      AdamRun& run = work.back().runs[i].run;
      run.grad = memory(grads[i]);
      if (run.grad == nullptr && run.numel > 0) throw std::invalid_argument("a gradient without an address");
    }
  }
  return work;
}

std::int64_t adam_step(const std::vector<Batch>& batches, int threads, bool flush_denormals,
                       const std::string& isa) {
  const Kernels& kernels = table(isa);
  const std::vector<AdamBatch> work = with_grads(batches);
  const py::gil_scoped_release unlocked;
  return zero_opt::adam_step(kernels, work, {threads, flush_denormals});
}

using Grad = std::tuple<std::uintptr_t, std::string, std::int64_t>;

// ``squares`` are addresses, one per array, or none at all.
std::vector<GradArray> make_grads(const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares) {
  if (!squares.empty() && squares.size() != grads.size()) {
    throw std::invalid_argument("either all gradients or none have a place for sums");
  }
  std::vector<GradArray> arrays;
  for (const auto& [address, dtype, numel] : grads) {
    if (numel < 0) throw std::invalid_argument("numel must not be negative, got " + std::to_string(numel));
    const std::uintptr_t sums = squares.empty() ? 0 : squares[arrays.size()];
    arrays.push_back({memory(address), float_named(dtype), numel, static_cast<double*>(memory(sums))});
  }
  return arrays;
}

std::pair<double, std::int64_t> grad_sum(const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares,
                                         int threads, bool flush_denormals, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const std::vector<GradArray> arrays = make_grads(grads, squares);
  const py::gil_scoped_release unlocked;
  const zero_opt::GradSum sum = zero_opt::grad_sum(kernels, arrays, {threads, flush_denormals});
  return {sum.squares, sum.nonfinite};
}

void copy_runs(const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t>>& runs, int threads,
               const std::string& isa) {
  const Kernels& kernels = table(isa);
  std::vector<zero_opt::CopyRun> copies;
  for (const auto& [to, from, bytes] : runs) {
    if (bytes < 0) throw std::invalid_argument("bytes must not be negative, got " + std::to_string(bytes));
    copies.push_back({memory(to), memory(from), bytes});
  }
  const py::gil_scoped_release unlocked;
  zero_opt::copy_runs(kernels, copies, threads);
}

void convert(std::int64_t numel, const std::pair<std::uintptr_t, std::string>& from,
             const std::pair<std::uintptr_t, std::string>& to, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const Format from_format = float_named(from.second), to_format = float_named(to.second);
  if (from_format != Format::kFloat32 && to_format != Format::kFloat32) {
    throw std::invalid_argument("one of the two arrays must be float32");
  }
  const py::gil_scoped_release unlocked;
  kernels.convert({numel, memory(from.first), memory(to.first), from_format, to_format});
}

MomentRun make_moments(std::int64_t numel, const std::string& dtype,
                       const std::map<std::string, std::uintptr_t>& addresses, double step) {
  const Format format = format_named(dtype);
  if (format != Format::kBfloat16 && format != Format::kBlock8) {
    throw std::invalid_argument("no compact format of moments: '" + dtype + "'");
  }
  const auto bases = [&](const char* role) {
    return format == Format::kBlock8 ? static_cast<std::uint16_t*>(memory(addresses.at(role))) : nullptr;
  };
  return {numel,
          format,
          zero_opt::dither_of(step),
          memory(addresses.at("exp_avg")),
          memory(addresses.at("exp_avg_sq")),
          bases("exp_avg_base"),
          bases("exp_avg_sq_base"),
          floats(addresses.at("plain_exp_avg")),
          floats(addresses.at("plain_exp_avg_sq"))};
}

void pack_moments(const MomentRun& run, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.pack_moments(run);
}

void unpack_moments(const MomentRun& run, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.unpack_moments(run);
}

void fma_array(std::int64_t numel, std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::uintptr_t out,
         const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.fma({numel, floats(a), floats(b), floats(c), floats(out)});
}

Format mean_format(const std::string& dtype) { return dtype == "float64" ? Format::kFloat64 : float_named(dtype); }

void mean(std::int64_t numel, const std::string& dtype, const std::vector<std::uintptr_t>& sources, std::uintptr_t out,
          bool add) {
  if (sources.size() < 2) throw std::invalid_argument("a mean needs the chunks of two ranks or more");
  std::vector<const void*> chunks;
  for (const std::uintptr_t source : sources) chunks.push_back(memory(source));
  const zero_opt::MeanRun run = {numel, static_cast<std::int32_t>(chunks.size()), mean_format(dtype), add,
                                 chunks.data(), memory(out)};
  const py::gil_scoped_release unlocked;
  zero_opt::chosen_kernels().mean(run);
}

using Run = std::tuple<std::int64_t, std::int64_t, std::uintptr_t, bool>;

using Sum = std::tuple<std::int64_t, std::int64_t, std::uintptr_t>;

HostBucket make_bucket(const std::vector<Run>& runs, const std::vector<std::int64_t>& bounds, const std::string& dtype,
                       const std::vector<Sum>& sums) {
  HostBucket bucket = {{}, bounds, mean_format(dtype), {}};
  if (!sums.empty()) float_named(dtype);
  for (const auto& [start, numel, squares] : sums) {
    bucket.sums.push_back({start, numel, static_cast<double*>(memory(squares))});
  }
  for (const auto& [start, numel, data, add] : runs) {
    bucket.runs.push_back({start, numel, reinterpret_cast<char*>(data), add});
  }
  return bucket;
}

HostRanks make_ranks(int rank, const std::vector<std::uintptr_t>& arenas, std::int64_t data_at, std::int64_t slot_bytes) {
  std::vector<char*> addresses;
  for (const std::uintptr_t arena : arenas) addresses.push_back(reinterpret_cast<char*>(arena));
  return HostRanks(rank, addresses, data_at, slot_bytes);
}

using Named = std::array<std::uint64_t, 3>;  // step, epoch, sequence

using Came = std::tuple<int, std::int32_t, std::int64_t>;

Came host_reduce(HostRanks& ranks, const Named& named, const HostBucket& bucket, std::uintptr_t shard,
                 std::int64_t published, double patience_s) {
  const py::gil_scoped_release unlocked;
  const zero_opt::ExchangeIdent ident = {named[0], named[1], named[2]};
  const auto found = ranks.reduce(ident, bucket, reinterpret_cast<char*>(shard), published, patience_s);
  return {static_cast<int>(found.state), found.peer, found.published};
}

Came host_gather(HostRanks& ranks, const Named& named, const HostBucket& bucket, std::int64_t published,
                 double patience_s) {
  const py::gil_scoped_release unlocked;
  const zero_opt::ExchangeIdent ident = {named[0], named[1], named[2]};
  const auto found = ranks.gather(ident, bucket, published, patience_s);
  return {static_cast<int>(found.state), found.peer, found.published};
}

Control make_control(std::uintptr_t address, std::size_t nbytes, std::size_t lanes, std::size_t max_runs) {
  return Control(reinterpret_cast<char*>(address), nbytes, lanes, max_runs);
}

std::uint64_t submit(Control& control, const std::vector<Batch>& batches, int wake_fd, bool flush_denormals,
                     bool past_caches, const std::string& isa) {
  const std::string name = table(isa).name;
  const std::vector<AdamBatch> work = with_grads(batches);
  const py::gil_scoped_release unlocked;
  return control.submit(work, wake_fd, flush_denormals, past_caches, name);
}

std::uint64_t draft(Control& control, const std::vector<Batch>& batches, int wake_fd, bool flush_denormals,
                    const std::string& isa) {
  const std::string name = table(isa).name;
  const std::vector<AdamBatch> work = with_grads(batches);
  const py::gil_scoped_release unlocked;
  return control.draft(work, wake_fd, flush_denormals, name);
}

std::uint64_t draft_sums(Control& control, const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares,
                         int wake_fd, bool flush_denormals, const std::string& isa) {
  const std::string name = table(isa).name;
  const std::vector<GradArray> arrays = make_grads(grads, squares);
  for (const GradArray& grad : arrays) {
    if (grad.numel > 0 && (grad.data == nullptr || grad.squares == nullptr)) {
      throw std::invalid_argument("a gradient, or its sums, without an address");
    }
  }
  const py::gil_scoped_release unlocked;
  return control.draft_sums(arrays, wake_fd, flush_denormals, name);
}

template <zero_opt::Waited (Control::*wait)(std::uint64_t, int, int, double)>
const char* wait_for(Control& control, std::uint64_t value, int done_fd, int worker_pidfd, double seconds) {
  const py::gil_scoped_release unlocked;
  const zero_opt::Waited found = (control.*wait)(value, done_fd, worker_pidfd, seconds);
  if (found == zero_opt::Waited::kDone) return "done";
  return found == zero_opt::Waited::kDead ? "dead" : "waiting";
}

void worker_run(int arena_fd, int wake_fd, int done_fd, int trainer_pidfd, const std::vector<int>& cpus, int threads) {
  const py::gil_scoped_release unlocked;
  zero_opt::worker_run({arena_fd, wake_fd, done_fd, trainer_pidfd}, cpus, threads);
}

std::size_t control_nbytes(std::size_t lanes, std::size_t max_runs) {
  return zero_opt::ControlLayout(lanes, max_runs).bytes;
}

void bind_worker(py::module_& m) {
  py::class_<Control>(m, "Control")
      .def(py::init(&make_control), py::arg("address"), py::arg("nbytes"), py::kw_only(), py::arg("lanes"),
           py::arg("max_runs"))
      .def("submit", &submit, py::arg("batches"), py::arg("wake_fd"), py::kw_only(),
           py::arg("flush_denormals") = false, py::arg("past_caches") = false, py::arg("isa") = "")
      .def("wait", &wait_for<&Control::wait>, py::arg("sequence"), py::arg("done_fd"), py::arg("worker_pidfd"),
           py::arg("seconds"))
      .def("draft", &draft, py::arg("batches"), py::arg("wake_fd"), py::kw_only(),
           py::arg("flush_denormals") = false, py::arg("isa") = "")
      .def("draft_sums", &draft_sums, py::arg("grads"), py::arg("squares"), py::arg("wake_fd"), py::kw_only(),
           py::arg("flush_denormals") = false, py::arg("isa") = "")
      .def("void_drafts", &Control::void_drafts)
      .def("wait_drafts", &wait_for<&Control::wait_drafts>, py::arg("drafts"), py::arg("done_fd"),
           py::arg("worker_pidfd"), py::arg("seconds"))
      .def("stop", &Control::stop, py::arg("wake_fd"))
      .def("finish", &Control::finish, py::arg("threads") = 1, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("submitted", &Control::submitted)
      .def_property_readonly("completed", &Control::completed)
      .def_property_readonly("drafted", &Control::drafted)
      .def_property_readonly("drafts_done", &Control::drafts_done)
      .def_property_readonly("generation", &Control::generation)
      .def_property_readonly("nonfinite", &Control::nonfinite)
      .def_property_readonly("step_seconds", &Control::step_seconds)
      .def_property_readonly("error", &Control::error)
      .def_property_readonly("progress", [](const Control& control) { return py::tuple(py::cast(control.progress())); });
  m.def("control_nbytes", &control_nbytes, py::arg("lanes"), py::arg("max_runs"));
  m.def("worker_run", &worker_run, py::arg("arena_fd"), py::arg("wake_fd"), py::arg("done_fd"),
        py::arg("trainer_pidfd"), py::arg("cpus"), py::arg("threads"));
}

std::vector<std::string> names_of(const std::vector<const Kernels*>& tables) {
  std::vector<std::string> names;
  for (const Kernels* kernels : tables) names.emplace_back(kernels->name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels of zero_opt. Addresses and sizes go in unchecked: call zero_opt.cpu_adam instead.";
  py::class_<AdamHypers>(m, "AdamHypers")
      .def(py::init(&make_hypers), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"), py::arg("maximize"),
           py::arg("grad_scale") = 1.0);
  py::class_<CountedRun>(m, "AdamRun")
      .def(py::init(&make_run), py::arg("numel"), py::arg("addresses"), py::kw_only(),
           py::arg("grad_dtype") = "float32", py::arg("moment_dtype") = "float32",
           py::arg("out_dtype") = "float32", py::arg("step") = 1.0, py::arg("to") = Addresses());
  py::class_<MomentRun>(m, "MomentRun")
      .def(py::init(&make_moments), py::arg("numel"), py::arg("dtype"), py::arg("addresses"), py::kw_only(),
           py::arg("step") = 1.0);
  m.def("adam_step", &adam_step, py::arg("batches"), py::kw_only(), py::arg("threads") = 1,
        py::arg("flush_denormals") = false, py::arg("isa") = "");
  m.def("grad_sum", &grad_sum, py::arg("grads"), py::arg("squares") = std::vector<std::uintptr_t>(), py::kw_only(),
        py::arg("threads") = 1, py::arg("flush_denormals") = false, py::arg("isa") = "");
  m.def("copy_runs", &copy_runs, py::arg("runs"), py::kw_only(), py::arg("threads") = 1, py::arg("isa") = "");
  m.def("convert", &convert, py::arg("numel"), py::arg("from_"), py::arg("to"), py::arg("isa") = "");
  m.def("pack_moments", &pack_moments, py::arg("run"), py::arg("isa") = "");
  m.def("unpack_moments", &unpack_moments, py::arg("run"), py::arg("isa") = "");
  m.def("prefer_huge_pages", &zero_opt::prefer_huge_pages, py::arg("address"), py::arg("nbytes"));
  m.def("usable_threads", &zero_opt::usable_threads, py::arg("requested"));
  m.def("hold_threads", &zero_opt::hold_threads, py::arg("threads"));
  m.def("flushes_denormals", &zero_opt::FlushDenormals::own);
  m.def("cgroup_cpus", &zero_opt::cgroup_cpus, py::arg("listing"), py::arg("root"));
  m.def("fma", &fma_array, py::arg("numel"), py::arg("a"), py::arg("b"), py::arg("c"), py::arg("out"),
        py::arg("isa") = "");
  m.def("mean", &mean, py::arg("numel"), py::arg("dtype"), py::arg("sources"), py::arg("out"), py::arg("add"));
  py::class_<HostBucket>(m, "HostBucket")
      .def(py::init(&make_bucket), py::arg("runs"), py::arg("bounds"), py::arg("dtype"),
           py::arg("sums") = std::vector<Sum>());
  m.attr("PEER_WORDS_NBYTES") = sizeof(zero_opt::PeerWords);
  py::class_<HostRanks>(m, "HostRanks")
      .def(py::init(&make_ranks), py::arg("rank"), py::arg("arenas"), py::arg("data_at"), py::arg("slot_bytes"))
      .def("reduce", &host_reduce, py::arg("ident"), py::arg("bucket"), py::arg("shard"), py::arg("published"),
           py::arg("patience_s"))
      .def("gather", &host_gather, py::arg("ident"), py::arg("bucket"), py::arg("published"), py::arg("patience_s"));
  bind_worker(m);
  m.def("isas", []() { return names_of(zero_opt::available_kernels()); });
  m.def("compiled_isas", []() { return names_of(zero_opt::compiled_kernels()); });
  m.def("processor_isa", []() { return std::string(zero_opt::processor_isa()); });
  m.def("isa", []() { return std::string(zero_opt::chosen_kernels().name); });
}
