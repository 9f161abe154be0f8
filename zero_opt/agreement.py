"""Do the ranks agree: on what they hold (when constructed), and on which step they are in (at every step)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from .collectives import Group, tensor_bytes
from .errors import RankMismatch, StepDesync, ZeroOptError, error_of_rank

_HEADER = struct.Struct("<qqq?")


@dataclass(frozen=True)
class StepReport:
    """What one rank brings to a step.

    Attributes:
        step, epoch: optimizer steps done; ``zero_grad`` calls since the last one.
        rounds: gradient exchanges per bucket in this window.
        used: bit per parameter, whether it has a gradient here. trainable: bit per parameter, requires_grad.
        restarted: bit per parameter, whether its gradient was dropped or zeroed here between two exchanges.
    """

    step: int
    epoch: int
    rounds: int
    used: int
    trainable: int
    restarted: int = 0


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks bring: the most rounds of any, parameters used by any, parameters trainable on all.

    Attributes:
        used_by, restarted: per rank, the parameters it reports as used and as restarted.
    """

    rounds: int
    used: int
    trainable: int
    used_by: Sequence[int]
    restarted: Sequence[int] = ()


class Agreement:
    """Compares small facts over the control group. Every method is collective."""

    def __init__(self, group: Group, describe: Callable[[int], str]) -> None:
        self.group, self._describe = group, describe

    def reserve(self, param_count: int) -> None:
        """Have the reports of a step about so many parameters travel in one message each."""
        self.group.inline_bytes = max(self.group.inline_bytes, _HEADER.size + 3 * _mask_bytes(param_count))

    def on_step(self, mine: StepReport, param_count: int, error: ZeroOptError | None = None) -> StepAgreement:
        """Agree on the state of the step about to be taken.

        Raises:
            StepDesync: steps or zero_grad calls differ. RankMismatch: trainable masks differ.
            ZeroOptError: ``error``, of whichever rank passed one, on every rank.
        """
        mask_bytes = _mask_bytes(param_count)
        payload = _HEADER.pack(mine.step, mine.epoch, mine.rounds, error is not None)
        for mask in (mine.used, mine.trainable, mine.restarted):
            payload += mask.to_bytes(mask_bytes, "little")
        reports, failed = [], False
        for raw in self.group.all_gather_bytes(payload, "step() or clip_grad_norm_()"):
            step, epoch, rounds, has_error = _HEADER.unpack_from(raw)
            starts = range(_HEADER.size, len(raw), mask_bytes) if mask_bytes else ()
            masks = [int.from_bytes(raw[start : start + mask_bytes], "little") for start in starts]
            reports.append(StepReport(step, epoch, rounds, *(masks or (0, 0, 0))))
            failed |= has_error
        if failed:
            self.raise_first_error(error)
        self._require_same_step(reports)
        self._require_same_mask(reports)
        used_by = [report.used for report in reports]
        rounds, used = max(report.rounds for report in reports), reduce(or_, used_by)
        return StepAgreement(rounds, used, mine.trainable, used_by, [report.restarted for report in reports])

    def _require_same_step(self, reports: Sequence[StepReport]) -> None:
        first = reports[0]
        for rank, report in enumerate(reports):
            if report.step != first.step:
                raise StepDesync(f"rank {rank} is in step {report.step} while rank 0 is in step {first.step}")
            if report.epoch != first.epoch:
                raise StepDesync(
                    f"since step {first.step} rank {rank} has called zero_grad() {report.epoch} times and rank 0 "
                    f"{first.epoch} times; after an exception every rank must call it, or none; with GradScaler use "
                    "reduction=zero_opt.Overlapped(), under which the ranks agree on what overflows",
                    epoch=max(r.epoch for r in reports),
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

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return any(bool(other) for other in self.group.all_gather(torch.tensor([flag], dtype=torch.uint8)))

    def from_rank_0(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's list; all ranks give one of the same length."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64)
        self.group.broadcast(tensor, 0)
        return [int(n) for n in tensor.tolist()]

    def raise_first_error(self, error: Exception | None, call: str = "") -> None:
        """Raise, on every rank, the error of the first rank that has one; return if none has. Collective.

        The rank's own error object is raised on the rank it comes from.

        Args:
            call: what the user called, if this is the first that ranks hear of each other in it.
        """
        text = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
        for rank, other in enumerate(self.group.all_gather_bytes(text, call)):
            if not other:
                continue
            if rank == self.group.rank and error is not None:
                raise error
            raise error_of_rank(rank, *json.loads(other))

    @contextmanager
    def together(self, call: str = "") -> Iterator[None]:
        """What fails within it on one rank is raised on all, at its end; see :meth:`raise_first_error`. Collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:  # whatever it is, the other ranks must not wait for this one
            error = found
        self.raise_first_error(error, call)

    def on_contents(self, entries: Iterable[tuple[str, Any]]) -> None:
        """Compare what the ranks hold, as (name of the thing, its JSON value), in order.

        A fixed-size digest is compared; the entries travel only when digests differ.

        Raises:
            RankMismatch: on every rank, naming the first entry that differs and both values.
        """
        listed = [[name, value] for name, value in entries]
        encoded = json.dumps(listed).encode()
        digest = hashlib.sha256(encoded).digest()
        digests = self.group.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        if all(torch.equal(digests[0], other) for other in digests):
            return
        gathered = [json.loads(payload) for payload in self.group.all_gather_bytes(encoded)]
        for rank, other in enumerate(gathered):
            if other != gathered[0]:
                raise RankMismatch(_first_difference(gathered[0], other, rank))


def _mask_bytes(param_count: int) -> int:
    """Bytes of one bit per parameter."""
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


def value_digest(param: Tensor) -> str:
    """A short digest of a parameter's bits that depends on their positions. Reads the parameter about twice.

    The bytes are summed as integers by rows and by columns of a matrix, and both sums are hashed.
    """
    with torch.no_grad():
        flat = param.detach().contiguous().view(-1)
        raw = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 4:  # a view of a larger tensor, where words cannot be seen
            raw = raw.clone()
        whole = raw.numel() // 4 * 4
        words = raw[:whole].view(torch.int32)
        width = 4096
        rows = words[: words.numel() // width * width].view(-1, width)
        parts = [rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), words[rows.numel() :], raw[whole:]]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(tensor_bytes(part.cpu().contiguous()))
    return digest.hexdigest()[:16]
