import pytest

from braidax.data.fetching.batch import Confirmation
from braidax.errors import CallFailed, WaitTimeout


def test_processes_that_do_not_answer_are_not_reported_as_a_read_that_hangs() -> None:
    with pytest.raises(WaitTimeout, match=r"its part of batch 3, but did not hear within 0.01 s that the others"):
        Confirmation().wait(timeout_seconds=0.01, what="batch 3")


def test_what_another_process_raised_is_raised() -> None:
    confirmation = Confirmation()
    confirmation.future.set_exception(CallFailed("process 1 failed", 1))
    with pytest.raises(CallFailed, match="process 1 failed"):
        confirmation.wait(timeout_seconds=10, what="batch 3")


def test_a_time_out_of_a_process_is_its_own() -> None:
    confirmation = Confirmation()
    confirmation.future.set_exception(TimeoutError("mount"))
    with pytest.raises(TimeoutError, match="mount"):
        confirmation.wait(timeout_seconds=10, what="batch 3")
