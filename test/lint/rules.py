"""The project's own lint: size limits, names that only certain modules may use, no wait without a bound, no bare
builtin error, native includes that only go down, and where tests lie.

Run as a script it prints every finding as path:line: message and fails if there is one.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "zero_opt"
FILE_LINES = 500  # a file stays under this
FUNCTION_LINES = 50  # a function, with its docstring, stays under this
PARAMETERS = 8  # a function has at most this many, plus self or cls and **kwargs

# The room that names collectives.
COLLECTIVES_ROOM = "comm"
# The only module that imports the compiled extension.
NATIVE_MODULE = "system.extension"

# What torch.distributed calls its collectives, and what a process group calls them.
COLLECTIVE = re.compile(
    r"(all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|send|recv|gather|scatter)(_\w+)?"
    r"|isend|irecv|batch_isend_irecv|P2POp|reduce|(monitored_)?barrier"
)
GROUP_METHOD = re.compile(
    r"_?(allreduce|allgather|alltoall)(_\w+)?|_reduce_scatter_base|reduce_scatter_tensor_coalesced|recv_anysource"
)
DISTRIBUTED = "torch.distributed"

# Methods that, called without any argument, wait for as long as it takes (but for Popen.poll, which nobody calls).
WAITING_METHODS = {"result", "wait", "join", "get", "acquire", "communicate", "poll", "exception"}
# Functions that do whatever their arguments, and those that do with fewer than so many.
WAITING_FUNCTIONS = {"signal.pause": 99, "os.wait": 99, "os.waitpid": 99, "os.waitid": 99, "select.select": 4}
# Names of what is no wait.
INSTANT = {"select.poll"}

_TRANSFER = "a transfer between ranks ends, or fails, within the timeout of its process group"
_EXCHANGE = "an exchange, which ends, or fails, within the timeout of its process group"
_WORKER = "WorkerProcess.wait() looks every 0.1 s, replaces workers that do not get on, and gives up after max_deaths"
_STREAMS = "one stream waits for another; the caller does not"
# What bounds a call without a timeout, by module and method.
BOUNDED_WAITS: Mapping[tuple[str, str], str] = {
    ("comm.backend_exchanges", "wait"): _TRANSFER,
    ("comm.exchange", "wait"): _TRANSFER,
    ("comm.groups", "wait"): _TRANSFER,
    ("comm.headed_messages", "wait"): _TRANSFER,
    ("comm.pairwise_exchange", "wait"): _TRANSFER,
    ("comm.relay_exchange", "wait"): _EXCHANGE,
    ("comm.slices", "wait"): "the collective is over",
    ("comm.transfers", "wait"): _TRANSFER,
    ("optimizer.between_steps", "join"): _STREAMS,
    ("optimizer.between_steps", "wait"): _WORKER,
    ("optimizer.sharded", "wait"): _WORKER,
    ("placement.native_placement", "wait"): f"NVMePlacement.wait() gives each transfer hang_timeout; {_WORKER}",
    ("placement.selective.placement", "wait"): _WORKER,
    ("placement.worker.placement", "wait"): _WORKER,
    ("reduction.already_reduced", "wait"): _TRANSFER,
    ("reduction.at_step", "join"): _STREAMS,
    ("reduction.interface", "result"): _EXCHANGE,
    ("reduction.overlapped", "join"): _STREAMS,
    ("reduction.sparse", "wait"): _TRANSFER,
    ("sharding.background_gather", "result"): _EXCHANGE,
    ("sharding.broadcast", "wait"): _TRANSFER,
    ("sharding.gather", "wait"): _EXCHANGE,
    ("state.consolidate", "wait"): _TRANSFER,
    ("state.row_sharded", "wait"): _TRANSFER,
    ("tools.bench", "get"): "it is not empty",
    ("system.background_thread", "get"): "a daemon thread without work; nobody waits for it",
}

# In native code: what waits for another process, with no bound.
NATIVE_WAIT = re.compile(r"\bpoll\([^;]*,\s*-1\)|\bF_(OFD_)?SETLKW\b|\bwaitpid\(|\bsem_wait\(|\bpause\(\)|\bsigwait\(")

# The folders of native/, top to bottom: files include those of their own folder and of rows below.
NATIVE_FLOORS = (("bindings",), ("worker", "exchange"), ("step",), ("kernels", "threads"))
NATIVE_INCLUDE = re.compile(r'\s*#\s*include\s*"(?:(\w+)/)?')

# Functions that make a tensor on torch's default device and of its default dtype, unless they are given.
CONSTRUCTORS = re.compile(
    r"torch\.(arange|as_tensor|asarray|empty|empty_permuted|empty_strided|eye|full|linspace|logspace|ones|rand|randint"
    r"|randn|randperm|range|scalar_tensor|sparse_\w+_tensor|tensor|tril_indices|triu_indices|zeros|\w+_window)"
)

# The only module that may start threads, and names that would start them elsewhere.
THREADS_MODULE = "system.threads"
THREAD_STARTERS = {"ThreadPoolExecutor", "ThreadPool", "start_new_thread"}

# What all folders of tests may import from; folders where a test lies as what it tests does; those without helpers.
TESTS, SUPPORT, UNIT = "test", "support", "unit"
MIRRORS = (UNIT, "distributed")
TESTS_ALONE = (*MIRRORS, "whole")

# Builtin errors that a module may raise: those that its caller expects, and no user sees. What users may see is a
# ZeroOptError.
BUILTIN_ERRORS: Mapping[str, set[str]] = {
    "comm.shared_memory_exchange": {"OSError"},  # answered by an exchange without shared memory
    "comm.waits_beside": {"RuntimeError"},  # what a backend raises where a short wait ends before its work does
    "optimizer.dtensors.local_view": {"KeyError"},  # of a mapping
    "optimizer.attributes": {"AttributeError"},  # of __getattr__
    "placement.nvme.state_file": {"OSError"},  # becomes StorageFailed
    "placement.compact_state": {"KeyError"},  # of a mapping
    "placement.read_through": {"KeyError"},  # of a mapping
    "state.state_dict": {"KeyError"},  # becomes StateDictError
    "system.future": {"TimeoutError"},  # answered where the wait is
    "system.background_thread": {"RuntimeError"},  # what Python raises of itself where threads start at exit
    "system.threads": {"RuntimeError"},  # likewise
    "system.shared_memory": {"OSError"},  # answered by whoever maps memory
}
# What the library warns with.
WARNING_CATEGORIES = ("ZeroOptWarning", "DeprecationWarning")
# Names that a module may define though another one does.
DEFINED_ANYWHERE = {"__all__", "main"}

Finding = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def size_findings(source: str, tree: ast.Module | None) -> Iterator[Finding]:
    """Files and functions that are too long, functions that take too much. ``tree`` is None for native sources."""
    lines = source.count("\n") + (not source.endswith("\n") and bool(source))
    if lines >= FILE_LINES:
        yield lines, f"the file has {lines} lines; stay under {FILE_LINES}"
    if tree is None:
        return
    methods = {item for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body}
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length >= FUNCTION_LINES:
            yield node.lineno, f"{node.name}() has {length} lines; stay under {FUNCTION_LINES}"
        count = parameter_count(node, method=node in methods)
        if count > PARAMETERS:
            yield node.lineno, f"{node.name}() has {count} parameters; at most {PARAMETERS}"


def parameter_count(node: Function, *, method: bool) -> int:
    """How many parameters count: all but the self or cls of a method, and **kwargs."""
    args = node.args
    count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) + (args.vararg is not None)
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    return count - (1 if method and not static else 0)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as text, or an empty string for anything that is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def distributed_aliases(tree: ast.Module) -> set[str]:
    """The names under which this module reaches torch.distributed or a module of it."""
    aliases = {DISTRIBUTED}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.asname and a.name.startswith(DISTRIBUTED)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if f"{node.module}.{alias.name}".startswith(DISTRIBUTED):
                    aliases.add(alias.asname or alias.name)
    return aliases


def collective_findings(tree: ast.Module) -> Iterator[Finding]:
    """Every use of a torch.distributed collective, whatever the module is imported as."""
    aliases = distributed_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DISTRIBUTED):
            for alias in node.names:
                if COLLECTIVE.fullmatch(alias.name) or GROUP_METHOD.fullmatch(alias.name):
                    yield node.lineno, f"{alias.name}: only {COLLECTIVES_ROOM} names a collective"
        elif isinstance(node, ast.Attribute):
            base = dotted(node.value)
            of_torch = base in aliases or any(base.startswith(f"{alias}.") for alias in aliases)
            if (of_torch and COLLECTIVE.fullmatch(node.attr)) or GROUP_METHOD.fullmatch(node.attr):
                yield node.lineno, f"{base}.{node.attr}: only {COLLECTIVES_ROOM} names a collective"


def imported_from_root(tree: ast.Module, depth: int) -> Iterator[tuple[int, str]]:
    """(line, name) of everything taken from the package itself by a module ``depth`` packages below it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            absolute = node.level == 0 and node.module == PACKAGE
            if absolute or (node.level == depth + 1 and node.module is None):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif (node.module or "") in (f"{PACKAGE}._native", "_native"):
                yield node.lineno, "_native"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == PACKAGE or alias.name.startswith(f"{PACKAGE}._native"):
                    yield node.lineno, alias.name.removeprefix(f"{PACKAGE}.")


def import_findings(tree: ast.Module, module: str, depth: int, submodules: set[str]) -> Iterator[Finding]:
    """Imports that the contracts in setup.cfg cannot see: of _native, and of the package's own public names."""
    for line, name in imported_from_root(tree, depth):
        if name == "_native":
            if module != NATIVE_MODULE:
                yield line, f"only {NATIVE_MODULE} imports _native"
        elif name not in submodules:
            yield line, f"{name}: import it from the module that defines it, not from {PACKAGE} itself"


def wait_findings(tree: ast.Module, module: str) -> Iterator[Finding]:
    """Every call in a module, named from the package on, that may wait without a bound."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in WAITING_FUNCTIONS and len(node.args) + len(node.keywords) < WAITING_FUNCTIONS[called]:
            yield node.lineno, f"{called}() waits without a bound"
        elif (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in WAITING_METHODS
            and called not in INSTANT
            and not has_timeout(node)
            and (module, node.func.attr) not in BOUNDED_WAITS
        ):
            yield (
                node.lineno,
                f"{called}() may wait forever: give it a timeout, or say in BOUNDED_WAITS what bounds it",
            )


def has_timeout(call: ast.Call) -> bool:
    """Whether there is an argument, other than a plain None."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def default_findings(tree: ast.Module) -> Iterator[Finding]:
    """Every call that makes a tensor with the program's default device or dtype."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or CONSTRUCTORS.fullmatch(ast.unparse(node.func)) is None:
            continue
        given = {keyword.arg for keyword in node.keywords}
        missing = [name for name in ("device", "dtype") if name not in given]
        if missing and None not in given:  # None stands for **arguments
            yield node.lineno, f"{ast.unparse(node.func)}() without {' and '.join(missing)} takes the program's default"


def thread_findings(tree: ast.Module, module: str) -> Iterator[Finding]:
    """Every start of a thread that the interpreter's exit would not wait for; see zero_opt/system/threads.py."""
    if module == THREADS_MODULE:
        return
    threading = any(isinstance(node, ast.Import) and node.names[0].name == "threading" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in THREAD_STARTERS or (threading and name == "start" and not (node.args or node.keywords)):
            yield node.lineno, f"{ast.unparse(node.func)}(): only {THREADS_MODULE} starts threads"


def native_wait_findings(source: str) -> Iterator[Finding]:
    """The same in native code, as far as a pattern can tell."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := NATIVE_WAIT.search(line):
            yield number, f"{found[0]} waits without a bound"


def raise_findings(tree: ast.Module, module: str) -> Iterator[Finding]:
    """Every builtin error that is raised where users may see it."""
    allowed = BUILTIN_ERRORS.get(module, set())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        name = dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException) and name not in allowed:
            yield node.lineno, f"raises a bare {name}: raise a ZeroOptError that is a {name} too, or see BUILTIN_ERRORS"


def warn_findings(tree: ast.Module) -> Iterator[Finding]:
    """Every warning whose category users do not know."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("warn", "warnings.warn"):
            named = [word.value for word in node.keywords if word.arg == "category"]
            category = dotted([*node.args[1:2], *named][0]) if node.args[1:] or named else "no category"
            if category not in WARNING_CATEGORIES:
                yield node.lineno, f"warns with {category}: take one of {', '.join(WARNING_CATEGORIES)}"


def include_findings(source: str, folder: str) -> Iterator[Finding]:
    """Every include in a native file of a folder that does not go down, or is not spelled from native/ on."""
    floors = {name: floor for floor, names in enumerate(NATIVE_FLOORS) for name in names}
    if folder not in floors:
        yield 1, f"{folder} is no folder of native/: see NATIVE_FLOORS"
        return
    for number, line in enumerate(source.splitlines(), 1):
        found = NATIVE_INCLUDE.match(line)
        if found is None or found[1] == folder:
            continue
        if found[1] not in floors:
            yield number, 'spell includes from native/ on: "folder/name"'
        elif floors[found[1]] <= floors[folder]:
            yield number, f"{folder}/ includes {found[1]}/, which is not below it"


def imported(tree: ast.Module, package: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name in parts) of everything that a module of a package imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, [*base, alias.name]) for alias in node.names)


def helper_findings(tree: ast.Module, parts: Sequence[str]) -> Iterator[Finding]:
    """What a module below test/, named by its path there, imports of tests and of other folders' helpers."""
    for line, name in imported(tree, (TESTS, *parts[:-1])):
        if name[0] != TESTS:
            continue
        if any(part.startswith("test_") for part in name):
            yield line, f"{'.'.join(name)}: a test is imported by nobody; what others need lies in {TESTS}/{SUPPORT}"
        elif name[1] not in (SUPPORT, parts[0]):
            yield line, f"{'.'.join(name)}: what several folders of tests share lies in {TESTS}/{SUPPORT}"


def place_findings(parts: Sequence[str], package: Path) -> Iterator[Finding]:
    """Whether a module below test/, named by its path there, lies as what it tests does in the package."""
    if parts[0] not in TESTS_ALONE or parts[-1] == "__init__":
        return
    folder, *rooms, name = parts
    room = package.joinpath(*rooms)
    module = name.removeprefix("test_")
    if name == module:
        yield 1, f"{TESTS}/{folder} has tests alone; helpers lie in {TESTS}/{SUPPORT}"
    elif folder in MIRRORS and not room.is_dir():
        yield 1, f"{PACKAGE} has no room {'/'.join(rooms)}"
    elif folder == UNIT and not any((room / f"{stem}.py").exists() for stem in (module, f"__{module}__")):
        yield 1, f"there is no {'/'.join((PACKAGE, *rooms, module))}.py for it to test"


def check_file(path: Path, root: Path) -> Iterator[Finding]:
    """All findings in one file under ``root``."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, str(path)) if path.suffix == ".py" else None
    yield from size_findings(source, tree)
    if tree is None:
        yield from native_wait_findings(source)
        yield from include_findings(source, path.parent.name)
    package = root / PACKAGE
    if tree is not None and path.is_relative_to(root / TESTS):
        parts = path.relative_to(root / TESTS).with_suffix("").parts
        yield from helper_findings(tree, parts)
        yield from place_findings(parts, package)
    if tree is None or not path.is_relative_to(package):
        return
    parts = path.relative_to(package).with_suffix("").parts
    yield from wait_findings(tree, ".".join(parts))
    yield from thread_findings(tree, ".".join(parts))
    yield from default_findings(tree)
    yield from raise_findings(tree, ".".join(parts))
    yield from warn_findings(tree)
    if parts[0] != COLLECTIVES_ROOM:
        yield from collective_findings(tree)
    if parts not in (("__init__",), ("__main__",)):
        submodules = {entry.stem for entry in package.iterdir() if not entry.name.startswith("_")}
        yield from import_findings(tree, ".".join(parts), len(parts) - 1, submodules)


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a module defines at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def repeated_names(modules: Mapping[str, ast.Module]) -> Iterator[tuple[str, Finding]]:
    """(module, finding) of every top-level name that a module before it defines too."""
    home: dict[str, str] = {}
    for module, tree in modules.items():
        for line, name in defined_names(tree):
            if name not in DEFINED_ANYWHERE and home.setdefault(name, module) != module:
                yield module, (line, f"{name} is defined in {home[name]} too: one name, one thing")


def source_files(root: Path) -> list[Path]:
    """Every file that the limits are for."""
    python = [path for folder in (PACKAGE, "test", "docs", "release") for path in (root / folder).rglob("*.py")]
    native = [path for pattern in ("*.cpp", "*.hpp", "*.inl") for path in (root / "native").rglob(pattern)]
    return sorted([*python, *native, root / "setup.py"])


def findings(root: Path = ROOT) -> list[str]:
    """Everything that is wrong under ``root``, one line each."""
    modules = {
        str(p.relative_to(root)): ast.parse(p.read_text("utf-8")) for p in sorted((root / PACKAGE).rglob("*.py"))
    }
    return [
        *(
            f"{path.relative_to(root)}:{line}: {message}"
            for path in source_files(root)
            for line, message in check_file(path, root)
        ),
        *(f"{module}:{line}: {message}" for module, (line, message) in repeated_names(modules)),
    ]


if __name__ == "__main__":
    found = findings()
    print("\n".join(found) or f"{len(source_files(ROOT))} files keep the rules")
    sys.exit(bool(found))
