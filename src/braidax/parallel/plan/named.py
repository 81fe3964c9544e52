"""A strategy beside the names that dims have: these are honored like overrides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .layout import Axis, Layout
from .model import Model
from .placements import Gathered, Replicated, Rows, Split
from .strategy import Choice, Strategy, refused


@dataclass(frozen=True, repr=False)
class Named:
    """Places variables as the names of their dims ask, all others as a strategy does.

    Where samples are divided over the axis too, a named dim is gathered where the loss uses it; elsewhere the work is
    split with it.

    **Fields:** `strategy`: or None. `dims`: of variables, by path, the dim that goes over the axis. `notes`: by path,
    what the plan says of names that nothing is known of.
    """

    strategy: Strategy | None
    dims: Mapping[str, int]
    notes: Mapping[str, str]

    def __repr__(self) -> str:
        return "named dims" if self.strategy is None else f"{self.strategy!r}, named dims"

    @property
    def splits_batch(self) -> bool:
        """As of the strategy."""
        return self.strategy is not None and self.strategy.splits_batch

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses what names ask for, unless an override of the strategy says otherwise, or it cannot be."""
        choices = {} if self.strategy is None else dict(self.strategy.place(model, axis, taken))
        overrides = getattr(self.strategy, "overrides", {})
        ruled = {path for path, choice in choices.items() if overrides and "by overrides[" in choice.why}
        for path in model.variables:
            choice = choices.get(path, Choice(Replicated(), "no strategy"))
            if path in self.dims and path not in ruled and not isinstance(choice.placement, Rows):
                choice = self._asked(model, path, choice)
            note = self.notes.get(path, "")
            choices[path] = replace(choice, why=f"{choice.why}; {note}") if note else choice
        return choices

    def _asked(self, model: Model, path: str, otherwise: Choice) -> Choice:
        dim = self.dims[path]
        placement = Gathered(dim) if self.splits_batch else Split(dim)
        if cannot := refused(placement, model, path):
            return replace(otherwise, why=f"{otherwise.why}; its name asks for {cannot}")
        return Choice(placement, f"by the name of dim {dim}")
