"""`AdapterGate`: never too many adapters at once, first come first served, nobody forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minedraft.backends.vllm.adapters import NO_ADAPTER, AdapterGate


def test_a_third_adapter_waits_for_one_of_two() -> None:
    gate = AdapterGate(2)
    assert gate.arrive("a1", 1)
    assert gate.arrive("a2", 1)
    assert gate.arrive("b1", 2)
    assert not gate.arrive("c1", 3)
    assert gate.leave("a1") == []  # a2 still uses it
    assert gate.leave("a2") == ["c1"]
    assert gate.num_held == 0


def test_later_ones_queue_behind_one_that_is_held() -> None:
    """Also those whose adapter is in use: else a stream of them would starve it."""
    gate = AdapterGate(1)
    assert gate.arrive("a1", 1)
    assert not gate.arrive("b1", 2)
    assert not gate.arrive("a2", 1)
    assert gate.arrive("plain", NO_ADAPTER)
    assert gate.leave("a1") == ["b1"]
    assert gate.leave("b1") == ["a2"]


def test_a_held_request_may_leave() -> None:
    """It takes no adapter with it, and those that queued behind it only may go on."""
    gate = AdapterGate(1)
    assert gate.arrive("a1", 1)
    assert not gate.arrive("b1", 2)
    assert not gate.arrive("a2", 1)
    assert gate.leave("b1") == ["a2"]
    assert gate.leave("a1") == []
    assert not gate.arrive("b2", 2)
    assert gate.leave("a2") == ["b2"]


def test_strangers_change_nothing() -> None:
    gate = AdapterGate(1)
    assert gate.arrive("a1", 1)
    assert gate.leave("nobody") == []
    assert not gate.arrive("b1", 2)
    assert gate.leave("a1") == ["b1"]
    assert gate.leave("a1") == []


@given(
    max_adapters=st.integers(1, 3),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 20)), max_size=80),
)
def test_any_order(max_adapters: int, moves: list[tuple[bool, int, int]]) -> None:
    """Every request goes on exactly once unless it left before; adapters in use are bounded; the order is kept."""
    gate = AdapterGate(max_adapters)
    adapters: dict[str, int] = {}
    here: list[str] = []
    on: list[str] = []

    def check() -> None:
        in_use = {adapters[request_id] for request_id in on if request_id in here} - {NO_ADAPTER}
        assert len(in_use) <= max_adapters
        held = [request_id for request_id in here if request_id not in on]
        assert gate.num_held == len(held)
        assert not held or in_use, "somebody is held back for nothing"
        with_adapter = [request_id for request_id in on if adapters[request_id]]
        assert with_adapter == sorted(with_adapter, key=lambda request_id: int(request_id))

    for number, (arrives, adapter, index) in enumerate(moves):
        if arrives or not here:
            request_id = str(number)
            adapters[request_id] = adapter
            here.append(request_id)
            if gate.arrive(request_id, adapter):
                on.append(request_id)
        else:
            on += gate.leave(here.pop(index % len(here)))
        check()
    while here:
        leaver = next(request_id for request_id in here if request_id in on)
        here.remove(leaver)
        on += gate.leave(leaver)
        check()
    assert gate.num_held == 0
