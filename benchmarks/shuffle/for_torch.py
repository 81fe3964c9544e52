"""The drop-in for torch on columns of fixed width: a table of Hugging Face, and tensors in memory."""

import functools

import numpy as np

from benchmarks.shuffle import inputs, systems
from benchmarks.shuffle.cases import Bench, hugging_face
from benchmarks.shuffle.timing import Make, Timed

TABLE, TENSORS = "torch, table of tokens", "torch, tensors in memory"


def for_torch(bench: Bench) -> None:
    """Records of 512 tokens as tensors: int64 of the table, as Hugging Face makes them; int32 of those in memory."""
    npy, size = inputs.write_tokens(bench.folder, bench.scale.num_tokens), 2048
    folder = inputs.write_tokens_for_hugging_face(npy)
    inputs.bring_to_page_cache(folder)
    hf = functools.cache(lambda: hugging_face(folder, "torch"))
    tensors = functools.cache(lambda: systems.tensors(np.load(npy)))
    table: dict[str, Make] = {"braidax.torch, HF": lambda n: systems.ours_for_torch(hf(), size, n)}
    memory: dict[str, Make] = {
        "braidax.torch, tensors": lambda n: systems.ours_for_torch(tensors(), size, n),
        "torch, whole batches, 0 workers": lambda n: systems.torch_whole_batches(tensors(), size, n),
    }
    for workers in bench.scale.workers:
        table[f"torch, HF, {workers} workers"] = functools.partial(
            lambda workers, n: systems.torch_loader(hf(), size, n, workers=workers), workers
        )
        memory[f"torch, tensors, {workers} workers"] = functools.partial(
            lambda workers, n: systems.torch_loader(tensors(), size, n, workers=workers), workers
        )
    epoch = bench.scale.num_tokens // size
    for case, all_of_them in ((TABLE, table), (TENSORS, memory)):
        bench.measure(
            case,
            {name: Timed(make, size, epoch=epoch, seconds=bench.scale.seconds) for name, make in all_of_them.items()},
        )
    bench.claim("torch_tokens", TABLE, "braidax.torch, HF", [name for name in table if name[0] == "t"], at_least=3)
    plain = [name for name in memory if name.startswith("torch, tensors")]
    whole = [name for name in memory if name.startswith("torch, whole")]
    bench.claim("torch_tensors", TENSORS, "braidax.torch, tensors", plain, at_least=3)
    bench.claim("torch_whole_batches", TENSORS, "braidax.torch, tensors", whole, at_least=1)
