"""Run a function on several ranks inside one test, and compare what the ranks bring back to the bit.

`run_threads` gives every rank a thread of this process and torch's in-process "threaded" group: cheap
enough for breadth. `run_processes` forks one process per rank, joined by gloo: the real transport, for a
sample of everything and for faults. Both return the ranks' results in rank order, raise the first failure
with its rank in a note, and never outlast their timeout: a rank that hangs is a `RanksHang` with its stack.

Ranks that are threads share the process, so torch's default random generator too: seed a `torch.Generator`
of your own per rank.
"""

from .bitwise import assert_bitwise, bitwise_difference, copies_of
from .failures import Failure, RankFailed, RanksHang
from .rank_processes import run_processes
from .rank_threads import run_threads

__all__ = [
    "Failure",
    "RankFailed",
    "RanksHang",
    "assert_bitwise",
    "bitwise_difference",
    "copies_of",
    "run_processes",
    "run_threads",
]
