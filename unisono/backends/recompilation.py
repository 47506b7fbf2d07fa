"""Detects whether a lazy device keeps compiling: a warning, given once, names the usual causes."""

from __future__ import annotations

import logging
from collections import deque

logger = logging.getLogger(__name__)

_WATCHED = 40  # cuts
_STRETCH = 8


class RecompilationWatch:
    """Watches one device's graphs as they are cut.

    Each step has two or three cuts. In a settled run none of them compiles, and a new phase (a tail, an evaluation)
    compiles a few. The warning is about continual compiling, twice or more in every stretch. The first cuts do not
    count: every run compiles in them.
    """

    def __init__(self) -> None:
        self._settling = _WATCHED
        self._cuts: deque[bool] = deque(maxlen=_WATCHED)
        self._compiled = 0
        self._has_warned = False

    def look(self, num_compiled: int, num_reads: int) -> None:
        """Note that a graph was cut.

        Args:
            num_compiled: the number of graphs compiled so far.
            num_reads: the number of values that were read before the graph that computes them was cut.
        """
        before, self._compiled = self._compiled, num_compiled
        self._settling -= 1
        if self._settling < 0:
            self._cuts.append(num_compiled > before)
        if not self._has_warned and self._is_steady():
            self._has_warned = True
            logger.warning(
                "%d of the last %d graphs on a lazy device had to be compiled, which costs far more than running them. "
                "Batches of many shapes need a graph each: pad them to a few. A value that is read in the middle of a "
                "step (.item(), print, `if tensor:`; %d so far) cuts a graph: read it after the optimizer's step. A "
                "Python number that changes from step to step becomes part of the graph: make it a tensor",
                sum(self._cuts),
                _WATCHED,
                num_reads,
            )

    def _is_steady(self) -> bool:
        cuts = list(self._cuts)
        stretches = [cuts[start : start + _STRETCH] for start in range(0, _WATCHED, _STRETCH)]
        return len(cuts) == _WATCHED and all(sum(each) >= 2 for each in stretches)
