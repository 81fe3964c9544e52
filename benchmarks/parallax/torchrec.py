"""TorchRec on CPU, in an environment of its own: a table that is split by rows, and moved while gradients come back."""

import json
import os
import socket
import subprocess
from pathlib import Path

import jax

from benchmarks.harness.models import Model
from benchmarks.parallax.rank import Steps

_LIMIT_SECONDS = 180.0

# One rank. The optimizer is fused into the backward pass, ids are not de-duplicated: that is for GPUs only.
_RANK = """
import json, os, socket, struct, sys, time
import numpy as np, torch, torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
path, vocabulary, width, warmup = sys.argv[1], *map(int, sys.argv[2:5])
rate, eps = map(float, sys.argv[5:7])

def sent_bytes():
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as held:
                if held.type == socket.SOCK_STREAM and held.family != socket.AF_UNIX:
                    total += struct.unpack_from("<Q", held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)[0]
        except OSError:
            pass
    return total

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = EmbeddingConfig(name="table", embedding_dim=width, num_embeddings=vocabulary, feature_names=["ids"])
module = EmbeddingCollection(device=torch.device("meta"), tables=[config])
apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": rate, "eps": eps})
sharder = EmbeddingCollectionSharder()
plan = construct_module_sharding_plan(
    module, {"table": row_wise()}, local_size=size, world_size=size, device_type="cpu", sharder=sharder
)
model = DistributedModelParallel(
    module,
    env=ShardingEnv.from_process_group(dist.group.WORLD),
    device=torch.device("cpu"),
    plan=ShardingPlan(plan={"": plan}),
    sharders=[sharder],
    init_data_parallel=False,
)
for table in model.state_dict().values():
    for shard in table.local_shards():
        rows = shard.metadata.shard_offsets[0] + torch.arange(len(shard.tensor))[:, None]
        shard.tensor.copy_((rows * 31 + torch.arange(width) * 17) % 101 / 101 - 0.5)
ids = torch.from_numpy(np.load(path)[:, rank]).long()  # [steps, sequences, ids of each]
seconds, losses, before = [], [], 0
for step, own in enumerate(ids):
    dist.barrier()
    before = sent_bytes() if step == warmup else before
    start = time.perf_counter()
    lengths = torch.full((len(own),), own.shape[1])
    rows = model(KeyedJaggedTensor(keys=["ids"], values=own.ravel(), lengths=lengths))["ids"].values()
    loss = (rows**2).sum() / 2
    loss.backward()
    dist.barrier()
    seconds.append(time.perf_counter() - start)
    losses.append(loss.item())
num_bytes = (sent_bytes() - before) / (len(ids) - warmup)
print(json.dumps([seconds[warmup:], losses, num_bytes]), flush=True)
dist.destroy_process_group()
"""


def take_steps(python: str, model: Model, ids: Path, num_processes: int, warmup: int) -> list[Steps]:
    """Lets processes of TorchRec train a `lookup`, and returns what each did; each loss is of its own ids.

    **Arguments:** `python`: of the environment. `ids`: a file with the ids, `[steps, processes, sequences, ids]`, of
    which the first `warmup` steps are not timed.
    """
    assert model.adagrad is not None, "a lookup is moved by Adagrad"
    table = jax.eval_shape(model.init, jax.random.key(0))[0]["table"]
    rate, _, eps = model.adagrad
    arguments = [str(value) for value in (ids, *table.shape, warmup, rate, eps)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_processes), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [python, "-W", "ignore", "-c", _RANK, *arguments],
            env={**os.environ, **place, "RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    try:
        told = [process.communicate(timeout=_LIMIT_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(running, told, strict=True):
        if process.returncode:
            raise SystemExit(f"{python} with TorchRec ended with {process.returncode}:\n{errors[-2000:]}")
    return [Steps(*json.loads(said.splitlines()[-1])) for said, _ in told]
