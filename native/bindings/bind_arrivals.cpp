// The hook of a gradient that arrives, for most gradients: what OverlappedReduction._arrived() does, in one call.
//
// The objects are those of zero_opt/reduction/overlapped.py. A gradient that is not a usual one is left to Python
// before anything has changed. While the reduction has a `_native_round`, no thread is in `_arrived()`; and this
// function keeps the interpreter's lock from its first check of the round to its last change.
#include <stdexcept>

#include "bindings/bindings.hpp"

namespace zero_opt::bindings {
namespace {

// The members of a hook's own state, and of a reduction's NativeRound.
enum Member { kReduction, kIndex, kClass, kOtherwise, kUnheard, kTensor, kStrided, kTask, kMode, kMembers };
enum Round { kOfTask, kInRound, kShown, kPlaces, kFills, kSums, kRounds, kWithdrawn, kLocal, kRoundMembers };
// Those of a GradPlace.
enum Place { kParam, kConsumed, kBucket, kPosition };

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

struct Names {
  PyObject *round = interned("_native_round"), *sealed = interned("sealed"), *missing = interned("missing");
  PyObject *grads = interned("grads"), *producers = interned("producers");
  PyObject *grad = interned("grad"), *layout = interned("layout"), *base = interned("_base");
};

const Names& names() {
  static const Names kept;
  return kept;
}

py::object stolen(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object attribute(py::handle object, PyObject* name) { return stolen(PyObject_GetAttr(object.ptr(), name)); }

py::object called(PyObject* function) { return stolen(PyObject_CallNoArgs(function)); }

bool truth(int result) {
  if (result < 0) throw py::error_already_set();
  return result != 0;
}

bool is_true(const py::object& value) { return truth(PyObject_IsTrue(value.ptr())); }

bool contains(PyObject* set, PyObject* key) { return truth(PySet_Contains(set, key)); }

// Returns a dict's value, borrowed, or a null pointer.
PyObject* value_of(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// Returns what a weak reference refers to, or None.
py::object referent(PyObject* weak) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* object = nullptr;
  truth(PyWeakref_GetRef(weak, &object));
  return object == nullptr ? py::object(py::none()) : py::reinterpret_steal<py::object>(object);
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(weak));
#endif
}

// Whether autograd made a gradient as it usually does, so that its bucket can have it as it is.
bool is_plain(const py::object& grad, PyObject* state) {
  return reinterpret_cast<PyObject*>(Py_TYPE(grad.ptr())) == PyTuple_GET_ITEM(state, kTensor) &&
         attribute(grad, names().layout).ptr() == PyTuple_GET_ITEM(state, kStrided) &&
         attribute(grad, names().base).is_none();
}

// Moves the gradient of a parameter into its bucket's round, or returns false, with nothing changed.
bool take(PyObject* state, PyObject* param) {
  const Names& name = names();
  if (reinterpret_cast<PyObject*>(Py_TYPE(param)) != PyTuple_GET_ITEM(state, kClass)) return false;
  if (is_true(called(PyTuple_GET_ITEM(state, kMode)))) return false;
  const py::object reduction = referent(PyTuple_GET_ITEM(state, kReduction));
  if (reduction.is_none()) return false;
  py::object grad = attribute(param, name.grad);  // before what follows, as it may let the garbage collector run
  if (!is_plain(grad, state)) return false;
  const py::object round = attribute(reduction, name.round);
  if (!PyTuple_Check(round.ptr()) || PyTuple_GET_SIZE(round.ptr()) != kRoundMembers) return false;
  const auto member = [&round](Round at) { return PyTuple_GET_ITEM(round.ptr(), at); };
  const py::object task = called(PyTuple_GET_ITEM(state, kTask));
  if (!truth(PyObject_RichCompareBool(task.ptr(), member(kOfTask), Py_EQ))) return false;
  PyObject* index = PyTuple_GET_ITEM(state, kIndex);
  if (contains(member(kInRound), index) || contains(member(kShown), index)) return false;
  const auto held = py::reinterpret_borrow<py::object>(value_of(member(kPlaces), index));
  PyObject* place = held.ptr();
  if (place == nullptr || PyTuple_GET_ITEM(place, kParam) != param) return false;
  const auto fill = py::reinterpret_borrow<py::object>(value_of(member(kFills), PyTuple_GET_ITEM(place, kBucket)));
  if (!fill) return false;
  const Py_ssize_t missing = PyLong_AsSsize_t(attribute(fill, name.missing).ptr());
  if (missing <= 1 || attribute(fill, name.sealed).ptr() != Py_False) return false;
  if (!attribute(fill, name.producers).is_none()) return false;
  const py::object grads = attribute(fill, name.grads), left = stolen(PyLong_FromSsize_t(missing - 1));
  if (PyObject_SetAttr(param, name.grad, PyTuple_GET_ITEM(place, kConsumed)) != 0) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
    PyErr_Clear();  // the Python hook meets the error again, and raises one that says what does not fit
    return false;
  }
  truth(PySet_Add(member(kShown), index));
  truth(PySet_Add(member(kInRound), index));
  if (PyDict_SetDefault(member(kSums), index, member(kRounds)) == nullptr) throw py::error_already_set();
  truth(PySet_Discard(member(kWithdrawn), index));
  truth(PySet_Discard(member(kLocal), index));
  const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(place, kPosition));
  truth(PyList_SetItem(grads.ptr(), position, grad.release().ptr()));
  truth(PyObject_SetAttr(fill.ptr(), name.missing, left.ptr()));
  return true;
}

PyObject* arrived(PyObject* state, PyObject* param) {
  PyObject* unheard = PyTuple_GET_ITEM(state, kUnheard);
  try {
    if (take(state, param)) Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    if (PyList_Append(unheard, Py_None) != 0) PyErr_Clear();
    error.restore();
    return nullptr;
  }
  if (PyList_Append(unheard, Py_None) != 0) return nullptr;
  return PyObject_CallOneArg(PyTuple_GET_ITEM(state, kOtherwise), param);
}

// Returns a hook, which holds its state as a built-in method holds its object: the garbage collector knows both.
py::object arrival_hook(const py::weakref& reduction, const py::int_& index, const py::type& kind,
                        const py::object& otherwise, const py::list& unheard, const py::tuple& torch) {
  static PyMethodDef method = {"arrived", &arrived, METH_O, nullptr};
  const py::tuple state = py::make_tuple(reduction, index, kind, otherwise, unheard) + torch;
  if (state.size() != kMembers) throw std::invalid_argument("of torch it takes Tensor, strided, and two functions");
  return stolen(PyCFunction_NewEx(&method, state.ptr(), py::str("zero_opt._native").ptr()));
}

}  // namespace

void bind_arrivals(py::module_& m) {
  m.def("arrival_hook", &arrival_hook, py::arg("reduction"), py::arg("index"), py::arg("kind"), py::arg("otherwise"),
        py::arg("unheard"), py::arg("torch"));
}

}  // namespace zero_opt::bindings
