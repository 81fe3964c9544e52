"""`from_environment`: joins the ranks that a gang or `braidax launch` started, with nothing to be said."""

import os
from collections.abc import Mapping

from braidax.comm.communicator import Communicator
from braidax.comm.environment import rank_from_environment
from braidax.comm.rendezvous import DEFAULT, Tuning, connect
from braidax.comm.stores.urls import open_store
from braidax.comm.watch import OnLoss
from braidax.errors import ArgumentError


def from_environment(
    environ: Mapping[str, str] | None = None,
    *,
    on_loss: OnLoss = "generation",
    timeout_seconds: float = 120.0,
    tuning: Tuning = DEFAULT,
) -> Communicator:
    """Joins the ranks of the job that this process was started for; each joins once a generation.

    **Arguments:** `environ`: the variables, those of the process by default: `BRAIDAX_RANK`, `BRAIDAX_SIZE`,
    `BRAIDAX_STORE` (a URL, see `open_store`), and `BRAIDAX_SECRET`, `BRAIDAX_JOB`, `BRAIDAX_GENERATION`,
    `BRAIDAX_TRANSPORT` where they are given. `on_loss`, `timeout_seconds`, `tuning`: as for `connect`.

    **Returns, Raises:** as `connect`; `ArgumentError` naming a variable that is missing or cannot be.
    """
    variables = os.environ if environ is None else environ
    place = rank_from_environment(variables)
    if place is None or "BRAIDAX_STORE" not in variables:
        missing = "BRAIDAX_STORE" if place is not None else "BRAIDAX_RANK"
        raise ArgumentError(
            f"{missing} is not set: expected it in the environment; start the program with `braidax launch "
            "--processes N SCRIPT`, or call connect(store, rank=…, size=…) yourself"
        )
    try:
        secret = bytes.fromhex(variables["BRAIDAX_SECRET"]) if "BRAIDAX_SECRET" in variables else None
    except ValueError:
        raise ArgumentError("BRAIDAX_SECRET is not hexadecimal; expected what secrets.token_hex(32) gives") from None
    with open_store(variables["BRAIDAX_STORE"], secret=secret, timeout_seconds=timeout_seconds) as store:
        return connect(
            store,
            rank=place.rank,
            size=place.size,
            transport=variables.get("BRAIDAX_TRANSPORT", "tcp"),
            job=place.job or "braidax",
            generation=place.generation,
            on_loss=on_loss,
            timeout_seconds=timeout_seconds,
            tuning=tuning,
        )
