"""Orders and reports arrive as they were sent; what is none is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rlinf.errors import DataError
from stages.worker import messages
from stages.worker.messages import WorkerMessage, read_order, read_report

STAGE = messages.StageOrder(
    node="train/3",
    stage="train",
    iteration=3,
    position=(3, 0, 4),
    num_chunks=4,
    output="it/0003/train",
    attempt="a",
    ranks=(0, 1),
    inputs={"rewards": ("it/0003/reward", True)},
)
BEGUN = messages.PartialSamples(
    worker="w", item_number=2, channel="partial-samples-b", num_samples=1, weights_attempt=None
)
ORDERS = [
    messages.RunStages(stages=(STAGE,)),
    messages.FetchOutput(output="o", channel="c", producers=("w",), transport="socket"),
    messages.FetchWeights(output="o", producer="p", transport="gloo", members=("p", "w")),
    messages.GenerateStarts(
        work_item="b",
        label="rollout/3 work item 2",
        iteration=3,
        output="o",
        weights="w",
        weights_attempt=None,
        receiver="t",
        starts=(0, 5),
        partial=BEGUN,
    ),
    messages.ReassignWork(work_item="b"),
    messages.CancelWork(),
    messages.ShutDown(commit_timeout_s=3.0),
]
REPORTS = [
    messages.CollectedStarts(node="rollout/3", starts=(1, 2)),
    messages.WeightsAvailable(output="o", attempt="a", iteration=3),
    messages.WorkItemEnded(
        work_item="b",
        exit_code=1,
        reason="why",
        host="h",
        spans=(("generate", 0.0, 1.5),),
        unfinished_starts=(5,),
    ),
]


def travelled(message: WorkerMessage) -> dict[str, Any]:
    content: dict[str, Any] = msgpack.unpackb(msgpack.packb(message.to_dict()))
    return content


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.type)
def test_an_order_arrives_as_it_was_sent(order: messages.WorkerOrder) -> None:
    assert read_order(travelled(order)) == order


@pytest.mark.parametrize("expected", REPORTS, ids=lambda report: report.type)
def test_a_report_arrives_as_it_was_sent(expected: messages.WorkerReport) -> None:
    assert read_report(travelled(expected)) == expected


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"type": "shut_down"},
        {"type": "dance"},
        {"type": "collected_starts", "node": "n"},
        {"type": "collected_starts", "node": 5, "starts": [1]},
        {"type": "collected_starts", "node": "n", "starts": [1], "more": 1},
        {"type": "stage_ended", "node": "n", "exit_code": "x"},
    ],
)
def test_what_is_no_report_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no message of a driver or worker"):
        read_report(content)
