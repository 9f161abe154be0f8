"""What becomes of a shard's gradient between two steps, as its bucket tells its reader."""

from __future__ import annotations


class ReducedGrad:
    """The gradient of one shard between two steps.

    Attributes:
        writes: how often the shard was written to; as long as it is the same, the gradient is, but for ``factors``.
        factors: what the shard has been multiplied by since it was reduced.
        copied: whether the arena has a copy of what was reduced, without these factors.
        multiplied_before: whether the last step's gradient was multiplied.
    """

    def __init__(self) -> None:
        self.writes = 0
        self.factors: list[float] = []
        self.copied = self.multiplied_before = False
        self._rounds, self._rounds_before = 0, 1  # since the last step, and before that

    def note_write(self) -> None:
        """The shard is about to be written to: a copy of it does not count."""
        self.writes, self.copied = self.writes + 1, False

    def note_round(self) -> bool:
        """A round has been reduced. Return whether no further one is expected: the last step had no more."""
        self.factors = []
        self._rounds += 1
        return self._rounds >= self._rounds_before

    @property
    def in_arena(self) -> bool:
        """Whether the arena has a copy of the gradient as it is."""
        return self.copied and not self.factors

    def end_step(self) -> None:
        """A step is taken: the next gradient is another one, and :meth:`note_round` tells when it has come."""
        self.copied, self.multiplied_before = False, bool(self.factors)
        self._rounds_before, self._rounds = self._rounds or self._rounds_before, 0
