"""Orders and reports arrive as they were sent; what is none is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rlinf.errors import DataError
from stages.worker import messages
from stages.worker.messages import Message, read_order, read_report

STAGE = messages.StageOrder(
    node="train/3",
    stage="train",
    iteration=3,
    position=(3, 0, 4),
    parts=4,
    out="it/0003/train",
    attempt="a",
    ranks=(0, 1),
    inputs={"rewards": ("it/0003/reward", True)},
)
BEGUN = messages.Begun(claim=2, channel="unfinished-b", samples=1, attempt=None)
ORDERS = [
    messages.Run(stages=(STAGE,)),
    messages.Send(out="o", channel="c", to={"w": "socket"}, maker="m"),
    messages.Claim(
        claim="b",
        name="rollout/3 claim 2",
        iteration=3,
        out="o",
        weights="w",
        attempt=None,
        to="t",
        starts=(0, 5),
        begun=BEGUN,
    ),
    messages.HandOver(claim="b", to="w"),
    messages.Drop(),
    messages.Leave(commits_s=3.0),
]
REPORTS = [
    messages.StageEnded(node="train/3", code=1, reason="why"),
    messages.Gathered(node="rollout/3", starts=(1, 2)),
    messages.HasWeights(out="o", attempt="a", iteration=3),
    messages.Cut(worker="w"),
    messages.ClaimEnded(claim="b", host="h", spans=(("generate", 0.0, 1.5),), rest=(5,)),
]


def travelled(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = msgpack.unpackb(msgpack.packb(message.packed()))
    return content


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.what)
def test_an_order_arrives_as_it_was_sent(order: messages.Order) -> None:
    assert read_order(travelled(order)) == order


@pytest.mark.parametrize("said", REPORTS, ids=lambda said: said.what)
def test_a_report_arrives_as_it_was_sent(said: messages.Said) -> None:
    assert read_report(travelled(said)) == said


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"what": "leave"},
        {"what": "dance"},
        {"what": "cut"},
        {"what": "cut", "worker": 5},
        {"what": "cut", "worker": "w", "more": 1},
        {"what": "stage_ended", "node": "n", "code": "x"},
    ],
)
def test_what_is_no_report_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no message of a driver or worker"):
        read_report(content)
