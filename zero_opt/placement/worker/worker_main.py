"""The worker process: run by path, ``python -I -S worker_main.py EXTENSION ARENA WAKE DONE TRAINER THREADS [CPU ...]``.

EXTENSION is the path of the native extension; ARENA, WAKE, DONE and TRAINER are inherited descriptors (memory, two
events and a pidfd). Nothing else of zero_opt is imported, nor torch, so that the process is small and soon ready.
"""

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader


def main(extension: str, *numbers: str) -> None:
    """Load the extension and hand the process over to it, for good."""
    loader = ExtensionFileLoader("zero_opt._native", extension)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    native = module_from_spec(spec)
    loader.exec_module(native)
    arena, wake, done, trainer, threads, *cpus = map(int, numbers)
    native.worker_run(arena, wake, done, trainer, cpus, threads)


if __name__ == "__main__":
    main(*sys.argv[1:])
