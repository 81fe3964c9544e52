"""What needs a process of its own: memory over an epoch, the start of a source of 10^9 records, and MosaicML Streaming.

Streaming pins versions of NumPy and xxhash that the other peers exclude, so it lives in an environment of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_MEMORY = """
import json, sys, jax, braidax as bx
from jax.sharding import PartitionSpec
def rss():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
mesh = jax.make_mesh((1,), ("data",))
loader = bx.DataLoader(bx.open(sys.argv[1]), mesh, PartitionSpec("data"), batch_size=int(sys.argv[2]))
early, late = 0, 0
for number, batch in enumerate(loader):
    if number == len(loader) // 20:
        early = rss()
    late = rss() if number % 50 == 0 or number == len(loader) - 1 else late
print(json.dumps({"early": early, "late": late}))
"""

_START = """
import json, sys, time, jax, braidax as bx
from jax.sharding import PartitionSpec
def rss():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
mesh = jax.make_mesh((1,), ("data",))
jax.block_until_ready(jax.numpy.zeros(8))
before, start = rss(), time.perf_counter()
source = bx.data.open_tokens(sys.argv[1], "uint16", sequence_length=8)
assert len(source) == 10**9, len(source)
batch = next(iter(bx.DataLoader(source, mesh, PartitionSpec("data"), batch_size=256)))
jax.block_until_ready(batch)
print(json.dumps({"seconds": time.perf_counter() - start, "bytes": rss() - before}))
"""

_STREAMING = """
import io, json, os, re, shutil, sys, time, torch
library = torch.library.Library("torchvision", "DEF")
while True:  # torchvision's compiled part needs another build of torch; Streaming imports it, but reads without it
    try:
        import torchvision
        break
    except RuntimeError as error:
        library.define(re.search(r"torchvision::(\\w+)", str(error))[1] + "(Tensor x) -> Tensor")
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
import numpy as np, streaming, streaming.base.util
from PIL import Image
from pathlib import Path
streaming.base.util.clean_stale_shared_memory()  # what a run before this one left behind would let this one hang
kind, source, folder, shuffle, batch_size, seconds = sys.argv[1:7]

def samples():
    if kind == "tokens":
        array = np.load(source, mmap_mode="r")
        yield {"tokens": f"ndarray:{array.dtype}:{array.shape[1]}"}
        yield from ({"tokens": np.array(row)} for row in array)
    elif kind == "texts":
        yield {"text": "str"}
        yield from ({"text": line} for line in Path(source).read_text().splitlines())
    else:
        yield {"image": "bytes"}
        yield from ({"image": file.read_bytes()} for file in sorted(Path(source).rglob("*.jpg")))

def collate(batch):
    if kind == "tokens":
        return np.stack([sample["tokens"] for sample in batch])
    if kind == "texts":
        texts = np.array([sample["text"].encode() for sample in batch], "S2048")
        return texts.view(np.uint8).reshape(len(texts), 2048)
    images = [Image.open(io.BytesIO(sample["image"])).convert("RGB") for sample in batch]
    return np.stack([np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR)) for image in images])

if not os.path.exists(folder):
    rows, unfinished = samples(), f"{folder}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with streaming.MDSWriter(out=unfinished, columns=next(rows)) as writer:
        for row in rows:
            writer.write(row)
    os.rename(unfinished, folder)
data = streaming.StreamingDataset(
    local=folder, shuffle=True, shuffle_algo=shuffle, batch_size=int(batch_size), num_canonical_nodes=1
)
loader = torch.utils.data.DataLoader(data, int(batch_size), drop_last=True, collate_fn=collate)
batches = (batch for _ in iter(int, 1) for batch in loader)
for _ in range(3):  # so that its order is made; its main process reads nothing ahead
    next(batches)
count, start = 0, time.perf_counter()
while time.perf_counter() - start < float(seconds):
    next(batches)
    count += 1
print(json.dumps({"rate": count * int(batch_size) / (time.perf_counter() - start)}), flush=True)
os._exit(0)
"""


def memory(path: Path, batch_size: int) -> tuple[float, float]:
    """Returns the resident bytes after 5 % of an epoch and at its end, in a process of its own."""
    found = _run([sys.executable, "-c", _MEMORY, str(path), str(batch_size)])
    return found["early"], found["late"]


def start_of_a_billion(folder: Path) -> tuple[float, float]:
    """Returns seconds from opening 10^9 records (a sparse file) to the first batch, and the bytes that took."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "billion.bin"
        with path.open("wb") as file:
            file.truncate(10**9 * 8 * 2)
        found = _run([sys.executable, "-c", _START, str(path)])
    return found["seconds"], found["bytes"]


def streaming(
    python: str, kind: str, source: Path, folder: Path, *, shuffle: str, batch_size: int, seconds: float
) -> float:
    """Returns records per second of MosaicML Streaming, run by the Python of its own environment.

    **Arguments:** `kind`: of `source`: `"tokens"` (npy), `"texts"` (a text a line) or `"photos"` (a folder of JPEGs).
    """
    arguments = [kind, str(source), str(folder), shuffle, str(batch_size), str(seconds)]
    return _run([python, "-W", "ignore", "-c", _STREAMING, *arguments])["rate"]


def _run(command: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
