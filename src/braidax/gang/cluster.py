"""Gangs on clusters that keep things themselves: these are handed to ranks, and back, without coming here."""

import contextlib
import secrets
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

from braidax.errors import GangError
from braidax.gang.gang import Gang
from braidax.gang.keeping.kept import Handed


class ClusterGang(Gang):
    """A gang on Dask or on Ray. A *reference* stands for what the cluster keeps: a `Future` of Dask, an `ObjectRef`."""

    @final
    @contextlib.contextmanager
    def handing(self, references: Sequence[Sequence[Any]]) -> Generator[Handed]:
        """Hands what the cluster keeps to ranks, for one call inside the block; nothing of it comes to this process.

        **Arguments:** `references`: for each rank its own; those that lie on its worker or host stay there.

        **Returns:** what stands, in the arguments of that call, for each rank's list. **Raises:** what the task did
        that was to make it; `GangError` when ranks, workers or what they kept are lost.
        """
        token = secrets.token_hex(16)
        self.check_whole()
        try:
            self._hand(token, references)
            yield Handed(token, self.job)
        except BaseException:
            with contextlib.suppress(GangError):
                self._take_back(token)
            raise

    @final
    def results(self, fn: Callable[[Any], Any], name: str) -> list[Any]:
        """Returns, for each rank, a reference to `fn(what it keeps under a name)`, which the cluster keeps from now on.

        **Raises:** what `fn` does; `GangError` when ranks or workers are lost, or keep nothing so.
        """
        self.check_whole()
        return self._results(fn, name)

    @final
    def check_whole(self) -> None:
        """Raises `GangError` where a rank is lost, or the gang does not run."""
        if self.lost or self._ranks is None:
            lost = f"ranks {', '.join(map(str, self.lost))} are lost" if self.lost else "it does not run"
            raise GangError(f"the gang can take nothing from its cluster: {lost}; call replace(), or start()")

    @abstractmethod
    def _hand(self, token: str, references: Sequence[Sequence[Any]]) -> None:
        """Has each rank's list ready under a token."""

    @abstractmethod
    def _take_back(self, token: str) -> None:
        """Lets ranks give up what they were handed, as far as they are there; does not wait."""

    @abstractmethod
    def _results(self, fn: Callable[[Any], Any], name: str) -> list[Any]:
        """Does what `results` does, where all ranks are there."""
