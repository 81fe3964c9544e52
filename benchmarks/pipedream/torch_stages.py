"""torch.distributed.pipelining on gloo: a process's stages of the same GPT, by one of its schedules."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream.group import Place, Taken

SCHEDULES = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "interleaved zero bubble": "ScheduleInterleavedZeroBubble",
    "ZBV": "ScheduleZBVZeroBubble",
}
_STAGES_OF_ZBV = ((0, 3), (1, 2))


class Layer(nn.Module):
    """Attention and a wider part, as in `Shape.layer`."""

    def __init__(self, w: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.from_numpy(leaf)) for name, leaf in w.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, (samples, length, width) = self.weights, x.shape
        both = torch.addmm(w["qkv_bias"], _normed(x, w["first"]).reshape(-1, width), w["qkv"])
        q, k, v = both.view(samples, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, width)
        x = x + torch.addmm(w["out_bias"], mixed, w["out"]).view_as(x)
        wide = torch.addmm(w["up_bias"], _normed(x, w["second"]).reshape(-1, width), w["up"])
        return x + torch.addmm(w["down_bias"], F.gelu(wide, approximate="tanh"), w["down"]).view_as(x)


class Part(nn.Module):
    """Some layers, behind the words if they are the first, before the head if they are the last."""

    def __init__(self, params: Any, layers: Sequence[int], number: int) -> None:
        super().__init__()
        first, last = layers[0] == 0, layers[-1] == number - 1
        stacked = params["layers"]
        self.layers = nn.ModuleList(Layer({name: leaf[at].copy() for name, leaf in stacked.items()}) for at in layers)
        self.words = nn.Parameter(torch.from_numpy(params["wte"])) if first else None
        self.places = nn.Parameter(torch.from_numpy(params["wpe"])) if first else None
        self.scale = nn.Parameter(torch.from_numpy(params["last"])) if last else None
        self.head = nn.Parameter(torch.from_numpy(params["head"])) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None and self.places is not None:
            x = F.embedding(x, self.words) + self.places
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None or self.scale is None else _normed(x, self.scale)[:, :-1] @ self.head.T


class Torch:
    """A step of this process's stages."""

    def __init__(self, place: Place, schedule: Any, parts: Sequence[Part], batches: Any, rate: float) -> None:
        self._place, self._schedule, self._batches = place, schedule, itertools.cycle(batches)
        self._optimizer = torch.optim.SGD([one for part in parts for one in part.parameters()], lr=rate)
        self._has_last = any(part.head is not None for part in parts)

    def step(self) -> Taken:
        """Takes the next step."""
        ids = next(self._batches)
        start = time.perf_counter()
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = [ids] if self._place.rank == 0 else []
        labels = {"target": ids, "losses": losses} if self._has_last else {}
        self._schedule.step(*given, **labels)
        self._optimizer.step()
        seconds = time.perf_counter() - start
        return Taken(seconds, float(torch.stack(losses).mean()) if self._has_last else None)


def begin(
    place: Place, shape: Shape, schedule: str, microbatches: int, params: Any, batches: Any, rate: float, compiled: bool
) -> Torch:
    """Makes the stages of this process. **Arguments:** `schedule`: one of `SCHEDULES`. `compiled`: by Inductor."""
    torch.set_num_threads(1)
    meeting = f"tcp://127.0.0.1:{place.port}"
    dist.init_process_group("gloo", init_method=meeting, rank=place.rank, world_size=place.size)
    several = schedule in ("ZBV", "interleaved zero bubble")
    number = 2 * place.size if several else place.size
    own = (place.rank, place.rank + place.size) if several else (place.rank,)
    own = _STAGES_OF_ZBV[place.rank] if schedule == "ZBV" else own
    bounds = np.linspace(0, shape.layers, number + 1).astype(int)
    parts = [Part(params, range(bounds[at], bounds[at + 1]), shape.layers) for at in own]
    run: list[Any] = [torch.compile(part) if compiled else part for part in parts]
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, at, number, device) for part, at in zip(run, own, strict=True)]
    make: Callable[..., Any] = getattr(pipelining, SCHEDULES[schedule])
    made = make(stages if several else stages[0], microbatches, loss_fn=_loss)
    return Torch(place, made, parts, [torch.from_numpy(one).long() for one in batches], rate)


def _normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), scale, None, 1e-5)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
