"""The policies that users write. Frozen, checked when made; the *type* picks a strategy, the fields tune it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from .errors import ConfigConflict, ConfigError, ConfigTypeError, quoted
from .field_checks import (
    check_choice,
    check_dtype,
    check_flag,
    check_folder,
    check_integer,
    check_mebibytes,
    check_model,
    check_not_negative,
    check_number,
    check_positive,
    check_seconds,
    check_threads,
    keep_plain_numbers,
    plain_number,
)

if TYPE_CHECKING:
    import torch

EXCHANGES = ("auto", "backend")
NONFINITE = ("ignore", "raise", "skip")
MOMENT_FORMS = ("float32", "bfloat16", "block8")
MASTERS = (None, "float32", "split")


@dataclass(frozen=True)
class Reduction:
    """How buckets travel, under every reduction policy.

    Attributes:
        bucket_mb: bucket size in MiB; a larger parameter is a bucket of its own. ``None``: 5 where parameters in host
            memory are exchanged between hosts, else 25.
        exchange: ``"auto"`` picks the fastest exchange the ranks can use, ``"backend"`` forces torch.distributed.
        overlap_param_gather: the model whose parameters are trained. Updated parameters are then gathered in the
            background after ``step()`` returns, and each module's forward waits for its own. With
            :class:`WorkerOffload` and ``delay=0``, at one rank too, what the worker has stepped is copied into the
            parameters in the background as well. Every other function of torch that is called on a
            parameter waits for all. Call ``opt.flush()`` before anything else: pointers, NumPy arrays and tensors that
            share a parameter's memory, made before; code in C++; and torch's functions that tell of no
            parameter p: ``torch.tensor(p)``, ``as_tensor``, ``asarray``, ``sparse_*_tensor``, ``nested_tensor``,
            ``y.new_tensor(p)``, ``torch.Tensor(p)``, ``y.new(p)``, ``y.set_(p)``, ``y.data = p``, ``y.real = p``,
            ``torch.Tensor.as_subclass(p, ...)``, and a frozen scalar p as a number. If an update of
            this rank meets a change that is made so, the next ``step()`` raises ``StepPending``, as far as version
            counters tell. Until then a parameter's class is a subclass of its own. ``torch.compile`` compiles models
            anew (``torch.compiler.reset``), with the waits in them, which break graphs: ``fullgraph=True`` and
            ``torch.jit.script`` cannot be used.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    bucket_mb: float | None = None
    exchange: str = "auto"
    overlap_param_gather: torch.nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        owner = type(self).__name__
        if self.bucket_mb is not None:
            check_mebibytes(f"{owner}.bucket_mb", self.bucket_mb)
        check_choice(f"{owner}.exchange", self.exchange, EXCHANGES)
        check_model(owner, self.overlap_param_gather)


@dataclass(frozen=True)
class Overlapped(Reduction):
    """Reduce-scatter each gradient bucket once backward has filled it; gradients end up sharded (ZeRO-2).

    Attributes: ``bucket_mb``, ``exchange``, ``overlap_param_gather``: the size of a bucket in MiB, ``"auto"`` or
    ``"backend"``, and the model whose updated parameters may arrive after ``step()``. They, and errors, are those of
    :class:`~zero_opt.policies.Reduction`.
    """


@dataclass(frozen=True)
class AtStep(Reduction):
    """Reduce-scatter whatever is in ``p.grad`` at ``step()``; until then it can be read and edited.

    Attributes: ``bucket_mb``, ``exchange``, ``overlap_param_gather``: the size of a bucket in MiB, ``"auto"`` or
    ``"backend"``, and the model whose updated parameters may arrive after ``step()``. They, and errors, are those of
    :class:`~zero_opt.policies.Reduction`.
    """


@dataclass(frozen=True)
class DDPHook(Reduction):
    """Like :class:`Overlapped`, for a model in ``DistributedDataParallel``: reduce-scatter instead of its all-reduce.

    Register the hook too: ``ddp.register_comm_hook(opt, zero_opt.ddp_hook)``.

    Attributes: ``bucket_mb``, ``exchange``, ``overlap_param_gather``: the size of a bucket in MiB, ``"auto"`` or
    ``"backend"``, and the model whose updated parameters may arrive after ``step()``. They, and errors, are those of
    :class:`~zero_opt.policies.Reduction`.
    """


@dataclass(frozen=True)
class AlreadyReduced:
    """``p.grad`` already holds the mean over ranks (DDP, or the user): take this rank's slice of it (ZeRO-1).

    Attributes:
        exchange: how updated parameters are gathered: ``"auto"`` picks the fastest way, ``"backend"`` forces
            torch.distributed.
        overlap_param_gather: the model whose updated parameters may arrive after ``step()``, as in
            :class:`~zero_opt.policies.Reduction`.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    exchange: str = "auto"
    overlap_param_gather: torch.nn.Module | None = field(default=None, repr=False, compare=False)
    bucket_mb: ClassVar[float | None] = Reduction.bucket_mb

    def __post_init__(self) -> None:
        check_choice("AlreadyReduced.exchange", self.exchange, EXCHANGES)
        check_model("AlreadyReduced", self.overlap_param_gather)


@dataclass(frozen=True)
class Selective:
    """Step the columns with the largest gradients at every step on the parameters' device, all others now and then.

    Of parameters of two or more dimensions: a column is a slice along the last dimension. The gradients of the columns
    that are not selected are added up in fp32, and stepped where the offload policy steps, once per window, with their
    mean: by the hyperparameters of that step, scaled as for a batch that is larger by the number k of those gradients,
    lr √k, betas to the power k, eps / √k, decoupled weight decay times √k. Such a step counts k times. Parameters of
    fewer dimensions are small, and stepped at every step on their device. Every element has one master, one exp_avg,
    one exp_avg_sq and one step count. Where parameters and state are both in host memory, steps take longer with it
    than without: adding gradients up moves as many bytes there as it saves.

    Attributes:
        topk_ratio: share of each parameter's columns that is selected, rounded, at least one column; 0 selects none.
        select_interval: number of steps after which columns are selected anew, with the first step of the next window.
        update_interval: steps of a window; ``"auto"`` begins with 4 and goes by the share of the gradient's norm that
            is not in selected columns, when columns are selected: above 3/4 a window has half as many steps, below 1/2
            twice as many, from 1 to 16.
        warmup_steps: number of steps at the beginning that are made as without this policy.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    topk_ratio: float = 0.1
    select_interval: int = 64
    update_interval: int | str = 4
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        check_number("Selective.topk_ratio", self.topk_ratio)
        if not 0 <= self.topk_ratio <= 1:
            raise ConfigError(f"Selective.topk_ratio must be from 0 to 1, got {quoted(self.topk_ratio)}")
        check_integer("Selective.select_interval", self.select_interval)
        if not isinstance(self.update_interval, str):
            check_integer("Selective.update_interval", self.update_interval)
        elif self.update_interval != "auto":
            raise ConfigError(
                f"Selective.update_interval must be 'auto' or a number, got {quoted(self.update_interval)}"
            )
        check_integer("Selective.warmup_steps", self.warmup_steps, 0)


def _check_selective_field(owner: str, value: object) -> None:
    if value is not None and not isinstance(value, Selective):
        called = f"; write {value.__name__}()" if isinstance(value, type) else ""
        raise ConfigTypeError(f"{owner}.selective must be None or Selective(), got {quoted(value)}{called}")


@dataclass(frozen=True)
class WorkerOffload:
    """Keep state and masters in host memory, and step them in a native process beside this one.

    For Adam, AdamW, SGD, Adagrad, CPULion and this package's classes of those, with the fused formula, and parameters
    in fp32, bf16 or fp16. All is fp32 unless, of Adam and AdamW, :class:`AdamState` or ``precision`` says otherwise.
    SGD's momentum may be switched on at any step. A worker that dies in the middle of a step loses nothing: its
    successor finishes the step with the same bits.

    Attributes:
        delay: 0: ``step()`` returns with updated parameters. 1: it returns once the step before has finished, and the
            update arrives with the next ``step()``, or with ``flush()``; so gradients are those of parameters one
            update behind, as with the delayed update of ZeRO-Offload (Ren et al. 2021). A step whose learning rates are
            all 0 is brought in at once. A load drops a step that is pending, and the log says so, unless parameters
            show predictions; ``flush()`` before the load keeps its update. From ``step()`` to ``flush()`` parameters
            are for training, for what autograd records and modules in training read with gradients enabled. Every other
            function of torch that reads one raises ``StepPending``: ``model.state_dict()``, ``torch.save``, deepcopy,
            averages, evaluation under ``no_grad``. These read late values or predictions without an error: evaluation
            with gradients enabled; pointers, NumPy arrays and tensors that share a parameter's memory, made before;
            code in C++; everything that reads DTensors (FSDP2); and torch's functions that tell of no parameter p:
            ``torch.tensor(p)``, ``as_tensor``, ``asarray``, ``sparse_*_tensor``, ``nested_tensor``,
            ``y.new_tensor(p)``, ``torch.Tensor(p)``, ``y.new(p)``, ``y.set_(p)``, ``y.data = p``, ``y.real = p``,
            ``torch.Tensor.as_subclass(p, ...)``, and a frozen scalar p as a number. The memory shared with the worker
            has gradients twice then, but under ``AlreadyReduced``: the next ones arrive while the worker reads.
        threads: number of the worker's threads, at most 1024. ``None``: one per core of ``cores``; else its cores
            divided by the ranks that share them, half as many with ``delay=1`` or ``speculate``.
        cores: numbers of the cores the worker runs on, of those this process may use; may differ between ranks.
            ``None``: a share of those, on the rank's NUMA node.
        hang_timeout: seconds, from 0.001, without any progress after which a worker is killed and replaced.
        max_deaths: deaths, at least 1, without progress in between after which ``step()`` raises ``WorkerDied``.
        selective: which part of the state is stepped more often than the rest; see :class:`Selective`.
        speculate: begin each bucket's step as soon as backward has reduced it, as if no gradient were clipped, into a
            second bank of masters and moments; ``step()`` commits it, or has it made anew from the first one. The bits
            are the same; the state takes twice the memory. For ``delay=0`` with ``Overlapped`` or ``DDPHook``. Over
            DTensors (FSDP2) gradients leave ``p.grad`` then, as with ``delay=1`` and ``Overlapped``; where they are
            narrower than fp32, ``clip_grad_norm_`` does not round them again.
        warmup_steps: with ``delay=1``, the first so many steps are made as with ``delay=0``. A load sets their count
            to the largest ``step`` loaded; SGD and Lion keep none, and begin again.
        prediction: with ``delay=1``, between steps a parameter shows ``p + prediction * (r - p)``, where the update
            that arrived last made it p, and the next would make it r if its gradient came again: about the value its
            gradient will be applied to. Masters, state and every checkpoint have the true values, and so have
            parameters after ``flush()``. Of fp32 parameters, and of split masters, the memory shared with the worker
            holds one array more, in the parameters' dtype. 1 is the value to use, 1.25 in runs of a few hundred steps;
            0: parameters are those of the last update. PipeDream (Harlap et al. 2018) keeps old parameters for late
            gradients; SpecTrain (Chen et al. 2018) predicts by momentum, XPipe (Guan et al. 2019) by Adam's update;
            NAdam (Dozat 2016) takes the gradient once more.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
        ConfigConflict: ``speculate`` with ``delay=1``; ``warmup_steps`` or ``prediction`` without it, or with
            ``selective``.
    """

    delay: int = 0
    threads: int | None = None
    cores: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    hang_timeout: float = 30.0
    max_deaths: int = 3
    selective: Selective | None = None
    speculate: bool = False
    warmup_steps: int = 0
    prediction: float = 0.0

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        _check_selective_field("WorkerOffload", self.selective)
        if self.selective is not None and self.speculate:
            raise ConfigConflict(
                "WorkerOffload.speculate needs the gradients of every step, which selective makes wait"
            )
        check_integer("WorkerOffload.delay", self.delay, 0, most=1)
        check_flag("WorkerOffload.speculate", self.speculate)
        if self.speculate and self.delay:
            raise ConfigConflict(
                "WorkerOffload(delay=1, speculate=True): the second begins a step during backward so that step() can "
                "end it, the first ends it a step later; nothing is left to be hidden, so use one of the two"
            )
        check_integer("WorkerOffload.warmup_steps", self.warmup_steps, 0)
        check_not_negative("WorkerOffload.prediction", self.prediction)
        self._check_late_fields()
        check_threads("WorkerOffload", self.threads)
        if self.cores is not None:
            self._check_cores(self.cores)
        check_seconds("WorkerOffload.hang_timeout", self.hang_timeout)
        check_integer("WorkerOffload.max_deaths", self.max_deaths)

    def _check_late_fields(self) -> None:
        for name in ("warmup_steps", "prediction"):
            if getattr(self, name) and not self.delay:
                raise ConfigConflict(f"WorkerOffload.{name} is for delay=1: with delay=0 no update is late")
            if getattr(self, name) and self.selective is not None:
                raise ConfigConflict(
                    f"WorkerOffload.{name} is for steps of all parameters, not with selective, which has warmup_steps "
                    "of its own; leave one of the two"
                )

    def _check_cores(self, cores: object) -> None:
        if not isinstance(cores, (tuple, list, range)):
            raise ConfigTypeError(f"WorkerOffload.cores must be a tuple of core numbers, got {quoted(cores)}")
        cores = tuple(map(plain_number, cores))
        for core in cores:
            check_integer("WorkerOffload.cores", core, 0)
        if not cores or len(set(cores)) != len(cores):
            raise ConfigError(f"WorkerOffload.cores must name at least one core, each once, got {quoted(cores)}")
        object.__setattr__(self, "cores", cores)

    @property
    def steps_in_background(self) -> bool:
        """Whether the worker steps while this process computes."""
        return self.delay == 1 or self.speculate


@dataclass(frozen=True)
class NVMeOffload:
    """Keep state and masters in a file, and step them a window at a time while the next one is read.

    For the classes of :class:`WorkerOffload`, in the same forms, and with the same rule of momentum. An fp32
    parameter on the CPU is its own master. What is resident of the state at any time is three windows. The file has no
    name, so nothing is left of it when the process ends, however it does. A step in which the disk fails stays pending:
    ``flush()`` on every rank takes up where it stopped.

    Attributes:
        path: an existing directory on the disk to use; may differ between ranks, of which each makes a file of its own.
        window_mb: largest size of a window in MiB; of a small state, windows are a sixteenth or 4 MiB.
        threads: number of threads that step, at most 1024. ``None``: the number of cores that this process may use,
            divided by the ranks that share them, but at most what ``torch.set_num_threads`` was given
            (``OMP_NUM_THREADS=1``, which torchrun sets, is ignored).
        hang_timeout: seconds, from 0.001, that the disk may take for one window; more than 24.8 days count as 24.8.
        selective: which part of the state is stepped more often than the rest; see :class:`Selective`.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    path: str | os.PathLike[str] = field(repr=False)
    window_mb: float = 64
    threads: int | None = None
    hang_timeout: float = 60.0
    selective: Selective | None = None

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        _check_selective_field("NVMeOffload", self.selective)
        check_folder("NVMeOffload.path", self.path)
        check_mebibytes("NVMeOffload.window_mb", self.window_mb)
        check_threads("NVMeOffload", self.threads)
        check_seconds("NVMeOffload.hang_timeout", self.hang_timeout)


@dataclass(frozen=True)
class CPUOffload:
    """Keep moments and masters in host memory, and step them in this process.

    Any class but LBFGS (over FSDP2, elementwise classes); Adam, AdamW, SGD, Adagrad, CPULion and this package's classes
    of those by the native kernel, with the fused formula, unless a param group says ``fused=False`` or
    ``foreach=True``. bf16 and fp16 parameters have an fp32 master, unless it is split. Parameters on the CPU need no
    copy: fp32 ones are stepped in place.

    Attributes:
        pin_memory: page-lock what an accelerator's copies go through, so that they overlap with the step.
        ratio: share of the elements that is offloaded; the rest, the first-registered parameters, whose gradients come
            last, is stepped on the parameters' device. Both are cut between parameters, and never across param groups.
        subgroup_mb: MiB of gradients that are copied, stepped and brought back together; two of these are in host
            memory at a time. A larger parameter is a sub-group of its own.
        selective: which part of the state is stepped more often than the rest; see :class:`Selective`.
        threads: number of threads that step, at most 1024; torch's own operations use as many where the class steps by
            itself. ``None``: the number of cores that this process may use, divided by the ranks that share them, but
            at most what ``torch.set_num_threads`` was given, as in :class:`NVMeOffload`. Backward and all other
            operations keep torch's number.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    pin_memory: bool = True
    ratio: float = 1.0
    subgroup_mb: float = 64
    selective: Selective | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        _check_selective_field("CPUOffload", self.selective)
        check_flag("CPUOffload.pin_memory", self.pin_memory)
        check_positive("CPUOffload.ratio", self.ratio)
        if self.ratio > 1:
            raise ConfigError(f"CPUOffload.ratio must be at most 1, got {quoted(self.ratio)}")
        check_mebibytes("CPUOffload.subgroup_mb", self.subgroup_mb)
        check_threads("CPUOffload", self.threads)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of the gradient path, and of what bf16 and fp16 parameters are rounded from.

    Attributes:
        master_dtype: deprecated for CPUAdam, CPUAdamW, CPUSGD, CPUAdagrad and CPULion: use :class:`AdamState` there.
            ``torch.float32``: bf16 and fp16 parameters have an fp32 master, which is what is stepped.
            ``"split"``: the same for bf16 in half the memory: the parameter is the upper half of its master, rounded to
            nearest with ties away from zero, and a 16-bit remainder the lower; for the native kernel alone (Adam and
            AdamW with ``fused=True``, on the CPU or with an offload). ``None``: no masters, unless an offload has them.
        reduce_dtype: dtype gradients are sent in; ``None`` is the parameter's own dtype (bf16 and fp16 are still summed
            in fp32 and rounded once per reduction). Complex parameters need ``None``.
        accumulate_dtype: dtype in which the means of several backwards are added up; ``None`` is that they are sent in.
        between_hosts_dtype: ``torch.bfloat16``: what a host has added up of fp32 gradients is rounded to bf16 before it
            leaves for another host, and added to what is there in fp32. Gradients that are sent in another dtype, and
            ranks of one host, go on as without it. Then the bits depend on which ranks share a host, and on
            ``bucket_mb``. Not over a backend's own collectives, as NCCL's. ``None``: nothing is rounded.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
        ConfigConflict: ``between_hosts_dtype`` with a ``reduce_dtype`` other than fp32.
    """

    master_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    between_hosts_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        is_text = isinstance(self.master_dtype, str)
        if not is_text:
            check_dtype("MixedPrecision.master_dtype", self.master_dtype)
        if self.master_dtype not in (None, "split") and (is_text or str(self.master_dtype) != "torch.float32"):
            raise ConfigError(
                f"MixedPrecision.master_dtype must be torch.float32 or 'split', got {quoted(self.master_dtype)}"
            )
        check_dtype("MixedPrecision.reduce_dtype", self.reduce_dtype)
        check_dtype("MixedPrecision.accumulate_dtype", self.accumulate_dtype)
        self._check_between_hosts()

    def _check_between_hosts(self) -> None:
        if self.between_hosts_dtype is None:
            return
        check_dtype("MixedPrecision.between_hosts_dtype", self.between_hosts_dtype)
        if str(self.between_hosts_dtype) != "torch.bfloat16":
            raise ConfigError(
                "MixedPrecision.between_hosts_dtype must be torch.bfloat16, the narrow dtype with the range of fp32, "
                f"got {quoted(self.between_hosts_dtype)}"
            )
        if self.reduce_dtype is not None and str(self.reduce_dtype) != "torch.float32":
            raise ConfigConflict(
                f"MixedPrecision.between_hosts_dtype rounds fp32 gradients, and reduce_dtype={self.reduce_dtype} sends "
                "none; leave one of them None"
            )


@dataclass(frozen=True)
class Checks:
    """What is verified while training, and how long a rank waits for another.

    Attributes:
        nonfinite: what ``step()`` does when a reduced gradient has an inf or NaN on any rank. ``"ignore"``: does not
            look. ``"raise"``: ``NonFiniteGradient`` on every rank, naming the owner and the parameter. ``"skip"``: no
            rank steps, and ``opt.skipped_steps`` counts it. Both leave parameters and state as they were.
        timeout: seconds, from 0.001, that a collective of this optimizer may take before it is an error; ``None`` is
            the process group's own timeout. More than 24.8 days, in either case, count as 24.8 days.
        hang_timeout: seconds after which a rank of this host that is stopped (``SIGSTOP``, a debugger) is an error for
            those that wait for it; from 0.001.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    nonfinite: str = "ignore"
    timeout: float | None = None
    hang_timeout: float = 30.0

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        check_choice("Checks.nonfinite", self.nonfinite, NONFINITE)
        if self.timeout is not None:
            check_seconds("Checks.timeout", self.timeout)
        check_seconds("Checks.hang_timeout", self.hang_timeout)


@dataclass(frozen=True)
class AdamState:
    """What CPUAdam and CPUAdamW keep of a parameter between steps. The math is fp32 in every case.

    CPUSGD, CPUAdagrad and CPULion take ``master="float32"`` alone.

    Attributes:
        moments: ``"float32"`` as torch, 8 bytes per element. ``"bfloat16"``, 4 bytes: 8 bits of precision.
            ``"block8"``, 2.06 bytes: codes 6.7 to 12.5 % apart below the largest of each 64 elements; an exp_avg below
            2^-15.7 of that becomes zero, an exp_avg_sq below 2^-31.7 of it is raised to that. Both are rounded by
            chance, up with the probability of what is cut off, so that within the range the expected value is the exact
            one and small changes are not lost; the chance is a hash of the moments and the step, so a run repeats
            itself to the bit.
        master: what a bf16 or fp16 parameter is rounded from; ``None`` refuses such parameters, but with an offload,
            which has fp32 masters then. ``"float32"``, 4 bytes more: any such parameter, rounded to nearest even.
            ``"split"``, 2 bytes more, bf16 only: the parameter is the upper half of the master and a 16-bit remainder
            the lower, so nothing is lost; rounded to nearest, ties away from zero.

    Raises:
        ConfigError, ConfigTypeError: a field has a value, or a type, that cannot work.
    """

    moments: str = "float32"
    master: str | None = None

    def __post_init__(self) -> None:
        check_choice("AdamState.moments", self.moments, MOMENT_FORMS)
        check_choice("AdamState.master", self.master, MASTERS)
