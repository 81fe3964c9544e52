"""Workers that have other models than the first one are told so before anything is trained."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from braidax.parallel.served.meetings.same_model import plain
from tests.support.parallel.workers.teams import OPTIMIZERS, WIDTH, WORDS, init, make_step, team


def wider(key: jax.Array) -> Any:
    return {**init(key), "words": jax.random.normal(key, (WORDS + 1, WIDTH))}


def with_more(key: jax.Array) -> Any:
    return {**init(key), "more": jnp.zeros(3)}


def drawn_otherwise(key: jax.Array) -> Any:
    return {**init(key), "words": jax.random.uniform(key, (WORDS, WIDTH))}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a larger table": (
        {"init": wider},
        rf"table words is float32\[{WORDS + 1}, {WIDTH}\] there, and float32\[{WORDS}, ",
    ),
    "one variable more": ({"init": with_more}, r"variable .*/more is float32\[3\] there, and missing on worker 0"),
    "another optimizer": ({"optimizer": "adagrad"}, "what is kept of words is .*sum_of_squares.* there, and .*mu"),
    "weight decay": ({"optimizer": "scheduled"}, "what is kept of words is grown.* there, and last"),
    "another learning rate": ({"optimizer": "quick"}, "how words begins and moves differs"),
    "other first values": ({"init": drawn_otherwise}, "how words begins and moves differs"),
    "another staleness": ({"strategy": bx.ParameterServers(staleness=1)}, "staleness is 1 there, and 0 on worker 0"),
    "copies": ({"strategy": bx.ParameterServers(copies=2)}, "copies is 2 there, and 1 on worker 0"),
}


NIGHTLY = ("weight decay", "other first values", "copies")  # beside another optimizer, rate and staleness


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        ("another staleness", 3),
        *(
            pytest.param(case, 2, marks=pytest.mark.slow if case in (*NIGHTLY, "another staleness") else ())
            for case in OTHERS
        ),
        *(pytest.param(case, 3, marks=pytest.mark.slow) for case in OTHERS if case != "another staleness"),
    ],
)
def test_a_worker_with_another_model_is_named(
    gangs: dict[int, LocalGang], monkeypatch: pytest.MonkeyPatch, case: str, workers: int
) -> None:
    """In all of them, also in a third one that has the model of the first."""
    monkeypatch.setitem(OPTIMIZERS, "quick", optax.adam(2e-2))
    others, message = OTHERS[case]
    errors: list[str] = []

    def work(number: int, seat: Any) -> None:
        with pytest.raises(ArgumentError, match=f"worker 1 has another model than worker 0: .*{message}") as raised:
            make_step(seat, **(others if number == 1 else {}))
        errors.append(str(raised.value))

    team(gangs[2], workers, work)
    assert len(errors) == workers
    assert len({*errors}) == 1
    assert all("expected all workers to give parallelize the same model" in one for one in errors)


def exported(file: str, factor: int) -> bytes:
    """Returns a program that is written down in a file."""
    defined: dict[str, Any] = {"jnp": jnp}
    exec(compile("\n" * len(file) + f"def moved(x):\n    return jnp.sin(x) * {factor}", file, "exec"), defined)
    return bytes(export.export(jax.jit(defined["moved"]))(jax.ShapeDtypeStruct((3,), jnp.float32)).serialize())


def test_programs_are_compared_without_where_they_are_from() -> None:
    limit: int = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)  # as it is for users; tests write no places
    try:
        check_places_are_left_out()
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def check_places_are_left_out() -> None:
    here, elsewhere = exported("/here/model.py", 2), exported("/elsewhere (2)/model.py", 2)
    assert here != elsewhere
    assert plain(here) == plain(elsewhere)
    assert plain(here) != plain(exported("/here/model.py", 3))
    assert plain(b"") == b""
