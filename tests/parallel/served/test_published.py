"""Published files that are damaged, torn, missing, or of another chain: errors that name the file and the remedy."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

import braidax.parallel as bx
from braidax.errors import FormatError
from braidax.parallel.served.files import published
from braidax.parallel.served.files.form import Header, PublishedRows

BASE, FIRST, SECOND = "tables-00000000.base", "tables-00000001.delta", "tables-00000002.delta"
WORDS = PublishedRows("words", "float32", (6, 3), 6, "")
HALVES = PublishedRows("halves", "bfloat16", (4, 2, 2), 4, "")
NONE = PublishedRows("none", "int8", (0, 3), 0, "")


def content_of(rows: PublishedRows, seed: int, ids: Any = None) -> bytes:
    count = rows.num_rows if ids is None else len(ids)
    values = np.random.default_rng(seed).normal(size=(count, *rows.shape[1:])).astype(jnp.dtype(rows.dtype))
    return values.tobytes() + (b"" if ids is None else np.asarray(ids, rows.ids).tobytes())


def write(folder: Path, header: Header, content: bytes) -> str:
    """Writes a file as it should be. **Returns:** its checksum."""
    header = replace(header, checksum=xxhash.xxh3_128_hexdigest(content))
    (folder / header.file_name).write_bytes(header.to_bytes() + content)
    return header.checksum_in(0)


def delta(number: int, previous: str, *ids: list[int], run: str = "this") -> tuple[Header, bytes]:
    """Returns a file with some rows of each table."""
    pairs = zip((WORDS, HALVES, NONE), ids, strict=True)
    tables = [replace(rows, num_rows=len(some), ids="uint32") for rows, some in pairs]
    content = b"".join(content_of(rows, number, some) for rows, some in zip(tables, ids, strict=True))
    return Header(number, run, number, previous, "", tuple(tables)), content


def whole_file(number: int = 0, run: str = "this") -> tuple[Header, bytes]:
    """Returns a file with all rows."""
    tables = (WORDS, HALVES, NONE)
    return Header(number, run, number, "", "", tables), b"".join(content_of(rows, number) for rows in tables)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base and two deltas."""
    made = tmp_path / "published"
    made.mkdir()
    first = write(made, *delta(1, write(made, *whole_file()), [5, 0], [3], []))
    write(made, *delta(2, first, [0, 4], [], []))
    return made


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Writes a file with another header, which has its checksum."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[8:16], "little")
    told = json.loads(whole[32 : 32 + length])
    change(told)
    text = json.dumps(told).encode()
    path.write_bytes(
        whole[:8] + len(text).to_bytes(8, "little") + xxhash.xxh3_128_digest(text) + text + whole[32 + length :]
    )


def nested(path: Path) -> None:
    """Writes a header that no parser likes, with its checksum."""
    text = b"[" * 200_000
    path.write_bytes(b"braidaxT" + len(text).to_bytes(8, "little") + xxhash.xxh3_128_digest(text) + text)


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_tables_of_every_form_are_read_and_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_BLOCK_BYTES", 7)  # so that rows come one by one
    names = [path.name for path in sorted(folder.iterdir())]
    later = folder.parent / "later"
    later.mkdir()
    followers = list[bx.Published]()
    for name in names:
        shutil.copy(folder / name, later / name)
        followers.append(bx.Published(later))
        for one in followers:
            one.refresh()
            np.testing.assert_equal(one.tables, bx.read_published(later))
    words, halves, none = (bx.read_published(folder)[name] for name in ("words", "halves", "none"))
    moved = np.random.default_rng(2).normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(words[[0, 4]], moved)
    assert (halves.shape, halves.dtype, none.shape) == ((4, 2, 2), jnp.bfloat16, (0, 3))
    (folder / "notes.txt").write_text("of a reader")  # who publishes refuses it; who reads does not look at it
    np.testing.assert_array_equal(bx.read_published(folder)["words"], words)


def test_the_newest_file_of_all_rows_is_enough(folder: Path) -> None:
    follower = bx.Published(folder)
    write(folder, *whole_file(3, run="other"))
    for number in range(3):
        next(folder.glob(f"tables-0000000{number}.*")).unlink()
    assert (follower.refresh(), follower.version, follower.step) == (1, 3, 3)
    np.testing.assert_equal(follower.tables, bx.read_published(folder))


Damage = Callable[[Path], Any]
DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "torn rows": (FIRST, lambda path: path.write_bytes(path.read_bytes()[:-1]), "and its header tells of"),
    "too long": (FIRST, lambda path: path.write_bytes(path.read_bytes() + b"0"), "and its header tells of"),
    "torn header": (FIRST, lambda path: path.write_bytes(path.read_bytes()[:100]), "has 100 bytes and ends within its"),
    "torn start": (BASE, lambda path: path.write_bytes(path.read_bytes()[:9]), "has 9 bytes and ends within"),
    "empty": (SECOND, lambda path: path.write_bytes(b""), "has 0 bytes and ends within its header"),
    "a bit of the header": (SECOND, lambda path: flipped(path, 60), "its header does not have its checksum"),
    "a bit of the length": (SECOND, lambda path: flipped(path, 15), "ends within its header"),
    "a bit of the rows": (FIRST, lambda path: flipped(path, -3), "its rows have the checksum"),
    "another file": (BASE, lambda path: path.write_bytes(b"PK" + bytes(500)), "it does not begin as one"),
    "a later form": (BASE, lambda path: rewritten(path, lambda told: told.update(form=2)), "braidax reads form 1"),
    "no number": (BASE, lambda path: rewritten(path, lambda told: told.update(step=-1)), "the number -1"),
    "a number that is none": (BASE, lambda path: rewritten(path, lambda told: told.update(step=True)), "number True"),
    "no run": (BASE, lambda path: rewritten(path, lambda told: told.pop("run")), "its header is none: 'run'"),
    "a list": (BASE, lambda path: rewritten(path, lambda told: told.update(tables=[1])), "its header is none"),
    "lists without end": (BASE, lambda path: nested(path), "its header is none"),
    "no tables": (BASE, lambda path: rewritten(path, lambda told: told.update(tables=[])), "its header is none"),
    "a table twice": (
        BASE, lambda path: rewritten(path, lambda told: told["tables"].append(told["tables"][0])), "header is none",
    ),
    "objects": (
        BASE, lambda path: rewritten(path, lambda told: told["tables"][0].update(dtype="object")), "header is none",
    ),
    "an unknown dtype": (
        BASE, lambda path: rewritten(path, lambda told: told["tables"][0].update(dtype="words")), "header is none",
    ),
    "more rows than there are": (
        BASE, lambda path: rewritten(path, lambda told: told["tables"][0].update(shape=[1 << 40, 3])), "6 rows of",
    ),
    "rows of no size": (
        BASE, lambda path: rewritten(path, lambda told: told["tables"][0].update(shape=[6, 1 << 61, 1 << 61])),
        "6 rows of",
    ),
    "ids of another kind": (
        FIRST, lambda path: rewritten(path, lambda told: told["tables"][0].update(ids="float32")), "header is none",
    ),
    "other tables": (
        FIRST, lambda path: rewritten(path, lambda told: told["tables"][0].update(name="birds")), "the tables birds",
    ),
    "a dim of none beside one that is too large": (
        BASE, lambda path: rewritten(path, lambda told: told["tables"][2].update(shape=[0, 1 << 62, 4])), "0 rows of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(folder: Path, case: str) -> None:
    """Who follows has the tables as of the file before."""
    name, damage, words = DAMAGED[case]
    whole = folder.parent / "whole"
    shutil.copytree(folder, whole)
    damage(folder / name)
    message = rf"{name}: .*{re.escape(words)}.*expected a file as ServedStep.publish.*copy it once more.*or remove this"
    with pytest.raises(FormatError, match=message):
        bx.read_published(folder)
    if name == BASE:
        return
    before = [path for path in sorted(whole.iterdir()) if path.name < name]
    later = folder.parent / "later"
    later.mkdir()
    shutil.copy(before[0], later)
    follower = bx.Published(later)
    for path in sorted(folder.iterdir())[1:]:
        shutil.copy(path, later)
    with pytest.raises(FormatError, match=message):
        follower.refresh()
    assert follower.version == len(before) - 1
    for path in whole.iterdir():
        shutil.copy(path, later)
    assert follower.refresh() == 3 - len(before)
    np.testing.assert_equal(follower.tables, bx.read_published(whole))


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"folder=.*none' cannot be listed: .*expected the folder of step.publish"):
        bx.read_published(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"folder=.*empty' has no published tables: expected a file such as"):
        bx.Published(tmp_path / "empty")
    follower = bx.Published(folder)
    (folder / FIRST).rename(tmp_path / FIRST)
    with pytest.raises(FormatError, match=rf"{FIRST} is missing, and {SECOND} is there: expected the last base"):
        bx.read_published(folder)
    assert follower.refresh() == 0  # it has it
    (tmp_path / FIRST).rename(folder / FIRST)
    (folder / BASE).unlink()
    with pytest.raises(FormatError, match=rf"{BASE} is missing, and {SECOND} is there"):
        bx.read_published(folder)
    (folder / BASE).symlink_to(folder / FIRST)  # which is no file of ours
    with pytest.raises(FormatError, match=rf"{BASE} is missing"):
        bx.read_published(folder)


def test_files_of_another_chain_are_refused(folder: Path) -> None:
    follower = bx.Published(folder)
    write(folder, *delta(3, "0" * 32, [1], [], []))
    for read in (follower.refresh, lambda: bx.read_published(folder)):
        with pytest.raises(FormatError, match=r"tables-00000003.delta: it follows a file with the checksum 0+ of the"):
            read()
    write(folder, *delta(3, follower._identity, [1], [], [], run="other"))
    with pytest.raises(FormatError, match=r"of the run other, and the one before it has .* of this: they do not"):
        follower.refresh()
    (folder / "tables-00000003.delta").rename(folder / "tables-00000004.delta")
    with pytest.raises(FormatError, match=r"tables-00000003.delta is missing"):
        follower.refresh()
    (folder / "tables-00000004.delta").rename(folder / "tables-00000003.base")
    with pytest.raises(FormatError, match=r"3.base: it was published as tables-00000003.delta: it was renamed"):
        follower.refresh()
    shutil.copy(folder / FIRST, folder / "tables-00000001.base")
    with pytest.raises(FormatError, match=r"tables-00000001.delta: tables-00000001.base has the same number"):
        follower.refresh()


def test_a_folder_that_was_begun_anew_is_told_of(folder: Path) -> None:
    follower = bx.Published(folder)
    write(folder, *delta(2, "0" * 32, [1], [], []))
    with pytest.raises(FormatError, match=r"was begun anew since file 2 was read.*read it by another Published"):
        follower.refresh()
    (folder / SECOND).unlink()
    with pytest.raises(FormatError, match="was begun anew since file 2 was read"):
        follower.refresh()
    np.testing.assert_equal([*follower.tables], ["words", "halves", "none"])


def test_ids_that_no_row_has_are_refused(folder: Path) -> None:
    follower = bx.Published(folder)
    write(folder, *delta(3, follower._identity, [6], [], []))
    before = {name: table.copy() for name, table in follower.tables.items()}
    with pytest.raises(FormatError, match=r"tables-00000003.delta: it has row 6 of words, which has 6"):
        follower.refresh()
    np.testing.assert_equal(follower.tables, before)


def test_a_header_says_what_it_was_given() -> None:
    header, _ = delta(7, "ab", [1], [2], [])
    text = header.to_bytes(1000)
    assert len(text) == 1000
    assert json.loads(text[32:]) == {"form": 1, **json.loads(json.dumps(asdict(header)))}
    assert (header.file_name, whole_file()[0].file_name) == ("tables-00000007.delta", BASE)


GROWING = PublishedRows("users", "float32", (1000, 3), 4, "uint32", "there")


def growing(folder: Path, number: int, previous: str, ids: list[int], gone: list[int], **told: Any) -> str:
    """Writes a file of a table that grows. **Returns:** its checksum."""
    seen = "there" if number == 0 else "changed"
    rows = replace(GROWING, num_rows=len(ids), num_gone=len(gone), seen=seen, **told)
    content = content_of(rows, number, ids) + np.asarray(gone, rows.ids).tobytes()
    return write(folder, Header(number, "this", number, previous, "", (rows,)), content)


def test_tables_that_grow_are_read_and_followed(tmp_path: Path) -> None:
    first = growing(tmp_path, 0, "", [900, 3, 7], [])
    follower = bx.Published(tmp_path)
    assert follower.seen["users"].ids.tolist() == [3, 7, 900]
    before = follower.seen["users"].rows.copy()
    growing(tmp_path, 1, first, [8, 3], [900])
    assert follower.refresh() == 1
    assert follower.seen["users"].ids.tolist() == [3, 7, 8]
    new = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(follower.seen["users"].rows, np.stack([new[1], before[1], new[0]]))


@pytest.mark.parametrize(
    ("ids", "gone", "told"),
    [
        ([8, 8], [], "it has rows of users twice"),
        ([8], [8], "it has rows of users twice"),
        ([8], [4], "some are gone that were not there"),
        ([1000], [], "it has row 1000 of users, which has 1000"),
        ([], [1001], "it has row 1001 of users, which has 1000"),
    ],
)
def test_what_a_table_that_grows_cannot_have_is_refused(
    tmp_path: Path, ids: list[int], gone: list[int], told: str
) -> None:
    """And changes nothing."""
    first = growing(tmp_path, 0, "", [900, 3, 7], [])
    follower = bx.Published(tmp_path)
    growing(tmp_path, 1, first, ids, gone)
    with pytest.raises(FormatError, match=told):
        follower.refresh()
    assert follower.seen["users"].ids.tolist() == [3, 7, 900]


@pytest.mark.parametrize("told", [{"ids": ""}, {"seen": "some"}, {"seen": "there", "num_gone": 1}, {"num_gone": 1001}])
def test_headers_that_tell_no_table_that_grows(tmp_path: Path, told: dict[str, Any]) -> None:
    rows = replace(GROWING, **{"seen": "changed", "num_rows": 0, **told})
    header = Header(0, "this", 0, "", "", (rows,))
    (tmp_path / BASE).write_bytes(header.to_bytes() + bytes(4 * rows.num_gone if rows.ids else 0))
    with pytest.raises(FormatError, match="its header is none"):
        bx.Published(tmp_path).refresh()
