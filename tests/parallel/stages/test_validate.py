"""What is wrong with a schedule is said exactly."""

from dataclasses import replace
from typing import Any

import pytest

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules import (
    Costs,
    Kind,
    Operation,
    Schedule,
    gpipe,
    one_forward_one_backward,
    pipedream,
    simulate,
    straight,
    transfers_of_pairs,
    validate,
    with_transfers,
    zero_bubble_h1,
)
from braidax.parallel.stages.schedules.dependencies import Dependencies


def schedule_of(*lists: str, **options: Any) -> Schedule:
    """Returns a schedule of one stage a device, from operations as they are printed."""
    read: list[tuple[Operation, ...]] = []
    for text in lists:
        operations: list[Operation] = []
        for word in text.split():
            kind = word.strip("0123456789")
            stage, microbatch = word.split(kind)
            operations.append(Operation(Kind(kind), int(stage), int(microbatch)))
        read.append(tuple(operations))
    count = 1 + max(x.microbatch for operations in read for x in operations if x.kind is Kind.FORWARD)
    return Schedule("test", count, straight(len(lists)), tuple(read), **options)


@pytest.mark.parametrize("schedule", [one_forward_one_backward(4, 8), zero_bubble_h1(2, 6), gpipe(3, 4)])
def test_what_is_made_is_sent_at_once(schedule: Schedule) -> None:
    """Behind what makes it stand other transfers at most."""
    made, needs = with_transfers(schedule, Costs.even(schedule.num_stages)), Dependencies(schedule)
    for operations in made.lists:
        last = operations[0]
        for operation in operations:
            if operation.kind in (Kind.SEND_F, Kind.SEND_B):
                assert needs.of(operation)[0] == last
            last = last if operation.is_transfer else operation


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (("0F0 0B0 0U0", "1F0 1U0"), "1B0 is missing from device 1"),
        (("0F0 0I0 0U0",), "0W0 is missing from device 0"),
        (("0F0 0B0",), "0U0 is missing from device 0"),
        (("0F0 0B0 0W0 0U0",), "0W0 of device 0 is too much: 0B0 is a whole backward"),
        (("0F0 0B0 0I0 0U0",), "0B0 and 0I0 of device 0 are the same backward, once is enough"),
        (("0F0 0F0 0B0 0U0",), "0F0 at place 1 of device 0 is there twice: the first is at place 0"),
        (("0F0 1F0", "1B0"), "1F0 at place 1 of device 0 is on the wrong device: stage 1 lies on device 1"),
        (("0F0 2B0",), "2B0 at place 1 of device 0 is of no stage: there are 1"),
        (("0F0 0B7",), "0B7 at place 1 of device 0 is of no microbatch: there are 1"),
        (("0F0 0B0 0U1",), "0U1 at place 2 of device 0 is of no update: there are 1"),
        (("0B0 0F0 0U0",), "schedule 'test' waits for itself: 0B0 waits for 0F0 waits for 0B0"),
        (
            ("0F0 0U0 0B0",),
            "0U0 of device 0 stands behind 0 updates and 0 of its 1 gradients, expected 0 and all of them",
        ),
        (("0F0 0SEND_F0 0B0 0U0", "1F0 1B0 1U0"), "1RECV_F0 is missing from device 1"),
        (("0F0 0SEND_B0 0SEND_F0 0RECV_B0 0B0 0U0", "1RECV_F0 1F0 1B0 1SEND_B0 1U0"), "0SEND_B0 has no other device"),
    ],
)
def test_a_fault_is_named(lists: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        validate(schedule_of(*lists))
    assert str(caught.value).startswith(message)


def test_the_natural_order_of_transfers_never_meets() -> None:
    lists = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0",
    )
    with pytest.raises(ArgumentError) as caught:
        validate(schedule_of(*lists))
    assert str(caught.value) == (
        "schedule 'test' has transfers that never meet: device 0 waits in 0SEND_F1 for 1RECV_F1 of device 1, "
        "device 1 waits in 1SEND_B0 for 0RECV_B0 of device 0; with_transfers orders them so that they do"
    )
    ordered = with_transfers(schedule_of(*lists))
    validate(ordered)
    assert [str(send) for send in transfers_of_pairs(ordered)[0, 1]] == ["0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_B1"]


def test_both_devices_enqueue_transfers_in_one_order() -> None:
    schedule = with_transfers(zero_bubble_h1(4, 8))
    pairs = transfers_of_pairs(schedule)
    assert list(pairs) == [(0, 1), (1, 2), (2, 3)]
    for (low, high), sends in pairs.items():
        for device, other in ((low, high), (high, low)):
            own = [x for x in schedule.lists[device] if x.is_transfer]
            with_other = [x for x in own if schedule.device_of_stage[x.partner.stage] == other]
            assert with_other == [send if send in own else send.partner for send in sends]


def test_memory_is_checked_against_its_limit() -> None:
    validate(one_forward_one_backward(2, 4), limit_bytes=2)
    validate(gpipe(2, 4), activation_bytes=(3, 5), limit_bytes=20)
    with pytest.raises(
        ArgumentError, match=r"^1F3 at place 3 of device 1 makes 20 bytes of activations live, limit_by"
    ):
        validate(gpipe(2, 4), activation_bytes=(3, 5), limit_bytes=19)
    sizes: Any = {"activation_bytes": (5, 5), "kept_bytes": (7, 7)}
    validate(zero_bubble_h1(2, 4), **sizes, limit_bytes=14)
    with pytest.raises(ArgumentError, match=r"^1I1 at place 3 of device 1 makes 14 bytes of activations live, "):
        validate(zero_bubble_h1(2, 4), **sizes, limit_bytes=13)


def test_versions_that_are_not_there_are_named() -> None:
    late = replace(pipedream(2, 4), microbatches_per_update=1, weights="vertical")
    lists = (late.lists[0], tuple(x for x in late.lists[1] if x.kind is not Kind.UPDATE))
    updates = tuple(Operation(Kind.UPDATE, 1, number) for number in range(4))
    with pytest.raises(
        ArgumentError, match=r"^1F2 needs version 1 of the weights of stage 1, and only 0 updates stand"
    ):
        validate(late.with_lists((lists[0], lists[1] + updates)))
    eager = replace(pipedream(4, 4), weights="double")
    with pytest.raises(
        ArgumentError, match=r"^0F2 needs version 1 of the weights of stage 0, and only 0 updates stand"
    ):
        validate(eager)


def test_a_schedule_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^num_microbatches=0 must be at least 1$"):
        Schedule("test", 0, (0,), ((),))
    with pytest.raises(ArgumentError, match=r"^device_of_stage=\(0, 2\) must name each of the 2 devices with lists$"):
        Schedule("test", 1, (0, 2), ((), ()))
    with pytest.raises(ArgumentError, match=r"^schedule 'test' stands still: device 0 in 0B0; validate says what is"):
        simulate(schedule_of("0B0 0F0 0U0"), Costs.even(1))
    with pytest.raises(ArgumentError, match=r"^costs are of 3 stages, schedule 'GPipe' has num_stages=2$"):
        simulate(gpipe(2, 2), Costs.even(3))
    with pytest.raises(
        ArgumentError, match=r"^transfer_seconds has 2 values, expected 1 for the 2 stages of forward_s"
    ):
        Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1, 1))
    with pytest.raises(ArgumentError, match=r"^weight_seconds=\(1.0, -1.0\) has a negative value$"):
        Costs((1.0, 1.0), (1.0, 1.0), (1.0, -1.0), (0.0,), (1, 1))
