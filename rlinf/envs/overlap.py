"""Time loops that take turns: while the policy answers one, another is stepped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from rlinf.data.record import Record

Part = Generator[Record, Record, list[Record]]
"""The time loop of some samples: yields requests, is sent their replies, returns trajectories."""


def overlapped(
    parts: Sequence[Part], put: Callable[[Record], None], get: Callable[[], Record]
) -> list[Record]:
    """Run the loops to their ends; their trajectories in the order of ``parts``.

    Every loop has at most one request under way. ``get`` gives replies in any order; one belongs to
    the request that began with the same sample.
    """
    found: dict[int, list[Record]] = {}
    waiting: dict[int, int] = {}

    def advance(number: int, reply: Record | None) -> None:
        try:
            # A generator is begun by sending it None.
            request = parts[number].send(reply)  # type: ignore[arg-type]
        except StopIteration as end:
            found[number] = end.value
            return
        waiting[int(request.steps["sample"][0])] = number
        put(request)

    for number in range(len(parts)):
        advance(number, None)
    while waiting:
        reply = get()
        advance(waiting.pop(int(reply.steps["sample"][0])), reply)
    return [record for number in range(len(parts)) for record in found[number]]
