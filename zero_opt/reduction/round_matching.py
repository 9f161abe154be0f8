"""Which of this rank's collectives answers which of another rank's, where a collective has no name.

[Note: abandoned rounds]
A backend such as NCCL pairs the n-th collective of one rank with the n-th of every other. A rank that leaves a forward
or a backward early launches fewer. Three rules keep the pairs right, and none of them waits for a rank in backward:

- A round that has begun is launched to its end, by ``zero_grad()`` at the latest, with zeros for what has not come.
- Each rank counts the rounds that ``zero_grad()`` voids. ``step()`` compares the counts, and a rank that has fewer
  launches the missing rounds before those that count.
- An epoch that may follow such a ``zero_grad()`` launches nothing until ``step()`` has compared the counts. A rank
  suspects such an epoch where ``zero_grad()`` was called a different number of times than in the window before.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence

from ..comm.agreement import StepAgreement
from ..errors import RankMismatch, StepDesync
from ..sharding.buckets import GradBucket
from ..system.future import Future
from .interface import ReductionParts

Launch = Callable[[], Future[bool]]


def order_digest(order: Sequence[int]) -> bytes:
    """Return what is equal on ranks that launch the same buckets in the same order."""
    return zlib.crc32(array("q", order)).to_bytes(4, "little")


def require_same_order(agreed: StepAgreement) -> None:
    """Raise RankMismatch, on every rank, if the ranks' samples, each an :func:`order_digest`, differ.

    That every rank exchanges the same buckets follows from what ranks have agreed on before. If it ever did not, their
    sums would be of different parameters.
    """
    first, *others = [report.sample for report in agreed.reports]
    for rank, digest in enumerate(others, 1):
        if digest != first:
            raise RankMismatch(
                f"rank {rank} exchanges other gradient buckets than rank 0, or in another order, which is a fault of "
                "zero_opt: please report it; the step was not taken; to go on, load a checkpoint into a new optimizer, "
                "with reduction=zero_opt.AtStep(), whose order is the plan's"
            )


def left_early() -> StepDesync:
    """Return the error of a backward that another rank has not gone through with."""
    return StepDesync("another rank left this backward early; call opt.zero_grad() on every rank and repeat it")


class RoundMatching:
    """A count of rounds, which tells when a collective may be launched; see [Note: abandoned rounds].

    Attributes:
        abandoned: rounds launched since the ranks last agreed, which ``zero_grad()`` has voided.
    """

    def __init__(self, parts: ReductionParts) -> None:
        self._parts = parts
        self.abandoned = 0
        self._launches = 0
        self._held: list[Launch] = []
        self._agreed_epoch, self._usual_resets = 0, 0
        self._equal = False

    def _holds(self) -> bool:
        """Return whether the ranks may have launched unequal numbers of rounds; the same on every rank that agrees."""
        resets = self._parts.count.epoch - self._agreed_epoch
        return self._parts.must_match and not self._equal and resets not in (0, self._usual_resets)

    @property
    def holding(self) -> bool:
        """Whether launches wait for :meth:`launch_held`."""
        return bool(self._held)

    @property
    def unanswered(self) -> bool:
        """Whether this rank has launched collectives, or holds some, since the ranks last agreed."""
        return bool(self.abandoned or self._launches or self._held)

    def launch(self, call: Launch) -> list[Future[bool]]:
        """Make a call that launches a bucket's collective, and return its future; or hold it for `launch_held()`."""
        if self._holds():
            self._held.append(call)
            return []
        future = call()
        self._launches += 1
        return [future]

    def complete_round(self, order: Sequence[int]) -> Iterator[GradBucket]:
        """Yield the buckets that complete the round under way, to be launched with zeros. An epoch begins.

        Args:
            order: the launch order.
        """
        if self._parts.must_match and order:
            for index in order[len(order) - (-self._launches % len(order)) :]:
                yield from self._unnamed([index])
                self._launches += 1
            self.abandoned += self._launches // len(order)
        self._launches = 0
        self._held.clear()
        self._equal = False

    def missing(self, agreed: StepAgreement, order: Sequence[int]) -> Iterator[GradBucket]:
        """Yield the buckets of the rounds that other ranks have abandoned and this one has not launched.

        Raises:
            StepDesync: after all of them, on every rank, if gradients that count were launched before this was known.
        """
        abandoned = {report.abandoned for report in agreed.reports}
        behind, held = max(abandoned) - self.abandoned, self._holds()
        for _ in range(behind):
            yield from self._unnamed(order)
        self.abandoned += behind
        if not held and len(abandoned) > 1:
            raise left_early()

    def _unnamed(self, indices: Sequence[int]) -> Iterator[GradBucket]:
        """Yield the buckets among these whose collectives have no names."""
        for bucket in (self._parts.partition.buckets[index] for index in indices):
            if not self._parts.exchange_of(bucket).blocks:
                yield bucket

    def launch_held(self) -> list[Future[bool]]:
        """Launch what was held, as the ranks have launched equally many rounds; returns the futures."""
        self._equal = True
        held, self._held = self._held, []
        return [future for call in held for future in self.launch(call)]

    def agreed(self, rounds: int) -> None:
        """Note that all ranks have launched this epoch's rounds."""
        self.abandoned = self._launches = 0
        if rounds:
            self._usual_resets = self._parts.count.epoch - self._agreed_epoch
            self._agreed_epoch = self._parts.count.epoch

    def end_step(self) -> None:
        """Note that a step has been taken, which begins to count ``zero_grad()`` calls anew."""
        self._agreed_epoch, self._equal = 0, False
