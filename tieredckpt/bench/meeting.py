"""Where the ranks of a turn meet: processes of one machine, of which none goes on before all have come."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations

__all__ = ["Meeting", "seats"]


@contextmanager
def seats(ranks: int) -> Iterator[list[tuple[int, ...]]]:
    """For each of so many ranks the descriptors of its sockets to all others, for the processes that inherit them."""
    with ExitStack() as closing:
        found: list[list[int]] = [[] for _ in range(ranks)]
        for one, other in combinations(found, 2):
            here, there = map(closing.enter_context, socket.socketpair())
            one.append(here.fileno())
            other.append(there.fileno())
        yield list(map(tuple, found))


class Meeting:
    """One rank's seat. To call it waits until every rank has called it as often; alone it returns at once."""

    def __init__(self, seat: Sequence[int]) -> None:
        self._seat = seat

    def __call__(self) -> None:
        for other in self._seat:
            os.write(other, b"!")
        for other in self._seat:
            os.read(other, 1)
