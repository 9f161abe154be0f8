"""What can go wrong on a rank, as values that travel and as exceptions."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

# Seconds after which a test that hangs fails: enough for a machine with ten times the load of a quiet one.
PATIENCE_S = 600.0


class RankFailed(RuntimeError):
    """A rank died, or raised an exception that could not be carried to the test."""


class RanksHang(AssertionError):
    """Some ranks were still running when the time was up; the message holds their stacks."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended without a result: the exception it raised, or the death it met."""

    rank: int
    type_name: str
    message: str
    traceback: str = ""
    exception: BaseException | None = None

    @classmethod
    def of(cls, rank: int, exc: BaseException) -> Failure:
        """Describe `exc`, raised on `rank`."""
        text = "".join(traceback.format_exception(exc))
        return cls(rank, type(exc).__name__, str(exc), text, exc)

    def as_exception(self) -> BaseException:
        """The exception to raise in the test: the rank's own where it is at hand, its rank in a note."""
        if self.exception is None:
            return RankFailed(f"rank {self.rank}: {self.type_name}: {self.message}\n{self.traceback}")
        self.exception.add_note(f"raised on rank {self.rank}")
        return self.exception

    def dumps(self) -> bytes:
        """Pickle, leaving out an exception that does not survive the journey."""
        whole = pickle.dumps(("failure", _without(self)))
        if self.exception is None:
            return whole
        try:
            # An exception class whose __init__ wants other arguments only fails when it is loaded.
            pickle.loads(pickle.dumps(self.exception))
        except Exception:
            return whole
        return pickle.dumps(("failure", self))


def _without(failure: Failure) -> Failure:
    return Failure(failure.rank, failure.type_name, failure.message, failure.traceback)
