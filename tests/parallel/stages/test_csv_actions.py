"""Schedules from and to CSV, as torch prints them."""

import pytest

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules import Kind, format_csv, one_forward_one_backward, parse_csv, with_transfers
from tests.support.parallel.stages.pipelines import NAMED


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_is_written_is_read_again(name: str) -> None:
    schedule = NAMED[name](3, 6)
    assert parse_csv(format_csv(schedule), name=name, weights=schedule.weights).lists == schedule.lists
    ordered = with_transfers(schedule)
    read = parse_csv(format_csv(ordered), name=name, weights=schedule.weights)
    computed = [[x for x in operations if x.kind is not Kind.UPDATE] for operations in ordered.lists]
    assert [[x for x in operations if x.kind is not Kind.UPDATE] for operations in read.lists] == computed


def test_columns_are_steps_of_time() -> None:
    assert format_csv(one_forward_one_backward(3, 4)) == (
        "0F0,0F1,0F2,,,0B0,0F3,0B1,,0B2,,0B3\n,1F0,1F1,,1B0,1F2,1B1,1F3,1B2,,1B3\n,,2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
    )


def test_actions_of_others_are_read() -> None:
    schedule = parse_csv("0F0,0F1,,1F0,(1F1;1B0)OVERLAP_F_B,0B0,0W0,1B1,0I1,0W1\n")
    assert " ".join(map(str, schedule.lists[0])) == "0F0 0F1 1F0 1F1 1B0 0I0 0W0 1B1 0I1 0W1 0U0 1U0"
    assert (schedule.num_stages, schedule.num_microbatches, schedule.device_of_stage) == (2, 2, (0, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1Q0", "row 2, column 2: '1Q0' is no action; expected stage, one of F B I W U SEND_F RECV_F"),
        ("0F0,0UNSHARD", "row 1, column 2: '0UNSHARD' is no action"),
        ("0F0,0B0,0B0", "row 1, column 3: 0B0 is there twice, the first is in row 1, column 2"),
        ("0F0,0B0\n1F0,1B0,0F1", "row 2, column 3: 0F1 is in the wrong row, stage 0 is in row 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1", "1B0 is missing from device 1 (row 2)"),
        ("0F0,0I0", "0W0 is missing from device 0 (row 1)"),
        ("0F0,0B0\n2F0,2B0", "no row has an action of stage 1, though there is a stage 2"),
        ("0F0,0B0\n,", "row 2 has no action: device 1 would have no stage"),
        ("\n", "the CSV has no action; expected a row a device, with cells such as 0F0, 1B2, 1W2"),
        ("0F0,0F1,0F2,0B0,0B1,0U0,0B2,0U1", "the CSV has 2 updates a stage, which do not divide 3 microbatches"),
        (
            "0F0,0B0\n1B0,1F0",
            "schedule 'CSV' waits for itself: 1B0 waits for 1F0 waits for 1B0 (1B0 in row 2, column 1; 1F0 in ",
        ),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
            "schedule 'CSV' has transfers that never meet: device 0 waits in 0SEND_F1 for 1RECV_F1 of device 1",
        ),
    ],
)
def test_a_fault_is_named_with_its_cell(text: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_csv(text)
    assert str(caught.value).startswith(message)
