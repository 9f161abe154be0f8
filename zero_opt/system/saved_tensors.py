"""Values that an autograd graph has saved, and that are about to be overwritten without an operation of torch's.

In ``torch.autograd.graph.allow_mutation_on_saved_tensors()`` torch copies what a graph has saved before an operation
writes to it. Native code, other threads and other processes write without one. So an operation that writes nothing, but
says that it does, is called before they write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_CopiesSaved = getattr(torch.autograd.graph, "_CloneArgBeforeMutateMode", ())


@functools.cache
def _operation() -> tuple[Callable[[list[Tensor]], None], Any]:
    """Return the operation, and the library that has it."""
    make: Any = torch.library.Library  # whose methods have no types
    library = make("zero_opt", "FRAGMENT")
    library.define("will_write(Tensor(a!)[] tensors) -> ()")
    library.impl("will_write", lambda tensors: None, "CompositeExplicitAutograd")  # noqa: ARG005
    return torch.ops.zero_opt.will_write.default, library


def copies_saved() -> bool:
    """Return whether torch copies, on this thread, what a graph has saved before that is written to. Takes 0.1 us."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _CopiesSaved) for mode in _get_current_dispatch_mode_stack())


def keep_saved(tensors: Iterable[Tensor]) -> None:
    """Let torch copy what a graph has saved of these tensors, if it does so on this thread."""
    if copies_saved():
        plain = Tensor.__torch_dispatch__
        _operation()[0]([tensor for tensor in tensors if type(tensor).__torch_dispatch__ is plain])
