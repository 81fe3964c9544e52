"""How long it takes to cut BERT-base on this machine, profiling included."""

import time
from typing import Any

import jax

import braidax as bx
from benchmarks.harness import Report, models, say
from braidax.tasks.bert_model import Sizes

PLAN = "from the loss to a step in stages"


def plan(report: Report, sizes: Sizes, *, samples: int, microbatches: int, num_stages: int) -> None:
    """Claims how long `parallelize` takes with a pipeline. **Arguments:** `samples`: of a microbatch."""
    model = models.bert(samples * microbatches, sizes)
    mesh = jax.make_mesh((num_stages,), ("stage",), devices=jax.devices()[:num_stages])
    start = time.perf_counter()
    step: Any = bx.parallelize(
        model.loss,
        model.optimizer,
        mesh,
        {"stage": bx.parallel.Pipeline("1F1B")},
        init=model.init,
        batch=model.spec,
        microbatches=microbatches,
    )
    seconds = time.perf_counter() - start
    case = f"cutting {model.name} into {num_stages} stages"
    report.add("plan", "ours", PLAN, "s", [seconds], at=case)
    say(f"  {case}: {seconds:.1f} s\n{step.cut}")
    report.at_most("plan", seconds, 60)
    jax.clear_caches()
