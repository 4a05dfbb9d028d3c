"""The waiting room's order, its laziness about aborts, and that it doesn't hoard the dead."""

from __future__ import annotations

from minedraft import Request
from minedraft.request import SequenceStatus
from minedraft.sequence import SequenceState
from minedraft.waiting import WaitingQueue


def sequence(index: int, status: SequenceStatus = SequenceStatus.WAITING) -> SequenceState:
    seq = SequenceState(Request(f"r{index}", 4, 4), index, 8, 8, 4)
    seq.status = status
    return seq


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (seq := queue.head()) is not None:
        queue.pop()
        order.append(seq.arrival_index)
    return order


def test_i15_rank_then_preempted_then_arrival() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0), (1.0,))
    queue.push(sequence(1), (0.0,))
    queue.push(sequence(2), (0.0,))
    queue.push(sequence(3, SequenceStatus.PREEMPTED), (0.0,))
    queue.push(sequence(4, SequenceStatus.PREEMPTED), (1.0,))
    assert queue.num_live == 5
    assert drain(queue) == [3, 1, 2, 4, 0]
    assert queue.num_live == 0


def test_the_dead_are_passed_over_and_swept_out() -> None:
    queue = WaitingQueue()
    everybody = [sequence(i) for i in range(200)]
    for seq in everybody:
        queue.push(seq, (0.0,))
    for seq in everybody[:190]:
        seq.status = SequenceStatus.FINISHED
        queue.note_dead()
    assert queue.num_live == 10
    assert len(queue._heap) < 60
    assert [seq.arrival_index for seq in sorted(queue.live(), key=lambda seq: seq.arrival_index)] == list(
        range(190, 200)
    )
    assert drain(queue) == list(range(190, 200))
