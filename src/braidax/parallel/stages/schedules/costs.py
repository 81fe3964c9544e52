"""What operations cost: seconds and bytes of each stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.operations import Kind, Operation


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one microbatch, by stage.

    **Arguments:** `input_seconds`, `weight_seconds`: the two halves of a backward; a whole one takes their sum.
    `transfer_seconds`: from each stage to the next one, if it lies on another device; one fewer than stages.
    `activation_bytes`: what a forward leaves for the backward. `kept_bytes`: what is left of that for the gradient of
    the weights alone; by default all. `update_seconds`: by default 0.

    **Raises:** `ArgumentError` for what is negative, and for counts that do not agree.
    """

    forward_seconds: tuple[float, ...]
    input_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...] | None = None
    update_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            values: Sequence[float] | None = getattr(self, field.name)
            expected = self.num_stages - (field.name == "transfer_seconds")
            if values is not None and len(values) != expected:
                raise ArgumentError(
                    f"{field.name} has {len(values)} values, expected {expected} for the {self.num_stages} stages of "
                    "forward_seconds"
                )
            if values is not None and any(value < 0 for value in values):
                raise ArgumentError(f"{field.name}={values} has a negative value")

    @classmethod
    def even(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        inputs: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
        activation: int = 1,
    ) -> "Costs":
        """Returns costs that all stages share; by default those of the papers, in which F, B and W take a unit each."""
        return cls(
            (forward,) * num_stages,
            (inputs,) * num_stages,
            (weight,) * num_stages,
            (transfer,) * (num_stages - 1),
            (activation,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        """How many stages have costs."""
        return len(self.forward_seconds)

    def seconds(self, operation: Operation) -> float:
        """Returns how long an operation takes."""
        stage = operation.stage
        match operation.kind:
            case Kind.FORWARD:
                return self.forward_seconds[stage]
            case Kind.BACKWARD:
                return self.input_seconds[stage] + self.weight_seconds[stage]
            case Kind.INPUT:
                return self.input_seconds[stage]
            case Kind.WEIGHT:
                return self.weight_seconds[stage]
            case Kind.UPDATE:
                return 0.0 if self.update_seconds is None else self.update_seconds[stage]
            case Kind.SEND_F | Kind.RECV_B:
                return self.transfer_seconds[stage]
            case Kind.RECV_F | Kind.SEND_B:
                return self.transfer_seconds[stage - 1]

    def change(self, operation: Operation) -> tuple[int, int]:
        """Returns how many activations, and bytes, are added: a forward adds as it begins, others take as they end."""
        stage = operation.stage
        taken = self.activation_bytes[stage]
        kept = taken if self.kept_bytes is None else self.kept_bytes[stage]
        match operation.kind:
            case Kind.FORWARD:
                return 1, taken
            case Kind.BACKWARD:
                return -1, -taken
            case Kind.INPUT:
                return 0, kept - taken
            case Kind.WEIGHT:
                return -1, -kept
            case _:
                return 0, 0
