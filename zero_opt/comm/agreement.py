"""Agreement of ranks: on what they hold, when an optimizer is made, and on the step they are in, at every step."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigConflict, PeerLost, RankMismatch, StepDesync, ZeroOptError, error_of_rank, name_and_text
from ..kernels.strides import resolved, run_of
from ..system.shared_memory import allocation_errors
from .groups import Group, bytes_tensor, tensor_bytes

_HEADER = struct.Struct("<qqqBddQqQ")
# What a reduction may add to a report.
SAMPLE_NBYTES = 80
# Parameters that an error names.
_NAMED = 3
# Of the header's flags.
_FAILED, _ABSENT, _CLIPS, _UNSCALES, _SCALED, _OVERFLOWS = 1, 2, 4, 8, 16, 32


@dataclass(frozen=True)
class StepReport:
    """What one rank brings to a step.

    Attributes:
        step, epoch: optimizer steps done; ``zero_grad`` calls since the last one.
        rounds: gradient exchanges per bucket in this window.
        used: bit per parameter, whether it has a gradient here. trainable: bit per parameter, requires_grad.
        restarted: bit per parameter, whether its gradient was dropped or zeroed here though part of a sum.
        absent: this rank has run out of inputs, and goes along with whatever the others do.
        clip_to: the norm to clip to, where gradients are about to be clipped rather than stepped.
        unscales: GradScaler is about to unscale the gradients. scaled: it has left that to the step.
        overflows: GradScaler has found a gradient on this rank that is not finite, so the step is to be left out.
        inv_scale: one over the loss scale; 1 without GradScaler.
        hypers: a digest of the hyperparameters, and of which parameters' state the user has dropped here.
        edits: a digest of which parameters the user has written to here since the last agreement, and how often.
        abandoned: rounds that this rank has exchanged since the last step and ``zero_grad`` has voided, as far as an
            exchange of such a round on another rank would be answered by a later one here.
        sample: values that the reduction compares between ranks, at most SAMPLE_NBYTES.
    """

    step: int
    epoch: int
    rounds: int
    used: int
    trainable: int
    restarted: int = 0
    absent: bool = False
    clip_to: float | None = None
    unscales: bool = False
    scaled: bool = False
    overflows: bool = False
    inv_scale: float = 1.0
    hypers: int = 0
    abandoned: int = 0
    edits: int = 0
    sample: bytes = b""

    @property
    def call(self) -> str:
        """The method that the user called."""
        return "scaler.unscale_()" if self.unscales else "step()" if self.clip_to is None else "clip_grad_norm_()"

    def pack(self, mask_bytes: int, *, failed: bool) -> bytes:
        """Return the report as bytes, with masks of a given size, and whether something went wrong on this rank."""
        flags = failed * _FAILED | self.absent * _ABSENT | (self.clip_to is not None) * _CLIPS
        flags |= self.unscales * _UNSCALES | self.scaled * _SCALED | self.overflows * _OVERFLOWS
        numbers = (self.clip_to or 0.0, self.inv_scale, self.hypers, self.abandoned, self.edits)
        header = _HEADER.pack(self.step, self.epoch, self.rounds, flags, *numbers)
        masks = (self.used, self.trainable, self.restarted)
        return header + b"".join(mask.to_bytes(mask_bytes, "little") for mask in masks) + self.sample

    @classmethod
    def unpack(cls, raw: bytes, mask_bytes: int) -> tuple[StepReport, bool]:
        """Return what :meth:`pack` was given."""
        step, epoch, rounds, flags, clip_to, scale, hypers, abandoned, edits = _HEADER.unpack_from(raw)
        *starts, end = [_HEADER.size + place * mask_bytes for place in range(4)]
        used, trainable, restarted = (int.from_bytes(raw[start : start + mask_bytes], "little") for start in starts)
        absent, unscales, limit = bool(flags & _ABSENT), bool(flags & _UNSCALES), clip_to if flags & _CLIPS else None
        told = (absent, limit, unscales, bool(flags & _SCALED), bool(flags & _OVERFLOWS))
        others = (scale, hypers, abandoned, edits, raw[end:])
        report = cls(step, epoch, rounds, used, trainable, restarted, *told, *others)
        return report, bool(flags & _FAILED)


@dataclass(frozen=True)
class StepAgreement:
    """The reports of all ranks together: most rounds of any, parameters used by any, parameters trainable on all.

    Attributes:
        reports: by rank.
        epoch, clip_to: of the ranks that have inputs. absent: those that have none.
        grad_scale: what the step multiplies gradients by, for GradScaler. overflows: GradScaler has found a gradient
            that is not finite on some rank.
        same_hypers: whether the ranks that have inputs have the same hyperparameters, and have dropped the state of the
            same parameters. same_edits: whether all ranks
            have written to the same parameters equally often.
    """

    reports: Sequence[StepReport]
    rounds: int
    used: int
    trainable: int
    epoch: int
    clip_to: float | None
    grad_scale: float
    absent: Sequence[int]
    same_hypers: bool
    same_edits: bool
    overflows: bool = False


# In place of a digest: this rank could not compute one.
_NO_DIGEST = bytes(hashlib.sha256().digest_size)


class Agreement:
    """Comparisons of small facts over the control group. Every method but :meth:`reserve` is collective."""

    def __init__(self, group: Group, describe: Callable[[int], str]) -> None:
        self.group, self._describe = group, describe
        self._even = (0, 0)  # the step and the epoch from which all ranks go on since the last StepDesync

    def reserve(self, param_count: int) -> None:
        """Let each report of a step about so many parameters travel in one message."""
        self.group.inline_bytes = max(
            self.group.inline_bytes, _HEADER.size + 3 * _mask_bytes(param_count) + SAMPLE_NBYTES
        )

    def agree_on_step(self, mine: StepReport, param_count: int, error: ZeroOptError | None = None) -> StepAgreement:
        """Agree on the state of the step about to be taken.

        Raises:
            StepDesync: steps or zero_grad calls differ. RankMismatch: calls, loss scales or trainable masks differ.
            ConfigConflict: GradScaler unscales while a rank is absent.
            PeerSilent: a rank does not come. PeerLost: one has ended.
            ZeroOptError: ``error``, of whichever rank passed one, on every rank.
        """
        mask_bytes = _mask_bytes(param_count)
        self.group.in_step(mine.step)
        payload = mine.pack(mask_bytes, failed=error is not None)
        unpacked = [
            StepReport.unpack(raw, mask_bytes)
            for raw in self.group.all_gather_bytes(payload, "step() or clip_grad_norm_()", mine.call)
        ]
        if any(failed for _, failed in unpacked):
            self.raise_first_error(error)
        reports = [report for report, _ in unpacked]
        present = [rank for rank, report in enumerate(reports) if not report.absent]
        self._require_same_step(reports, present)
        self._require_same_mask(reports)
        first = reports[present[0] if present else 0]
        return StepAgreement(
            reports,
            rounds=max(report.rounds for report in reports),
            used=reduce(or_, (report.used for report in reports)),
            trainable=mine.trainable,
            epoch=first.epoch,
            clip_to=first.clip_to,
            grad_scale=first.inv_scale if first.scaled else 1.0,
            absent=[rank for rank, report in enumerate(reports) if report.absent],
            same_hypers=all(reports[rank].hypers == first.hypers for rank in present),
            same_edits=all(report.edits == first.edits for report in reports),
            overflows=any(report.overflows for report in reports),
        )

    def _require_same_step(self, reports: Sequence[StepReport], present: Sequence[int]) -> None:
        shown = present[0] if present else 0
        first = reports[shown]
        for rank, report in enumerate(reports):
            if report.step != first.step:
                raise StepDesync(f"rank {rank} is in step {report.step} while rank {shown} is in step {first.step}")
            if rank in present:
                _require_same_call(first, present[0], report, rank)
            if rank in present and report.epoch != first.epoch:
                step, epoch = self._even
                since = "the last StepDesync" if step == first.step and epoch else f"step {first.step}"
                before, latest = epoch if step == first.step else 0, max(r.epoch for r in reports)
                self._even = first.step, latest
                raise StepDesync(
                    f"since {since} rank {rank} has called zero_grad() {report.epoch - before} times and rank "
                    f"{present[0]} {first.epoch - before} times; every rank must call it, or none, also after an "
                    "exception; and no rank may leave out a step(), as where its loss is not finite",
                    epoch=latest,
                )

        if first.unscales and len(present) < len(reports):
            raise ConfigConflict(
                "GradScaler cannot unscale while ranks have run out of inputs (Join): they do not know its scale; give "
                "all ranks as many batches, or use reduction=zero_opt.AtStep()"
            )

    def _require_same_mask(self, reports: Sequence[StepReport]) -> None:
        for rank, report in enumerate(reports):
            differing = report.trainable ^ reports[0].trainable
            if differing:
                index = (differing & -differing).bit_length() - 1
                here, there = bool(reports[0].trainable >> index & 1), bool(report.trainable >> index & 1)
                raise RankMismatch(
                    f"{self._describe(index)}: requires_grad is {here} on rank 0 and {there} on rank {rank}"
                )

    def edit_counts(self, mine: Mapping[int, int]) -> dict[int, list[int]]:
        """Return how often each rank has written to the parameters that any rank has written to. Collective.

        Args:
            mine: by parameter, how often it was written to here.
        """
        listed = [dict(json.loads(raw)) for raw in self.group.all_gather_bytes(json.dumps([*mine.items()]).encode())]
        return {index: [other.get(index, 0) for other in listed] for index in sorted(set().union(*listed))}

    def require_same_values(self, written: Mapping[int, Sequence[int]], params: Sequence[Tensor]) -> None:
        """Require equal values of parameters that ranks have written to. Collective.

        The values may be equal all the same: where one rank loads a checkpoint, and it or DDP sends the values to the
        other ranks through ``.data``, only the first rank's version counters rise.

        Args:
            written: of these parameters, what :meth:`edit_counts` returns. params: all parameters of the optimizer.

        Raises:
            RankMismatch: on every rank, naming parameters that differ, and the ranks that wrote to them.
        """
        with self.together():
            digests = json.dumps([value_digest(params[index]) for index in written]).encode()
        digests_by_rank = [json.loads(raw) for raw in self.group.all_gather_bytes(digests)]
        apart = [index for index, *others in zip(written, *digests_by_rank, strict=True) if len(set(others)) > 1]
        if not apart:
            return
        raise RankMismatch(
            f"values of {self._named(apart)} differ between ranks: since the last step they were written to on "
            f"{_writers(written[apart[0]])}; call zero_opt.broadcast_params(model) on every rank and repeat the step; "
            "call load_state_dict(), and whatever else writes to parameters, on every rank, with equal values"
        )

    def require_dropped_alike(self, dropped: Collection[int], kept: Collection[int]) -> None:
        """Require that every rank that shows a parameter's state has dropped it, or none has. Collective.

        Ranks that show nothing of a parameter cannot have dropped it, and do not count.

        Args:
            dropped: parameters whose state was dropped here since the last step. kept: those with state that was not.

        Raises:
            RankMismatch: on every rank, naming parameters and ranks.
        """
        mine = json.dumps([sorted(dropped), sorted(kept)]).encode()
        by_rank = [tuple(map(set, json.loads(raw))) for raw in self.group.all_gather_bytes(mine)]
        for (rank, (gone, _)), (other, (_, left)) in product(enumerate(by_rank), enumerate(by_rank)):
            if gone & left:
                raise RankMismatch(
                    f"state was dropped of {self._named(sorted(gone & left))} on rank {rank} and not on rank {other}; "
                    "take entries out of opt.state on every rank, or on none: do the same on the other ranks and "
                    "repeat the step, or call load_state_dict()"
                )

    def _named(self, params: Sequence[int]) -> str:
        """Return the names of the first of these parameters, and how many more there are."""
        more = f" and {len(params) - _NAMED} more" if len(params) > _NAMED else ""
        return ", ".join(map(self._describe, params[:_NAMED])) + more

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        flags = self.group.all_gather(torch.tensor([flag], dtype=torch.uint8, device="cpu"))
        return any(bool(other) for other in flags)

    def from_rank_0(self, numbers: Sequence[int]) -> list[int]:
        """Return rank 0's list; all ranks give one of the same length."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        self.group.broadcast(tensor, 0)
        return [int(n) for n in tensor.tolist()]

    def raise_first_error(self, error: Exception | None, call: str = "", own: Exception | None = None) -> None:
        """Raise, on every rank, the error of the first rank that has one; return if none has. Collective.

        The rank's own error object is raised on the rank it comes from.

        Args:
            call: what the user called, if this is the first message between ranks in that call.
            own: this rank raises it in place of whatever error is first.
        """
        text = b"" if error is None else json.dumps(name_and_text(error)).encode()
        try:
            said = self.group.all_gather_bytes(text, call)
        except PeerLost as lost:
            if error is not None:  # which would appear nowhere
                lost.add_note(f"this rank would have raised {type(error).__name__}: {error}")
            raise
        for rank, other in enumerate(said):
            if not other:
                continue
            known = error if rank == self.group.rank else None
            raised = own or known or error_of_rank(rank, *json.loads(other))
            self.group.told = id(raised)
            raise raised

    @contextmanager
    def together(self, call: str = "") -> Iterator[None]:
        """Raise on all ranks, at the end of the context, what fails in it on one. Collective."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failure = error
        self.raise_first_error(failure, call)

    def require_same_contents(self, entries: Iterable[tuple[str, Any]]) -> None:
        """Compare what the ranks hold, as (name of the thing, its JSON value), in order.

        A fixed-size digest is compared; the entries travel only when digests differ.

        Raises:
            RankMismatch: on every rank, naming the first entry that differs and both values. ZeroOptError: on every
                rank, what the iterator of the entries raises on one.
        """
        failure: Exception | None = None
        encoded, digest = b"", _NO_DIGEST
        try:
            with allocation_errors("the comparison of parameters between ranks"):
                encoded = json.dumps([[name, value] for name, value in entries]).encode()
            digest = hashlib.sha256(encoded).digest()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failure = error
        digests = self._digests(digest)
        if _NO_DIGEST in digests:
            self.raise_first_error(failure)
        if all(digests[0] == other for other in digests):
            return
        gathered = [json.loads(payload) for payload in self.group.all_gather_bytes(encoded)]
        for rank, other in enumerate(gathered):
            if other != gathered[0]:
                raise RankMismatch(_first_difference(gathered[0], other, rank))

    def same(self, digest: Callable[[], bytes]) -> bool:
        """Return whether every rank computes the same SHA-256 digest; not where a rank cannot compute it."""
        mine = _NO_DIGEST
        with suppress(Exception):  # whatever it is, the other ranks must not wait for this one
            mine = digest()
        digests = self._digests(mine)
        return _NO_DIGEST not in digests and len(set(digests)) == 1

    def _digests(self, mine: bytes) -> list[bytes]:
        """Return all ranks' digests."""
        return [tensor_bytes(other) for other in self.group.all_gather(bytes_tensor(mine))]


def _writers(by_rank: Sequence[int]) -> str:
    """Say which ranks have written to a parameter, by how often each has."""
    least, most = min(by_rank), max(by_rank)
    if least == most:
        return "every rank, as by noise without a common seed, or in the forward of nn.Embedding(max_norm=...)"
    where = " and ".join(f"rank {rank}" for rank, count in enumerate(by_rank) if count == most)
    return where + (" alone" if {0, most} == set(by_rank) else f" more often than on rank {by_rank.index(least)}")


def _require_same_call(first: StepReport, its_rank: int, report: StepReport, rank: int) -> None:
    """Raise RankMismatch if two ranks have called different methods, or with different numbers."""
    if report.call != first.call:
        hint = "; use GradScaler on every rank, or on none" if report.unscales != first.unscales else ""
        raise RankMismatch(f"rank {its_rank} called {first.call} where rank {rank} called {report.call}{hint}")
    if report.clip_to != first.clip_to:
        raise RankMismatch(
            f"clip_grad_norm_() was given max_norm={first.clip_to!r} on rank {its_rank} and {report.clip_to!r} on "
            f"rank {rank}"
        )
    here, there = _loss_scale(first), _loss_scale(report)
    if here != there and not (math.isnan(here) and math.isnan(there)):
        raise RankMismatch(
            f"loss scale of GradScaler: {here} on rank {its_rank}, {there} on rank {rank}; load the same "
            "scaler.state_dict() on every rank"
        )


def _loss_scale(report: StepReport) -> float:
    return 1.0 / report.inv_scale if report.inv_scale else math.inf


def _mask_bytes(param_count: int) -> int:
    """Return the bytes of one bit per parameter."""
    return (param_count + 7) // 8


def _first_difference(first: list[list[Any]], other: list[list[Any]], rank: int) -> str:
    for (name, value), (other_name, other_value) in zip(first, other, strict=False):
        if name != other_name:
            return f"rank 0 has {name} where rank {rank} has {other_name}"
        if value != other_value:
            hint = "; call zero_opt.broadcast_params(model) first" if name.endswith("values") else ""
            return f"{name}: {value!r} on rank 0, {other_value!r} on rank {rank}{hint}"
    longer, where = (first, 0) if len(first) > len(other) else (other, rank)
    return f"{longer[min(len(first), len(other))][0]} exists on rank {where} alone"


# Of a parameter, so many rows of 4,096 words are copied at a time: 8 MB.
_ROWS_AT_ONCE = 256


def edits_digest(edits: Mapping[int, int]) -> int:
    """Return a digest, of 64 bits, of how often each parameter was written to; 0 if none was."""
    if not edits:
        return 0
    return int.from_bytes(hashlib.sha256(json.dumps([*edits.items()]).encode()).digest()[:8], "little")


def value_digest(param: Tensor) -> str:
    """Return a short digest of a parameter's bits that depends on their positions. Reads the parameter four times.

    Words of 8 bytes are summed by rows and by columns of a matrix, and by columns of another one, whose width has no
    common factor with the first: rows and columns of one matrix are the same for permutations of its rows. These sums
    wrap around, and so lose the highest bits, which are signs; the upper halves of words are summed without that. All
    sums are hashed.
    """
    with torch.no_grad():
        flat = run_of(resolved(param.detach()).contiguous())
        raw = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:  # a view of a larger tensor, where words cannot be seen
            raw = raw.clone()
        whole = raw.numel() // 8 * 8
        words = raw[:whole].view(torch.int64)
        rows, others = (words[: words.numel() // width * width].view(-1, width) for width in (4096, 4093))
        uppers = [(upper.sum(0), upper.sum(1)) for upper in (part >> 32 for part in torch.split(rows, _ROWS_AT_ONCE))]
        upper = [torch.stack([columns for columns, _ in uppers]).sum(0), torch.cat([of_rows for _, of_rows in uppers])]
        parts = [rows.sum(0), rows.sum(1), others.sum(0), *upper, words[rows.numel() :], raw[whole:]]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(tensor_bytes(part.cpu().contiguous()))
    return digest.hexdigest()[:16]
