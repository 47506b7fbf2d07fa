"""What a loader's state is: where its loop stands, and how that is checked when it is loaded."""

from __future__ import annotations

from typing import Any


class Progress:
    """How far one device's loop has come in a pass: by what it has received, whatever was prefetched.

    Attributes:
        rounds: the number of batches received.
        position: that of the source behind the last of them; None before the first.
        has_ended: whether the loop was told that there are no more.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.position: Any = None
        self.has_ended = False

    def advance(self, position: Any) -> None:
        """One more batch was delivered."""
        self.rounds += 1
        self.position = position
