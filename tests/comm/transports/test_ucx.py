"""UCX: exact messages between processes, sleep, dead peers, and what is said when something is missing."""

import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from braidax.comm.transports import ucx
from braidax.comm.transports.transport import Operation
from braidax.comm.transports.ucx import UcxTransport
from braidax.connections.world import World
from braidax.errors import ArgumentError, CommError, HandshakeError, MissingExtra, WaitTimeout
from tests.support.comm.ranks import by_day, in_turns
from tests.support.comm.transports.ucx_ranks import LIMIT_SECONDS, WAYS, Rank, Ranks
from tests.support.readable import is_readable
from tests.support.tree import ROOT

MIB = 1 << 20
BINDING = "braidax.comm.transports.ucx_binding"


def content(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng([num_bytes, seed]).bytes(num_bytes)


def digest(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data).hexdigest()


SIZES = (0, 1, 8, 4096, MIB, 64 * MIB)


def parts(data: bytes) -> list[bytes]:
    """Returns a message in scattered buffers, empty ones among them."""
    cuts = sorted({0, len(data) // 7, len(data) // 2, len(data)})
    return [b"", *(data[begin:end] for begin, end in itertools.pairwise(cuts)), b""]


def exchange(rank: Rank) -> list[tuple[int, str]]:
    peer, found = 1 - rank.rank, []
    for num_bytes in SIZES:
        data = content(num_bytes, rank.rank)
        for buffers in ([data], parts(data)):
            place = bytearray(num_bytes + 3)
            received = rank.receive(peer, 7, place)
            sent = rank.send(peer, 7, *buffers)
            assert rank.wait(sent, received)
            assert sent.error is None
            assert received.error is None
            assert place[received.num_bytes :] == bytes(3)
            found.append((received.num_bytes, digest(place[: received.num_bytes])))
    return found


@pytest.mark.parametrize("way", by_day(["default", "tcp"], "tcp"))
def test_messages_of_any_size_arrive_exactly(way: str, together: Callable[..., Ranks]) -> None:
    results = together(exchange, exchange, environment=WAYS[way]).results()
    for rank, result in enumerate(results):
        expected = [(size, digest(content(size, 1 - rank))) for size in SIZES]
        assert result == [each for each in expected for _ in range(2)]


def see_ways(rank: Rank) -> list[str]:
    found = rank.transport.transports(1 - rank.rank)
    place = bytearray(8)  # nobody goes before the other has seen
    assert rank.wait(rank.receive(1 - rank.rank, 1, place), rank.send(1 - rank.rank, 1, b"has seen"))
    return found


def test_the_user_chooses_the_ways(together: Callable[..., Ranks]) -> None:
    chosen = {name: together(see_ways, see_ways, environment=WAYS[name]).results() for name in ("tcp", "copies")}
    assert all(way.startswith("tcp/") for ways in chosen["tcp"] for way in ways)
    assert chosen["copies"] == [["posix/memory"]] * 2


def send_in_order(rank: Rank) -> None:
    sent = [rank.send(1, number % 2, content(size, number)) for number, size in enumerate(ORDERED)]
    sent.append(rank.send(1, 5, b"all are on the way"))
    assert rank.wait(*sent)


def receive_late(rank: Rank) -> list[str]:
    own = bytearray(3 * MIB)
    to_itself = [rank.receive(1, 9, own), rank.send(1, 9, content(3 * MIB, 9))]
    assert rank.wait(rank.receive(0, 5, bytearray(32)))  # now those of the other tags wait, unexpected
    places = {number: bytearray(size) for number, size in enumerate(ORDERED)}
    later = [number for number in places if number % 2], [number for number in places if not number % 2]
    received = [rank.receive(0, number % 2, places[number]) for numbers in later for number in numbers]
    assert rank.wait(*received, *to_itself)
    return [*map(digest, places.values()), digest(own)]


ORDERED = (100, 5000, 0, 90_000, 4 * MIB, 1, 2 * MIB, 200, 9000, 8)


@pytest.mark.parametrize("way", by_day(WAYS, "copies"))
def test_unexpected_messages_keep_their_order_in_each_tag(way: str, together: Callable[..., Ranks]) -> None:
    expected = [digest(content(size, number)) for number, size in enumerate(ORDERED)]
    results = together(send_in_order, receive_late, environment=WAYS[way]).results()
    assert results[1] == [*expected, digest(content(3 * MIB, 9))]


def send_too_much(rank: Rank) -> None:
    sent = [rank.send(1, 3, content(size, size)) for size in (*TOO_LONG, 77)]
    rank.wait(*sent, rank.send(1, 5, b"all are on the way"))


def receive_too_little(rank: Rank) -> tuple[list[str], int, str]:
    assert rank.wait(rank.receive(0, 5, bytearray(32)))
    received = [rank.receive(0, 3, bytearray(8)) for _ in TOO_LONG]
    place = bytearray(100)
    intact = rank.receive(0, 3, place)
    assert rank.wait(*received, intact)
    return (
        [f"{type(operation.error).__name__}: {operation.error}" for operation in received],
        intact.num_bytes,
        digest(place[:77]),
    )


TOO_LONG = (9, 5000, 90_000, 3 * MIB)


@pytest.mark.parametrize("way", by_day(WAYS, "default"))
def test_a_message_that_is_too_long_fails_alone(way: str, together: Callable[..., Ranks]) -> None:
    errors, num_bytes, intact = together(send_too_much, receive_too_little, environment=WAYS[way]).results()[1]
    for error, size in zip(errors, TOO_LONG, strict=True):
        assert error.startswith(f"CommError: rank 0 (host host-0) sent {size:,} bytes where at most 8 were expected; ")
    assert (num_bytes, intact) == (77, digest(content(77, 77)))


# Sleep


def sleep_until_woken(rank: Rank) -> tuple[bool, float, bool, int]:
    place = bytearray(8)
    received = rank.receive(1, 1, place)
    begin, used, until = time.monotonic(), time.process_time(), time.monotonic() + LIMIT_SECONDS / 2
    early = True
    while early and time.monotonic() < until:  # at first it may have something to say of connecting
        rank.transport.poll(0)
        while not rank.transport.arm():
            rank.transport.poll(0)
        early = is_readable(rank.transport, 0.5)
    share = (time.process_time() - used) / (time.monotonic() - begin)
    while not rank.transport.arm():
        rank.transport.poll(0)
    rank.pipe.send(("asleep", None))
    woken = is_readable(rank.transport, LIMIT_SECONDS)
    rank.wait(received)
    return early, share, woken, received.num_bytes


def send_when_told(rank: Rank) -> None:
    rank.ask()
    rank.wait(rank.send(0, 1, b"good day"))


@pytest.mark.parametrize("way", by_day(WAYS, "tcp"))
def test_a_rank_sleeps_without_work_and_wakes_for_a_message(way: str, together: Callable[..., Ranks]) -> None:
    ranks = together(sleep_until_woken, send_when_told, environment=WAYS[way])
    ranks.hear(0)
    ranks.tell(1)
    early, share, woken, num_bytes = ranks.results()[0]
    assert (early, woken, num_bytes) == (False, True, 8)
    assert share < 0.2


# A peer that dies


def send_much(rank: Rank) -> None:
    rank.send(0, 1, content(64 * MIB, 0))
    rank.pipe.send(("sending", None))
    rank.wait(Operation(0))


def receive_from_dead(rank: Rank) -> tuple[list[str], float, bool]:
    rank.ask()
    return survive(rank, [], bytearray(64 * MIB))


def receive_much(rank: Rank) -> tuple[list[str], float, bool]:
    place = bytearray(64 * MIB)
    received = rank.receive(1, 1, place)
    rank.wait(received, seconds=0.001)
    return survive(rank, [received], place)


def be_silent(rank: Rank) -> None:
    rank.pipe.send(("silent", None))
    rank.ask()


def send_much_to_dead(rank: Rank) -> tuple[list[str], float, bool]:
    sent = rank.send(1, 1, content(64 * MIB, 0))
    rank.ask()
    return survive(rank, [sent], bytearray(8))


def flood_dead(rank: Rank) -> tuple[list[str], float, bool]:
    rank.ask()
    return survive(rank, [rank.send(1, 1, content(4096, number)) for number in range(1000)], bytearray(8))


def survive(rank: Rank, operations: list[Operation], place: bytearray) -> tuple[list[str], float, bool]:
    """Returns what became of the operations, how long it took to close, and whether the place was left alone then."""
    operations.append(rank.receive(1, 1, place))
    rank.wait(*operations, seconds=10.0 if os.environ.get("UCX_TLS") == "tcp" else 0.3)
    ends = {"pending" if not operation.done else str(operation.error) for operation in operations}
    begin = time.monotonic()
    rank.transport.close(timeout_seconds=0)
    seconds = time.monotonic() - begin
    before = digest(place)
    rank.pipe.poll(0.05)
    return sorted(ends), seconds, digest(place) == before


DEATHS = {
    "before it is received": (receive_from_dead, send_much),
    "while it is received": (receive_much, send_much),
    "before it receives": (send_much_to_dead, be_silent),
    "behind many messages": (flood_dead, be_silent),
}


@pytest.mark.parametrize(("death", "way"), in_turns(DEATHS, WAYS, every=3))
def test_the_death_of_a_peer_is_survived(
    death: str, way: str, together: Callable[..., Ranks], capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = together(*DEATHS[death], environment=WAYS[way])
    ranks.hear(1)
    ranks.kill(1)
    ranks.tell(0)
    ends, seconds, is_left_alone = ranks.hear(0)
    ranks.processes[0].join(LIMIT_SECONDS)
    assert ranks.processes[0].exitcode == 0
    assert all(end in ("pending", "None") or end.startswith("rank 1 (host host-1) is lost: UCX says ") for end in ends)
    assert ("pending" in ends) <= (way != "tcp")
    assert seconds < 5
    assert is_left_alone
    assert capfd.readouterr() == ("", "")


# A peer that lives and does nothing


def fall_silent(rank: Rank) -> None:
    data = content(LARGE, 0)
    large = [rank.send(0, tag, data) for tag in range(NUM_LARGE)]
    rank.wait(rank.send(0, 99, b"all are on the way"))
    rank.ask()
    assert not any(operation.done for operation in large)


def close_on_silent(rank: Rank) -> tuple[int, int, float, bool]:
    rank.wait(rank.receive(1, 99, bytearray(32)))
    places = [bytearray(LARGE) for _ in range(NUM_LARGE)]
    received = [rank.receive(1, tag, place) for tag, place in enumerate([*places, bytearray(8)])]
    data = [bytes(size) for size in (8, 4096, 1 << 16, MIB)]
    flood = [rank.send(1, 1, each) for each in data for _ in range(300)]
    num_pending = [sum(not operation.done for operation in operations) for operations in (received, flood)]
    begin = time.monotonic()
    rank.transport.close(timeout_seconds=0)
    seconds = time.monotonic() - begin
    before = [*map(digest, places)]
    UcxTransport().close(timeout_seconds=0)
    rank.pipe.poll(0.05)
    return num_pending[0], num_pending[1], seconds, [*map(digest, places)] == before


LARGE, NUM_LARGE = 16 * MIB, 4
SILENT_WAYS = {**WAYS, "copies that take too long": {"UCX_CMA_SEG_SIZE": "16"}}


@pytest.mark.parametrize("way", by_day(SILENT_WAYS, "tcp", "copies that take too long"))
def test_closing_does_not_wait_for_a_silent_peer(
    way: str, together: Callable[..., Ranks], capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = together(close_on_silent, fall_silent, environment=SILENT_WAYS[way])
    num_receiving, num_sending, seconds, is_left_alone = ranks.hear(0)
    ranks.processes[0].join(LIMIT_SECONDS)
    assert ranks.processes[0].exitcode == 0
    assert num_receiving == NUM_LARGE + 1
    assert num_sending >= 300
    assert seconds < 5
    assert (seconds >= 0.5) == (way == "copies that take too long")
    assert is_left_alone
    assert capfd.readouterr() == ("", "")


def test_no_word_about_what_nobody_received(together: Callable[..., Ranks], capfd: pytest.CaptureFixture[str]) -> None:
    together(send_unheard, send_unheard).results()
    assert capfd.readouterr() == ("", "")


def send_unheard(rank: Rank) -> None:
    rank.wait(*(rank.send(1 - rank.rank, 1, bytes(100)) for _ in range(10)))
    heard = rank.receive(1 - rank.rank, 2, bytearray(8))
    rank.wait(heard, rank.send(1 - rank.rank, 2, b"done"))


# Who does not fit


def connect_alone(transport: UcxTransport, address: bytes, seconds: float = 0.1) -> None:
    world = World(0, [transport.address, address], ["a", "b"], b"s" * 32)
    transport.connect(world, timeout_seconds=seconds)


@pytest.fixture
def transport() -> Iterator[UcxTransport]:
    made = UcxTransport()
    yield made
    made.close(timeout_seconds=0)


def test_an_address_of_another_transport_is_refused(transport: UcxTransport) -> None:
    with pytest.raises(
        HandshakeError, match=r"rank 1 \(host b\) has the address b'tcp://b:9'; .* use the same transport"
    ):
        connect_alone(transport, b"tcp://b:9")


def test_another_version_of_ucx_is_refused(transport: UcxTransport) -> None:
    words = r"rank 1 \(host b\) has UCX 1\.2\.3, rank 0 \(host a\) UCX .*; expected the same .* BRAIDAX_UCX_LIBRARY"
    with pytest.raises(HandshakeError, match=words):
        connect_alone(transport, b"braidax-ucx 1.2.3 44 " + b"x" * 100)


def test_a_rank_that_never_comes_is_named(transport: UcxTransport) -> None:
    other = UcxTransport()
    version = re.escape(other.library.version)
    words = rf"rank 1 \(host b\) at UCX {version} of process {os.getpid()} did not connect to rank 0 .* within 0.1 s; "
    with pytest.raises(WaitTimeout, match=words):
        connect_alone(transport, other.address)
    other.close(timeout_seconds=0)


def test_ways_that_do_not_exist_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeon")
    with pytest.raises(
        CommError, match=r"UCX .* cannot start: ucp_init: .*; .* mend UCX_TLS='pigeon' and UCX_NET_DEVICES"
    ):
        UcxTransport()


def test_a_closed_transport_says_so(transport: UcxTransport) -> None:
    transport.close(timeout_seconds=0)
    with pytest.raises(RuntimeError, match="this rank's UCX is closed"):
        transport.poll(0)


def test_two_callers_at_once_are_refused(transport: UcxTransport) -> None:
    other = threading.Thread(target=transport.poll, args=(0.5,), daemon=True)
    other.start()
    with pytest.raises(RuntimeError, match="UCX has one caller at a time"):
        while other.is_alive():
            transport.arm()
    other.join(LIMIT_SECONDS)


# What is missing


class NoUcx(ModuleType):
    """A binding that finds no UCX, or one of a certain path."""

    def __init__(self, *found: str) -> None:
        super().__init__(BINDING)
        self.found, self.tried = found, list[str]()

    def load(self, path: str) -> tuple[str, int, int, int]:
        self.tried.append("wheel" if "libucx" in path and Path(path).is_absolute() else path)
        if self.tried[-1] not in self.found:
            raise OSError(f"{path}: cannot open shared object file")
        return path, 1, 99, 0


@pytest.fixture
def no_ucx(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NoUcx]:
    def install(*found: str) -> NoUcx:
        binding = NoUcx(*found)
        monkeypatch.setitem(sys.modules, BINDING, binding)
        return binding

    monkeypatch.delenv("BRAIDAX_UCX_LIBRARY", raising=False)
    return install


def test_a_missing_library_is_named_with_its_extra(
    no_ucx: Callable[..., NoUcx], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_ucx()
    monkeypatch.setitem(sys.modules, "libucx", None)
    words = r"the transport \"ucx\" needs the module 'libucx', .* install it with: pip install \"braidax\[ucx\]\""
    with pytest.raises(MissingExtra, match=words):
        UcxTransport()


def test_a_broken_wheel_is_named(no_ucx: Callable[..., NoUcx]) -> None:
    no_ucx()
    words = r"cannot load the UCX of the module 'libucx': .*: pip install --force-reinstall --no-deps libucx-cu12"
    with pytest.raises(MissingExtra, match=words):
        UcxTransport()


def test_a_missing_binding_is_named_with_what_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, BINDING, None)
    words = r"needs its binding in C, .*apt install gcc python3-dev\), .*BRAIDAX_BINDINGS=required pip install .* PATH$"
    with pytest.raises(MissingExtra, match=words):
        UcxTransport()


def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MissingExtra, match=r"the transport \"ucx\" runs on Linux only, .* use the transport 'tcp'"):
        UcxTransport()


def test_a_wrong_variable_is_named(no_ucx: Callable[..., NoUcx], monkeypatch: pytest.MonkeyPatch) -> None:
    binding = no_ucx("wheel")
    monkeypatch.setenv("BRAIDAX_UCX_LIBRARY", "nowhere.so")
    with pytest.raises(
        ArgumentError, match=r"BRAIDAX_UCX_LIBRARY='nowhere.so' cannot be loaded: .*libucp.so.0 of UCX 1.11"
    ):
        UcxTransport()
    assert binding.tried == ["nowhere.so"]


@pytest.mark.parametrize(
    ("has_infiniband", "found", "tried"),
    [
        (True, "libucp.so.0", ["libucp.so.0"]),
        (True, "wheel", ["libucp.so.0", "wheel"]),
        (False, "wheel", ["wheel"]),
        (False, "libucp.so.0", ["wheel", "libucp.so.0"]),
    ],
)
def test_the_library_is_looked_for_in_order(
    has_infiniband: bool,
    found: str,
    tried: list[str],
    no_ucx: Callable[..., NoUcx],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ucx, "_INFINIBAND", tmp_path if has_infiniband else tmp_path / "none")
    binding = no_ucx(found)
    with pytest.raises(AttributeError, match="Worker"):  # which comes next, and which this binding lacks
        UcxTransport()
    assert binding.tried == tried


def test_the_environment_is_left_as_it_was(transport: UcxTransport) -> None:
    assert not [name for name in os.environ if name.startswith("UCX_")]
    assert transport.library.version.count(".") == 2
    assert Path(transport.library.path).name.startswith("libucp")


# The build


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = list  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# All of them are compiled wherever braidax is installed, and by night as strictly as the quickest one.
@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_the_bindings_are_compiled_or_it_is_said_why_not(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    assert len(build.BUILT) == 7
    if count == 1:
        at = [source.stem for source in build.SOURCES].index("permutation_binding")
        for name in ("SOURCES", "BUILT"):
            monkeypatch.setattr(build, name, getattr(build, name)[at : at + 1])
    for folder in {source.parent for source in build.SOURCES}:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in build.compiled(tmp_path)
    assert not any((tmp_path / built).exists() for built in build.BUILT)
    monkeypatch.setenv("CC", "cc -Wall -Wextra -Werror")
    assert build.compiled(tmp_path) is None
    assert len(build.BUILT) == count
    assert all((tmp_path / built).stat().st_size > 10_000 for built in build.BUILT)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.compiled(tmp_path) == "there is no C compiler (on Debian and Ubuntu: apt install gcc python3-dev)"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build.compiled(tmp_path) == "they are for Linux, this is darwin"


class Said:
    """Stands for what hatch prints with."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.display_info = self.display_warning = self.lines.append


def test_a_build_says_what_it_has_and_fails_where_it_lacks_what_is_required(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiled", lambda root: "there is no C compiler")
    hook, data, there = build.BindingHook(), {"artifacts": []}, tmp_path / build.BUILT[0]
    hook.target_name, hook.root, hook.app = "wheel", str(tmp_path), Said()
    there.parent.mkdir(parents=True)
    there.touch()

    monkeypatch.setenv("BRAIDAX_BINDINGS", "none")
    hook.initialize("standard", data)
    assert there.exists()  # a checkout keeps its own, which git ignores and the wheel does not take
    assert data == {"artifacts": []}
    assert hook.app.lines[-1].endswith("Polars sums groups: BRAIDAX_BINDINGS=none")
    hook.initialize("editable", data)
    assert not there.exists()

    monkeypatch.setenv("BRAIDAX_BINDINGS", "required")
    with pytest.raises(
        RuntimeError, match="BRAIDAX_BINDINGS=required, and the bindings in C cannot be compiled: there is no"
    ):
        hook.initialize("standard", data)
    monkeypatch.setenv("BRAIDAX_BINDINGS", "yes")
    with pytest.raises(ValueError, match=r"BRAIDAX_BINDINGS='yes': expected one of \('required', 'none'\); mend it"):
        hook.initialize("standard", data)
    monkeypatch.delenv("BRAIDAX_BINDINGS")
    hook.initialize("standard", data)
    assert data == {"artifacts": []}
    assert hook.app.lines[-1].endswith("there is no C compiler")

    monkeypatch.setattr(build, "compiled", lambda root: None)
    hook.initialize("standard", data)
    assert data["pure_python"] is False
    assert data["tag"].startswith("cp311-abi3-linux_")
    assert hook.app.lines[-1] == (
        "braidax is built with tcp_binding.abi3.so, ucx_binding.abi3.so, permutation_binding.abi3.so, "
        "record_binding.abi3.so, scatter_binding.abi3.so, groups_binding.abi3.so, rows_binding.abi3.so"
    )
