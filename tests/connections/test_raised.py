"""What others are told of an error: whole, or as much of it as there is room for; and of no such text at all."""

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.connections.raised import Raised
from braidax.errors import CallFailed


class Stubborn(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as found:
        return found


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("the value"), "ValueError: the value"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Stubborn(), "Stubborn (its message cannot be shown)"),
        (ValueError('é\ud800\n"'), 'ValueError: é\ud800\n"'),
    ],
)
def test_an_error_arrives_with_its_words_its_host_and_its_traceback(error: BaseException, words: str) -> None:
    found = Raised.from_text(Raised.of(raised(error)).to_text().encode("ascii").decode())
    assert (found.words, found.host) == (words, socket.gethostname())
    assert found.traceback.startswith("Traceback (most recent call last):")
    assert "raise error" in found.traceback
    told = found.error(f"process 3 failed: {found.words}", 3)
    assert isinstance(told, CallFailed)
    assert (str(told), told.rank, told.host, told.traceback) == (f"process 3 failed: {words}", 3, *_rest(found))


def _rest(found: Raised) -> tuple[str, str]:
    return found.host, found.traceback


def test_other_words_may_be_said() -> None:
    assert Raised.of(ValueError("x"), words="the disk is full").words == "the disk is full"


@given(st.text(max_size=300), st.text(max_size=300), st.integers(150, 1500))
def test_it_is_cut_to_the_room_that_there_is(words: str, told: str, max_characters: int) -> None:
    text = Raised(words, "host", told).to_text(max_characters=max_characters)
    assert len(text) <= max_characters
    found = Raised.from_text(text)
    if len(Raised(words, "host", told).to_text()) <= max_characters:
        assert found == Raised(words, "host", told)
    assert found.host == "host"
    assert told.endswith(found.traceback.removeprefix("…"))
    assert found.words == words or (not found.traceback and words.startswith(found.words.removesuffix("…")))


def test_the_end_of_a_traceback_is_kept() -> None:
    whole = Raised("ValueError: x", "host", "".join(f"line {number}\n" for number in range(1000)))
    found = Raised.from_text(whole.to_text(max_characters=500))
    assert found.words == "ValueError: x"
    assert found.traceback.endswith("line 998\nline 999\n")
    assert len(found.traceback) > 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "3",
        "[]",
        "{}",
        json.dumps({"words": "x", "host": "h"}),
        json.dumps({"words": 3, "host": "h", "traceback": ""}),
        Raised("x", "h", "t" * 100).to_text()[:60],
    ],
)
def test_what_is_no_such_text_is_taken_for_words(text: str) -> None:
    assert Raised.from_text(text) == Raised(text)
