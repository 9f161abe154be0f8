"""The compiled kernels. Addresses and sizes are trusted: go through zero_opt.cpu_adam, which checks them."""

from collections.abc import Sequence

class AdamScalars:
    """The scalars of one Adam step of one group, computed in double and rounded to float once.

    ``step`` counts from 1 (ValueError below). ``decoupled`` is AdamW's decay, else weight_decay is L2.
    """

    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: float,
        decoupled: bool,
        maximize: bool,
    ) -> None: ...

class AdamRun:
    """``numel`` contiguous fp32 elements at each address; ``max_exp_avg_sq`` is 0 without amsgrad.

    Raises ValueError for a negative numel, or a missing address with numel > 0.
    """

    def __init__(
        self,
        scalars: AdamScalars,
        numel: int,
        param: int,
        grad: int,
        exp_avg: int,
        exp_avg_sq: int,
        max_exp_avg_sq: int = 0,
    ) -> None: ...

def adam_step(runs: Sequence[AdamRun], isa: str = "") -> None:
    """Steps every run in place, with the GIL released. ``isa`` overrides the chosen instruction set.

    Raises RuntimeError for an instruction set that this processor lacks, before anything is written.
    """

def fma(numel: int, a: int, b: int, c: int, out: int, isa: str = "") -> None:
    """out = a * b + c over fp32 elements, rounded once: the kernels' own multiply-add, for tests."""

def mean(numel: int, dtype: str, sources: Sequence[int], out: int, isa: str = "") -> None:
    """Mean of the chunks at ``sources``, added in order, to ``out``, which overlaps none of them; GIL released.

    ``dtype`` is "float32" or "bfloat16" (summed in fp32, rounded once), of all of them.
    """

def publish(words: int, slot: int, ident: int) -> None:
    """Announce in the peer words at that address that staging slot 0 or 1 holds exchange ``ident``."""

def wait_staged(words: int, ident: int, timeout_s: float) -> int:
    """The slot where a peer holds exchange ``ident``; 2 if it went on without it, 3 after the timeout. GIL released."""

def isas() -> list[str]:
    """The instruction sets that this build and this processor have, slowest first."""

def isa() -> str:
    """The one in use: ``ZERO_OPT_ISA`` if set, else the fastest. RuntimeError if that is unknown here."""
