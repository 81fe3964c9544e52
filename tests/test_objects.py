"""The door to object stores: which store a URL means, and what its errors say."""

import pytest

from braidax.errors import ArgumentError
from braidax.objects import Opener, address, first_line, status_of


@pytest.mark.parametrize(
    ("url", "root", "path"),
    [
        ("s3://bucket/a/b c%20.bin", "s3://bucket", "a/b c%20.bin"),
        ("gs://bucket", "gs://bucket", ""),
        ("https://host:1/a%20b", "https://host:1", "a b"),
        ("https://host/a?signature=x", "https://host/a?signature=x", ""),
    ],
)
def test_a_url_is_a_store_and_a_path_in_it(url: str, root: str, path: str) -> None:
    assert address(url) == (root, path)


def test_errors_are_told_in_a_line_without_signatures() -> None:
    error = RuntimeError("HTTP status: 503 at https://host/a?signature=secret (twice)\nmore")
    assert status_of(error) == 503
    assert status_of(RuntimeError("no answer")) is None
    assert first_line(error) == "HTTP status: 503 at https://host/a (twice)"


def test_what_the_client_does_not_take_is_refused() -> None:
    opener = Opener({"nothing": 1}, retries=1, timeout_seconds=1.0, purpose="a test")
    with pytest.raises(ArgumentError, match=r"s3://bucket: obstore's S3Store cannot be made of client={'nothing': 1}"):
        opener.open("s3://bucket")
