"""What is asked of a user's data set and collate function, with errors that name the items."""

from collections.abc import Callable, Sequence
from typing import Any

from braidax.errors import BraidaxError, RecordError


class Items:
    """A data set, and how samples of it become a batch.

    **Arguments:** `dataset`: has `__getitem__`, and perhaps `__getitems__`. `collate_fn`: makes a batch of a list of
    samples or, where `batched` is false, of one sample. `pin`: what is done to a batch at last, or None.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], *, batched: bool, pin: Callable[[Any], Any] | None
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._batched = batched
        self._pin = pin
        self.many: Callable[[Any], Any] | None = (getattr(dataset, "__getitems__", None) or None) if batched else None
        self.splits: bool | None = None  # whether __getitems__ returns lists, so that its calls may be cut up

    def sample(self, index: Any) -> Any:
        """Returns one sample. **Raises:** `RecordError` naming its index."""
        try:
            return self._dataset[index]
        except BraidaxError:
            raise
        except Exception as error:
            raise RecordError(
                f"dataset={type(self._dataset).__name__}: its __getitem__ raised {type(error).__name__}: {error}, for "
                f"the index {index!r}; mend this item, or leave its index out by a sampler"
            ) from error

    def samples(self, indices: Sequence[Any]) -> Any:
        """Returns what `__getitems__` gives. **Raises:** `RecordError` naming the index, or all if none alone fails."""
        assert self.many is not None
        try:
            got = self.many(indices)
        except BraidaxError:
            raise
        except Exception as error:
            if hasattr(self._dataset, "__getitem__"):
                for index in indices:
                    self.sample(index)
            raise RecordError(
                f"dataset={type(self._dataset).__name__}: its __getitems__ raised {type(error).__name__}: {error}, for "
                f"the indices {shown(indices)}; mend these items, or leave them out by a sampler"
            ) from error
        self.splits = self.splits is not False and isinstance(got, list) and len(got) == len(indices)
        return got

    def unlike(self, indices: list[Any]) -> RecordError:
        """Returns the error for a `__getitems__` that gave a list of samples before, and now gives something else."""
        return RecordError(
            f"dataset={type(self._dataset).__name__}: its __getitems__ did not return a list of {len(indices)} samples "
            f"for the indices {shown(indices)}, as it did before; make it return one, or use threads=1"
        )

    def batch(self, samples: Any, indices: Any) -> Any:
        """Returns a batch. **Raises:** `RecordError` naming the indices."""
        return self._made(samples, indices, self._pin)

    def _made(self, samples: Any, indices: Any, pin: Callable[[Any], Any] | None) -> Any:
        try:
            batch = self._collate_fn(samples if self._batched else samples[0])
            return batch if pin is None else pin(batch)
        except BraidaxError:
            raise
        except Exception as error:
            name = getattr(self._collate_fn, "__qualname__", type(self._collate_fn).__name__)
            raise RecordError(
                f"collate_fn={name} raised {type(error).__name__}: {error}, for the items {shown(indices)}; make it "
                f"take them, or give a collate_fn that does"
            ) from error


def shown(indices: Any) -> str:
    """Returns indices as people read them: the first few, and how many there are."""
    if not isinstance(indices, list | tuple):
        return repr(indices)
    more = f"… ({len(indices)} in all)" if len(indices) > 8 else ""
    return f"{list(indices[:8])}{more}"
