// Buckets between the ranks of one host.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/bindings.hpp"
#include "exchange/host_exchange.hpp"
#include "exchange/peer_words.hpp"

namespace zero_opt::bindings {
namespace {

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

HostRanks make_ranks(int rank, const std::vector<std::uintptr_t>& arenas, std::int64_t data_at, std::int64_t slot_bytes,
                     int divisor) {
  std::vector<char*> addresses;
  for (const std::uintptr_t arena : arenas) addresses.push_back(reinterpret_cast<char*>(arena));
  return HostRanks(rank, addresses, data_at, slot_bytes, divisor);
}

using Named = std::array<std::uint64_t, 3>;  // step, epoch, sequence

using Came = std::tuple<int, std::int32_t, std::int64_t>;

Came host_reduce(HostRanks& ranks, const Named& named, const HostBucket& bucket, std::uintptr_t shard,
                 std::int64_t published, double patience_s) {
  const py::gil_scoped_release unlocked;
  const ExchangeIdent ident = {named[0], named[1], named[2]};
  const auto found = ranks.reduce(ident, bucket, reinterpret_cast<char*>(shard), published, patience_s);
  return {static_cast<int>(found.state), found.peer, found.published};
}

Came host_gather(HostRanks& ranks, const Named& named, const HostBucket& bucket, std::int64_t published,
                 double patience_s) {
  const py::gil_scoped_release unlocked;
  const ExchangeIdent ident = {named[0], named[1], named[2]};
  const auto found = ranks.gather(ident, bucket, published, patience_s);
  return {static_cast<int>(found.state), found.peer, found.published};
}

}  // namespace

void bind_exchange(py::module_& m) {
  py::class_<HostBucket>(m, "HostBucket")
      .def(py::init(&make_bucket), py::arg("runs"), py::arg("bounds"), py::arg("dtype"),
           py::arg("sums") = std::vector<Sum>());
  m.attr("PEER_WORDS_NBYTES") = sizeof(PeerWords);
  py::class_<HostRanks>(m, "HostRanks")
      .def(py::init(&make_ranks), py::arg("rank"), py::arg("arenas"), py::arg("data_at"), py::arg("slot_bytes"),
           py::arg("divisor") = 0)
      .def("reduce", &host_reduce, py::arg("ident"), py::arg("bucket"), py::arg("shard"), py::arg("published"),
           py::arg("patience_s"))
      .def("gather", &host_gather, py::arg("ident"), py::arg("bucket"), py::arg("published"), py::arg("patience_s"));
}

}  // namespace zero_opt::bindings
