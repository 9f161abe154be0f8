"""The beginning of a call of all ranks, before they meet: what ends it there is told where the others come."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, ConfigTypeError, ProcessGroupError
from .groups import carries_messages
from .rendezvous import Meeting, Patience, meetings_counted, resolve_group


class Beginning:
    """A context of a call of all ranks of a group. What ends it before this rank has met any others is told to them.

    What is no group is told in the default group. A rank that is no member of its group tells nobody.

    Attributes:
        elsewhere: whether the ranks meet, if they do, in other groups than that one, where nothing is told.
    """

    elsewhere = False

    def __init__(self, process_group: Any, call: str) -> None:
        """``call``: what the user has called."""
        self._group, self._call = process_group, call

    def __enter__(self) -> Beginning:
        self._counted = meetings_counted()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begins = error is not None and not self.elsewhere and meetings_counted() == self._counted
        parent = self._parent() if begins else None
        if error is None or parent is None or not carries_messages(parent):
            return
        meeting = Meeting(parent, Patience(0.0, 0.0, 0.0, call=self._call))
        try:
            meeting.leave(error)
        finally:
            meeting.ask.close()

    def _parent(self) -> dist.ProcessGroup | None:
        """Return the group in which the others come, if there are others."""
        try:
            parent = resolve_group(self._group)
        except (ConfigError, ConfigTypeError):
            parent = dist.group.WORLD
        except ProcessGroupError:
            return None
        return None if parent is None or parent.size() == 1 else parent
