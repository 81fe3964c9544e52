"""Uses braidax as it is installed, in an empty folder: trains, stops, goes on, and sends between two ranks.

`python .ci/use_wheel.py compiled` expects a wheel with the bindings in C, `pure` one without.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

LINES = {
    "compiled": "compiled: tcp, ucx, frame, groups, servers, records, order\n",
    "pure": "compiled: nothing; without: tcp (not compiled), ucx (not compiled), ",
}
TRAIN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, braidax as bx

jax.config.update("jax_num_cpu_devices", 4)
rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
np.savez("train.npz", x=x, y=x @ np.arange(8, dtype=np.float32))
mesh = jax.make_mesh((4,), ("data",))
source = bx.open("train.npz")
step = bx.parallelize(
    lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), optax.adam(0.1), mesh,
    {"data": bx.DataParallel()}, init=lambda key: {"w": jnp.zeros(8)}, batch=source.batch_spec(64),
)
with (
    bx.DataLoader(source, mesh, step.batch_shardings, batch_size=64, seed=0, epochs=int(sys.argv[1])) as loader,
    bx.Checkpointer("runs", bx.Every(8)) as saver,
):
    state = step.init(jax.random.key(0))
    state, loader.cursor = saver.restore((state, loader.cursor))
    assert loader.cursor.epoch == int(sys.argv[2])
    for batch in loader:
        state, metrics = step.update(state, batch, before_apply=saver.wait)
        saver.update((state, loader.cursor))
    saver.save((state, loader.cursor))
assert sys.argv[1] != "40" or np.allclose(state.params["w"], np.arange(8), atol=0.1), state.params["w"]
"""
# What ranks call is in a file: they import it.
RANKS = """
import os
import numpy as np
from braidax.gang import LocalGang


def total(comm):
    return comm.all_reduce(np.full(1000, comm.rank + 1.0))[0]


if __name__ == "__main__":
    with LocalGang(2) as gang:
        assert gang.run(total) == [3.0, 3.0]
"""


def run(folder: Path, *command: str) -> str:
    """Runs a command in a folder, without what this checkout has. **Returns:** what it wrote; an error ends all."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


def main(expected: str) -> None:
    """Uses what is installed. **Arguments:** `expected`: `compiled` or `pure`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        braidax = str(Path(sys.executable).with_name("braidax"))
        told = run(folder, braidax, "--version")
        sys.stdout.write(told)
        if LINES[expected] not in told:
            raise SystemExit(f"expected a wheel that is {expected}")
        (folder / "train.py").write_text(TRAIN)
        run(folder, sys.executable, "train.py", "10", "0")
        run(folder, sys.executable, "train.py", "40", "10")
        sys.stdout.write(run(folder, braidax, "inspect", "runs"))
        if sys.platform == "linux":
            (folder / "ranks.py").write_text(RANKS)
            run(folder, sys.executable, "ranks.py")
    sys.stdout.write("used: trained, gone on with, inspected\n")


if __name__ == "__main__":
    main(sys.argv[1])
