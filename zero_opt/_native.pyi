"""The compiled kernels. Addresses and sizes are trusted: go through zero_opt.cpu_adam, which checks them."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

interface: int  # the first 64 bits of the SHA-256 of this file as it was when the extension was built

class Hypers:
    """The hyperparameters of a group for an update, by names: those of its file in native/kernels.

    "adam" has lr, beta1, beta2, eps, weight_decay, decoupled (1 for AdamW's decay, else weight_decay is L2); "adagrad"
    lr, lr_decay, weight_decay, eps; "lion" lr, beta1, beta2, weight_decay; "sgd" lr, momentum, dampening, weight_decay,
    nesterov. ``grad_scale`` is what gradients are multiplied by first; ``maximize`` negates them. ``prediction`` is how
    many times the new param's copy in ``out`` has the update too that the next step would make with the same gradient.

    Raises ValueError for another update, or other hyperparameters than it has.
    """

    def __init__(
        self,
        update: str,
        *,
        maximize: bool = False,
        grad_scale: float = 1.0,
        prediction: float = 0.0,
        **hypers: float,
    ) -> None: ...

class UpdateRun:
    """``numel`` contiguous elements at each address, without the gradient's.

    Roles of addresses: param, and of Adam's exp_avg, exp_avg_sq; max_exp_avg_sq for amsgrad; of other updates' arrays
    exp_avg, momentum_buffer or sum; remainder (int16) beside a bf16 param;
    out, for another copy of the new param; exp_avg_base and exp_avg_sq_base (int16, one per 64 elements) for 8-bit
    moments, whose dtype is "uint8"; step, an fp32 count of steps done, which is used and raised in place of ``step``,
    the number of this step. ``to`` has the addresses of state that is written elsewhere: the same roles, without out.

    Raises ValueError for a negative numel, an unknown role or dtype, or a missing address with numel > 0.
    """

    def __init__(
        self,
        numel: int,
        addresses: Mapping[str, int],
        *,
        grad_dtype: str = "float32",
        moment_dtype: str = "float32",
        out_dtype: str = "float32",
        step: float = 1.0,
        to: Mapping[str, int] = {},
    ) -> None: ...

class MomentRun:
    """Both moments in a compact form ("bfloat16" or "uint8") and, at plain_exp_avg and plain_exp_avg_sq, in fp32.

    Rounding is by chance, which depends on ``step``.
    """

    def __init__(self, numel: int, dtype: str, addresses: Mapping[str, int], *, step: float = 1.0) -> None: ...

def update_step(
    batches: Sequence[tuple[Hypers, Sequence[UpdateRun], Sequence[int]]],
    *,
    threads: int = 1,
    flush_denormals: bool = False,
    isa: str = "",
) -> int:
    """Steps every run of every batch in place, given the addresses of their gradients; GIL released.

    Returns how many gradient elements, after scaling, were not finite. ``isa`` overrides the chosen instruction set.
    Raises ValueError for a run without a gradient, or with other arrays than its update takes, RuntimeError for an
    instruction set that this processor lacks, before anything is written.
    """

def grad_sum(
    grads: Sequence[tuple[int, str, int]],
    squares: Sequence[int] = ...,
    *,
    threads: int = 1,
    flush_denormals: bool = False,
    isa: str = "",
) -> tuple[float, int]:
    """Sum of squares and number of non-finite elements of arrays given as (address, dtype, numel); GIL released.

    ``squares``, if given, has an address or 0 for each: what :meth:`Control.draft_sums` found for it.
    """

def copy_runs(
    runs: Sequence[tuple[int, int, int]],
    squares: Sequence[tuple[int, str]] = (),
    *,
    threads: int = 1,
    isa: str = "",
) -> None:
    """Copies of memory given as (to, from, bytes), none of which overlap; GIL released.

    ``squares`` has nothing, or per run 0 or the address of sums as for :func:`grad_sum`, and the dtype of the elements.
    """

def convert(numel: int, from_: tuple[int, str], to: tuple[int, str], isa: str = "") -> None:
    """Array to array, each an (address, dtype), one of them fp32, rounded to nearest even: for tests."""

def pack_moments(run: MomentRun, isa: str = "") -> None:
    """From fp32 to the compact form."""

def unpack_moments(run: MomentRun, isa: str = "") -> None:
    """From the compact form to fp32."""

def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages under memory that has not been written yet; nothing where the system has none."""

def usable_threads(requested: int) -> int:
    """How many threads a request gets: clamped to this thread's CPUs and the cgroup's quota, at least 1."""

def flushes_denormals() -> bool:
    """Whether the calling thread takes subnormal numbers as zero, as ``torch.set_flush_denormal`` sets it."""

def hold_threads(threads: Sequence[int]) -> None:
    """Let these threads sleep forever where the C++ runtime would terminate the process, at the interpreter's exit.

    ``threads`` are values of ``Thread.ident``.
    """

def cgroup_cpus(listing: str, root: str) -> float:
    """CPUs' worth of time that the cgroups in a file like /proc/self/cgroup grant, mounted at ``root``: for tests."""

def fma(numel: int, a: int, b: int, c: int, out: int, isa: str = "") -> None:
    """out = a * b + c over fp32 elements, rounded once: the kernels' own multiply-add, for tests."""

def mean(numel: int, dtype: str, sources: Sequence[int], out: int, add: bool, divisor: int = 0) -> None:
    """Mean of the chunks at ``sources``, added in order, to ``out``, which may be one of them; GIL released.

    ``dtype`` is "float32", "float64", "bfloat16" or "float16" (both summed in fp32, rounded once), of all of them. With
    ``add``, the mean, rounded, is added to what is there. ``divisor``: what the sum is divided by, if not their number.
    """

class HostBucket:
    """A bucket as this rank has it: runs as (start in the bucket, elements, address or 0 for zeros, whether to add).

    ``sums``, of this rank's shard as reduced, are (start in the shard, elements, address of their sums, fp64).
    """

    def __init__(
        self,
        runs: Sequence[tuple[int, int, int, bool]],
        bounds: Sequence[int],
        dtype: str,
        sums: Sequence[tuple[int, int, int]] = (),
    ) -> None: ...

PEER_WORDS_NBYTES: int  # size of the words at the front of every rank's arena, which HostRanks writes

class HostRanks:
    """The ranks of a host, by the addresses at which their arenas are mapped here: native/exchange/host_exchange.hpp.

    ``ident`` is (step, epoch, sequence), each from 0 and below 2^64; of two exchanges the later one's is greater. Both
    methods release the GIL and return (slot, 2 if a peer skipped the exchange or 3 if it has not come yet, that peer,
    pieces published): after a 3 they are called again with what was published. ``divisor``: what sums over ranks are
    divided by, if not their number.
    """

    def __init__(self, rank: int, arenas: Sequence[int], data_at: int, slot_bytes: int, divisor: int = 0) -> None: ...
    def reduce(
        self, ident: tuple[int, int, int], bucket: HostBucket, shard: int, published: int, patience_s: float
    ) -> tuple[int, int, int]: ...
    def gather(
        self, ident: tuple[int, int, int], bucket: HostBucket, published: int, patience_s: float
    ) -> tuple[int, int, int]: ...

def control_nbytes(lanes: int, max_runs: int) -> int:
    """Bytes of the control area at the front of an arena: whole pages, the same for the arena's life."""

class Control:
    """The trainer's side of the control area of an arena, which is mapped at ``address`` with ``nbytes`` in all.

    Formats a control area of zeros. Raises ValueError if it was formatted for other lanes or runs, or does not fit.
    """

    def __init__(self, address: int, nbytes: int, *, lanes: int, max_runs: int) -> None: ...
    def submit(
        self,
        batches: Sequence[tuple[Hypers, Sequence[UpdateRun], Sequence[int]]],
        wake_fd: int,
        *,
        flush_denormals: bool = False,
        past_caches: bool = False,
        isa: str = "",
    ) -> int:
        """Hand a step, as for update_step, to the worker; GIL released. Kept steps are read and not raised.

        With ``past_caches`` the worker takes longer, and leaves the caches that it shares to others.

        Returns the step's sequence number, counted from 1. Raises ValueError, with nothing submitted, for an array
        outside the arena's data, an output over the gradient, more runs than ``max_runs`` (those of no elements do not
        count) or an unfinished step; RuntimeError for an instruction set that this processor lacks.
        """

    def wait(self, sequence: int, done_fd: int, worker_pidfd: int, seconds: float) -> str:
        """ "done", "dead" (the worker is, and the step is not done) or "waiting" after ``seconds``; GIL released.

        Returns "waiting" early if a signal arrives.
        """

    def draft(
        self,
        batches: Sequence[tuple[Hypers, Sequence[UpdateRun], Sequence[int]]],
        wake_fd: int,
        *,
        flush_denormals: bool = False,
        isa: str = "",
    ) -> int:
        """Have runs with a ``to`` made after the drafts submitted before; GIL released. Not on two threads at once.

        One that writes where an earlier one does, not known to be done, takes a :meth:`void_drafts` in between.

        Returns how many drafts have been submitted, ever (long runs count several times). Raises as :meth:`submit`,
        ValueError if ``to`` overlaps what is read, and OverflowError if there is no room until more drafts are done.
        """

    def draft_sums(
        self,
        grads: Sequence[tuple[int, str, int]],
        squares: Sequence[int],
        wake_fd: int,
        *,
        flush_denormals: bool = False,
        isa: str = "",
    ) -> int:
        """Have squares of arrays, as for grad_sum, summed like drafts; GIL released. They need not be all done at once.

        ``squares`` are addresses of fp64 numbers, one per 4096 elements of an array, rounded up. Returns and raises as
        :meth:`draft`.
        """

    def void_drafts(self) -> None:
        """Drafts submitted so far need not be made; those under way are finished, what they have written is void."""

    def wait_drafts(self, drafts: int, done_fd: int, worker_pidfd: int, seconds: float) -> str:
        """As :meth:`wait`, until so many drafts are done or void."""

    @property
    def drafted(self) -> int:
        """How many drafts have been submitted."""

    @property
    def drafts_done(self) -> int:
        """How many of them are done or void."""

    def stop(self, wake_fd: int) -> None:
        """Ask a worker that is ready to go when it has nothing to do. The next one does not see it."""

    def finish(self, threads: int = 1) -> None:
        """Finish a step and drafts in this process, as the worker would; GIL released: for tests and timing.

        There must be no worker.
        """

    @property
    def submitted(self) -> int:
        """Sequence number of the last step submitted; 0 for none."""

    @property
    def completed(self) -> int:
        """Likewise of the last step completed."""

    @property
    def generation(self) -> int:
        """How many workers have become ready."""

    @property
    def nonfinite(self) -> int:
        """What update_step would have returned for the last completed step."""

    @property
    def step_seconds(self) -> float:
        """How long the last completed step took who completed it."""

    @property
    def error(self) -> str:
        """What the worker said before it gave up; empty if nothing."""

    @property
    def progress(self) -> tuple[int, ...]:
        """A number per lane that changes whenever the lane has got on, and :attr:`drafts_done`."""

def worker_run(
    arena_fd: int, wake_fd: int, done_fd: int, trainer_pidfd: int, cpus: Sequence[int], threads: int
) -> None:
    """The life of a worker process, which ends in here: see native/worker/worker.hpp. Empty ``cpus``: all there are."""

def placing(api: object, tensors: list[Tensor]) -> tuple[bytes, bytes]:
    """The addresses of tensors, 8 bytes each, and how their elements lie: device, dtype, shape, strides.

    ``api``: ``Tensor.__dlpack_c_exchange_api__``. Raises what that raises of tensors that it cannot read.
    """

def dimensions(api: object, values: list[Tensor], likes: list[Tensor]) -> bool | None:
    """Whether values have dimensions, all those of their ``likes``; False if none has any.

    None of other values, and of values that differ in dtype or are not dense, row by row, in host memory. Raises what
    ``api`` (see :func:`placing`) raises of tensors that it cannot read.
    """

def joined_bytes(api: object, tensors: list[Tensor]) -> bytes:
    """The bytes of tensors one after the other, each dense, row by row, in host memory; ValueError of others."""

def flattened(dicts: list[Any]) -> list[Any] | None:
    """All keys and values of dicts; None if one is an instance of another class."""

def same_objects(these: list[Any], those: list[Any]) -> bool:
    """Whether two lists hold the same objects, in the same order."""

def arrival_hook(
    reduction: weakref.ReferenceType[Any],
    index: int,
    kind: type,
    otherwise: Callable[[Tensor], None],
    unheard: list[None],
    torch: tuple[type, object, Callable[[], int], Callable[[], bool]],
) -> Callable[[Tensor], None]:
    """A hook that takes the gradient of parameter ``index`` into the round of an OverlappedReduction.

    For parameters of another class than ``kind``, and all but usual gradients, it appends to ``unheard`` and calls
    ``otherwise``. ``torch``: ``Tensor``, ``strided``, what returns the number of the pass that autograd is in, and
    whether a torch function mode is on.
    """

def isas() -> list[str]:
    """The instruction sets that this build and this processor have, slowest first."""

def compiled_isas() -> list[str]:
    """The instruction sets that kernels are compiled for, slowest first."""

def processor_isa() -> str:
    """The fastest of baseline, v3 and v4 that this processor and operating system run, compiled in or not."""

def isa() -> str:
    """The one in use: ``ZERO_OPT_ISA`` if set, else the fastest. RuntimeError if that is unknown here."""
