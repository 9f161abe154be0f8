// Many Python objects in one call: where tensors lie, and which objects lists and dicts hold.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/bindings.hpp"

namespace zero_opt::bindings {
namespace {

// The part of DLPack's C exchange interface (version 1) that reads tensors. Its layout is stable, so that one binary
// serves every version of torch.
struct DLTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint32_t dtype;  // from the lowest byte on: code, bits, and two bytes of lanes
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major, minor;
  void* older;
  void* unused[3];
  int (*read)(void* object, DLTensor* tensor);  // returns -1, with an exception set, if it cannot
};

const ExchangeApi& api_of(const py::capsule& capsule) {
  const auto* api = static_cast<ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->major != 1 || api->read == nullptr) throw std::runtime_error("another version of DLPack");
  return *api;
}

template <class Value>
void append(std::string& bytes, const Value* values, std::int64_t count) {
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(Value));
}

// Returns the addresses, 8 bytes each, and what else says how elements lie: device, dtype, shape, strides.
py::tuple placing(const py::capsule& capsule, const py::list& tensors) {
  const ExchangeApi& api = api_of(capsule);
  std::string addresses, layouts;
  addresses.reserve(8 * tensors.size());
  layouts.reserve(40 * tensors.size());
  for (const py::handle object : tensors) {
    DLTensor tensor;
    if (api.read(object.ptr(), &tensor) != 0) throw py::error_already_set();
    const std::uint64_t address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    append(addresses, &address, 1);
    const std::int32_t kind[] = {tensor.device_type, tensor.device_id, tensor.ndim};
    append(layouts, kind, 3);
    append(layouts, &tensor.dtype, 1);
    append(layouts, tensor.shape, tensor.ndim);
    append(layouts, tensor.strides, tensor.ndim);
  }
  return py::make_tuple(py::bytes(addresses), py::bytes(layouts));
}

constexpr std::int32_t kHost = 1;

// Whether a tensor's elements lie in host memory, row by row.
bool is_dense_on_host(const DLTensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return tensor.device_type == kHost && tensor.data != nullptr;
}

// Returns whether values have dimensions, all those of their likes, or none has; None of others, and of values that
// differ in dtype or are not dense in host memory.
py::object dimensions(const py::capsule& capsule, const py::list& values, const py::list& likes) {
  const ExchangeApi& api = api_of(capsule);
  bool scalars = true, alike = values.size() == likes.size();
  std::uint32_t dtype = 0;
  for (std::size_t at = 0; at < values.size() && (scalars || alike); ++at) {
    DLTensor value, like;
    if (api.read(PyList_GET_ITEM(values.ptr(), at), &value) != 0) throw py::error_already_set();
    if (at == 0) dtype = value.dtype;
    if (value.dtype != dtype || !is_dense_on_host(value)) return py::none();
    scalars = scalars && value.ndim == 0;
    if (!alike) continue;
    if (api.read(PyList_GET_ITEM(likes.ptr(), at), &like) != 0) throw py::error_already_set();
    alike = value.ndim == like.ndim && std::equal(value.shape, value.shape + value.ndim, like.shape);
  }
  return scalars || alike ? py::cast(!scalars) : py::none();
}

// Returns the bytes of tensors one after the other.
py::bytes joined_bytes(const py::capsule& capsule, const py::list& tensors) {
  const ExchangeApi& api = api_of(capsule);
  std::string bytes;
  for (const py::handle object : tensors) {
    DLTensor tensor;
    if (api.read(object.ptr(), &tensor) != 0) throw py::error_already_set();
    if (!is_dense_on_host(tensor)) throw std::invalid_argument("a tensor is not dense in host memory");
    std::int64_t count = (tensor.dtype >> 8 & 0xff) / 8;
    for (std::int32_t dim = 0; dim < tensor.ndim; ++dim) count *= tensor.shape[dim];
    append(bytes, static_cast<const char*>(tensor.data) + tensor.byte_offset, count);
  }
  return bytes;
}

// Returns all keys and values of dicts, each key before its value, or None if one is an instance of another class.
py::object flattened(const py::list& dicts) {
  py::list found;
  for (const py::handle dict : dicts) {
    if (!PyDict_CheckExact(dict.ptr())) return py::none();
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &key, &value);) {
      found.append(py::handle(key));
      found.append(py::handle(value));
    }
  }
  return found;
}

bool same_objects(const py::list& these, const py::list& those) {
  if (these.size() != those.size()) return false;
  for (std::size_t at = 0; at < these.size(); ++at) {
    if (PyList_GET_ITEM(these.ptr(), at) != PyList_GET_ITEM(those.ptr(), at)) return false;
  }
  return true;
}

}  // namespace

void bind_many(py::module_& m) {
  m.def("placing", &placing, py::arg("api"), py::arg("tensors"));
  m.def("dimensions", &dimensions, py::arg("api"), py::arg("values"), py::arg("likes"));
  m.def("joined_bytes", &joined_bytes, py::arg("api"), py::arg("tensors"));
  m.def("flattened", &flattened, py::arg("dicts"));
  m.def("same_objects", &same_objects, py::arg("these"), py::arg("those"));
}

}  // namespace zero_opt::bindings
