"""Launching on a gang: the program finds itself as `braidax launch` would have started it."""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from braidax.gang import LocalGang, local
from braidax.gang.calling.ranks import Message, Ranks
from braidax.gang.on_gang import launch_on
from braidax.gang.program import Program
from tests.support.gang.launched import JOIN


def launch(folder: Path, text: str, *, restarts: int = 0) -> tuple[int, list[str], list[str]]:
    """Launches the text of a script on a local gang of 2; returns exit code, lines of ranks and lines about them."""
    script = folder / "program.py"
    script.write_text(JOIN + dedent(text))
    lines, told = io.StringIO(), io.StringIO()
    program = Program(str(script), ("--epochs", "3"), initialize="nothing")
    code = launch_on(LocalGang(2, log=lines), program, restarts=restarts, log=told)
    return code, lines.getvalue().splitlines(), told.getvalue().splitlines()


def test_a_program_joins_the_others(tmp_path: Path) -> None:
    code, lines, told = launch(tmp_path, "print(comm.rank, sys.argv[1:], __name__)\ncomm.close()\nsys.exit()\n")
    assert (code, told) == (0, [])
    assert sorted(lines) == [f"[{rank}] {rank} ['--epochs', '3'] __main__" for rank in range(2)]


def test_the_secret_of_a_job_is_not_in_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers of Ray and Dask see the call."""
    calls = list[bytes]()

    def ask(ranks: Ranks, messages: Mapping[int, Message]) -> None:
        for message in messages.values():
            calls.append(b"".join([*message.head, *message.body]))
        begin(ranks, messages)

    begin = local._LocalRanks.ask
    monkeypatch.setattr(local._LocalRanks, "ask", ask)
    text = """
        print(os.environ["BRAIDAX_SECRET"], os.environ["BRAIDAX_JOB"])
        if comm.rank == 0 and os.environ["BRAIDAX_GENERATION"] == "0":
            raise ValueError("the value")
        comm.close()
        """
    code, lines, _ = launch(tmp_path, text, restarts=1)
    assert code == 0
    told = {line.partition("] ")[2] for line in lines if line.count(" ") == 2}
    secrets = {words.split()[0] for words in told}
    assert len(calls) == 2 * 2 * len(secrets)  # that all meet, and the call; the same secret on both ranks
    assert len(secrets) == 2  # one a generation
    assert len({words.split()[1] for words in told}) == 1
    for secret in secrets:
        assert len(bytes.fromhex(secret)) == 32
        assert not any(secret.encode() in call or bytes.fromhex(secret) in call for call in calls)


def test_the_exit_code_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    text = "comm.barrier()\nsys.exit(7) if comm.rank == 1 else comm.barrier()\n"
    code, _, told = launch(tmp_path, text)
    assert code == 7
    assert re.match(
        r"braidax launch: rank 1 failed first: it is reported so: rank 1 \(host .*\): SystemExit: 7", told[0]
    )
    assert any("program.py" in line for line in told)


@pytest.mark.slow
def test_all_start_again_under_the_next_generation(tmp_path: Path) -> None:
    text = """
        print("generation", os.environ["BRAIDAX_GENERATION"])
        comm.barrier()
        if comm.rank == 0 and os.environ["BRAIDAX_GENERATION"] == "0":
            raise ValueError("the value")
        comm.close()
        """
    code, lines, told = launch(tmp_path, text, restarts=1)
    assert code == 0
    assert {"[0] generation 1", "[1] generation 1"} < set(lines)
    assert "braidax launch: starts all again (restart 1 of 1)" in told
