"""Contracts of what stands beside a loss: feeds, which keep variables out of it and hand in what it reads of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from braidax.program import Program

Check = Callable[[Any], str]
"""What is wrong with a metric's value on the host, in words, or ""."""


class Pulled(NamedTuple):
    """What a reading has fetched.

    **Fields:** `rows`: what its program is fed. `ticket`: what `push` needs of it. `metrics`: by name.
    """

    rows: Any
    ticket: Any
    metrics: Mapping[str, Any]


class Update(NamedTuple):
    """An update of what is trained, for feeds.

    **Fields:** `gradients`, `params`: of what is dense, as the loss has it. `dense`: the optimizer's state without what
    the feed keeps. `payload`: what `Reading.push` gave. `loss`: of the batch.
    """

    gradients: Any
    params: Any
    dense: Any
    payload: Any
    loss: Any


@runtime_checkable
class Reading(Protocol):
    """How one program, of training or of an evaluation, reads the variables of a feed."""

    @property
    def program(self) -> Program:
        """The loss that is fed: `(params, variables, key, batch, rows)`, with None for each of `names`."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Of the variables that the program is not given; it reads any other of the feed whole."""
        ...

    @property
    def batch_dims(self) -> Sequence[int]:
        """For each leaf of `rows` the dim that is divided among devices."""
        ...

    @property
    def metrics(self) -> Collection[str]:
        """Names of the scalars that `pull` tells."""
        ...

    @property
    def pulled_shardings(self) -> Any:
        """Of what `pull` gives, or a prefix of it."""
        ...

    @property
    def payload_shardings(self) -> Any:
        """Of what `push` gives, or a prefix of it."""
        ...

    def pull(self, dense: Any, variables: Any, key: Any, batch: Any, stored: Mapping[str, Any], held: Any) -> Pulled:
        """Fetches what a batch reads. **Arguments:** as of the loss; `stored`: variables, `held`: what they keep."""
        ...

    def route(self, dense: Any, variables: Any, key: Any, batch: Any) -> Any:
        """Finds out what a batch reads, for `Feed.read_behind`. **Arguments:** as of `pull`."""
        ...

    def send(self, routed: Any, read: Any, stored: Mapping[str, Any]) -> Pulled:
        """Fetches what `Feed.read_behind` has read."""
        ...

    def push(self, ticket: Any, gradients: Any) -> Any:
        """Brings gradients of `rows` to where the variables are, for `Feed.apply`."""
        ...

    def sum_of_squares(self, payload: Any) -> jax.Array:
        """Sums the squares of all elements of the gradients that `push` gave: a float32 scalar."""
        ...


@runtime_checkable
class Feed(Protocol):
    """What stores some variables in a form of its own, fetches what a step reads of them, and moves them.

    The state of the optimizer is split, too: what is kept for these variables is the feed's, the rest is `dense`.
    """

    @property
    def names(self) -> Collection[str]:
        """Of the variables."""
        ...

    @property
    def padded(self) -> Sequence[tuple[str, int]]:
        """Paths in a state of the leaves that are stored padded, and how many rows they have."""
        ...

    @property
    def checks(self) -> Mapping[str, Check]:
        """Of metrics that are looked at some updates later, and shown to nobody, by name."""
        ...

    def reading(self, program: Program, *, microbatches: int = 1) -> Reading:
        """Takes the variables out of a traced loss."""
        ...

    def begin(self, params: Any, born: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the first stored variables, what of the optimizer's state is dense, and what the feed keeps.

        **Arguments:** `params`: PyTree of what is trained, as the loss has it. `born`: those of the feed, by name.
        """
        ...

    def shardings(self, kept: Any) -> Any:
        """Returns those of what it keeps. **Arguments:** `kept`: specs."""
        ...

    def held(self, dense: Any, kept: Any) -> Any:
        """Returns what of a state gradients and evaluations read, besides the stored variables."""
        ...

    def load(self, name: str, stored: Any) -> Any:
        """Returns a stored variable in the form that the loss has it in."""
        ...

    def whole(self, name: str, stored: Any, held: Any) -> Any:
        """Returns a variable as single-device training has it now, in the form of the loss; it may be split."""
        ...

    def apply(self, update: Update, reading: Any, stored: Any, kept: Any) -> tuple[Any, Any, dict[str, Any], Any]:
        """Takes an update of what is trained. **Returns:** the new `params`, `dense`, `stored` and `kept`."""
        ...

    @property
    def waits_for_gradients(self) -> bool:
        """Whether its variables move by gradients of others."""
        ...

    def read_behind(self, update: Update, reading: Any, routed: Any, stored: Any, kept: Any) -> Any:
        """Reads what a batch needs as `apply` of the same arguments leaves it, for `Reading.send`.

        Where the optimizer's state is that of an update before, which nobody has changed.

        **Arguments:** `update`: without gradients, unless it waits for these. `routed`: of `Reading.route`.
        """
        ...

    def settled(self, stored: Any, dense: Any, kept: Any) -> tuple[dict[str, Any], Any]:
        """Returns stored variables, and what is kept of them, in which nothing is put off."""
        ...

    def joined(self, dense: Any, kept: Any) -> Any:
        """Returns the optimizer's state of single-device training, of what is settled."""
        ...

    def parted(self, opt_state: Any, params: Mapping[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Undoes `joined`. **Returns:** stored variables, `dense`, and what it keeps."""
        ...

    def dense_state(self) -> Any:
        """Of the optimizer's state of single-device training. **Raises:** `ArgumentError` when there is none."""
        ...
