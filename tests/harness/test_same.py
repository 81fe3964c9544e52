"""Programs are compared by what they compute, not by the names that values have."""

import re

import pytest

from benchmarks.sharded.compiled.same import difference

PROGRAM = """HloModule jit_run, num_partitions=2

%summed (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a.1, %b.1)
}

ENTRY %main (x.1: f32[4], y.1: f32[4]) -> f32[4] {
  %y.1 = f32[4]{0} parameter(1), metadata={op_name="y"}
  %x.1 = f32[4]{0} parameter(0), metadata={op_name="x"}
  %apart = f32[4]{0} subtract(%x.1, %y.1), metadata={op_name="jit(run)/sub" stack_frame_id=3}
  ROOT %all = f32[4]{0} all-reduce(%apart), channel_id=1, replica_groups={{0,1}}, to_apply=%summed
}
"""


def told(one: str, other: str) -> str:
    return difference({"text": one}, {"text": other})


def test_names_metadata_and_the_order_of_lines_do_not_count() -> None:
    renamed = re.sub(r"%(\w+)\.1\b", r"%\1.17", PROGRAM).replace("channel_id=1", "channel_id=5").replace('"x"', '"z"')
    lines = renamed.replace("%summed", "%region_2").splitlines()
    at = next(number for number, line in enumerate(lines) if "parameter(1), metadata" in line)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    assert told(PROGRAM, "\n".join(lines)) == ""


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("subtract(%x.1, %y.1)", "subtract(%y.1, %x.1)", "the same operations, otherwise connected"),
        ("subtract(%x.1, %y.1)", "multiply(%x.1, %y.1)", "+1 multiply, -1 subtract"),
        ("add(%a.1, %b.1)", "maximum(%a.1, %b.1)", "-1 add, +1 maximum"),
        ("replica_groups={{0,1}}", "replica_groups={{0},{1}}", "the same operations, otherwise connected"),
        ("%y.1 = f32[4]{0} parameter(1)", "%y.1 = f32[4]{0} parameter(2)", "the same operations, otherwise connected"),
    ],
)
def test_what_is_computed_otherwise_is_told(before: str, now: str, words: str) -> None:
    assert before in PROGRAM
    assert told(PROGRAM, PROGRAM.replace(before, now)) == words
