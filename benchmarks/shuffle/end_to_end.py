"""Training where loading is the bottleneck: ours, peers that fetch ahead, and serial ordered fetching."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import braidax as bx
from benchmarks.shuffle import inputs, store, systems
from benchmarks.shuffle.cases import Bench, ours, stored
from benchmarks.shuffle.photos import SIZE, photo_peers
from benchmarks.shuffle.slow_storage import in_store, store_peers
from benchmarks.shuffle.timing import Make, Timed
from benchmarks.shuffle.training import Trainer, language_model, vision_model

SEQUENCE = 32  # tokens of a record that the language model sees: of more a step takes longer than fetching them
LANGUAGE, VISION, SERIAL = "train, language, 5 ms store", "train, vision, JPEG files", "serial ordered"


def training(bench: Bench) -> None:
    """Two small models end to end."""
    _language(bench)
    _vision(bench)


def _language(bench: Bench) -> None:
    npy, size = inputs.write_tokens(bench.folder, bench.scale.num_tokens), 16

    def sequences(batch: Any) -> Any:
        tokens = batch["data"] if isinstance(batch, dict) else batch.view(np.uint16)
        return tokens[:, :SEQUENCE]

    with store.serve(bench.folder, delay_seconds=0.005) as address:
        records = in_store(address, npy)
        peers = {**store_peers(bench, records, size), SERIAL: functools.partial(systems.one_by_one, records, size)}
        makes: dict[str, Make] = {"braidax": ours(stored(f"{address}/{npy.name}"), size), **peers}
        _train(bench, LANGUAGE, makes, Trainer(language_model(SEQUENCE), sequences), size, len(records) // size)
    bench.claim("train_prefetch_language", LANGUAGE, "braidax", list(peers), at_least=1.15)


def _vision(bench: Bench) -> None:
    path, size = inputs.write_photos(bench.folder, bench.scale.num_photos), 32

    def images(batch: Any) -> Any:
        found = batch["image"] if isinstance(batch, dict) else batch
        return found.numpy() if hasattr(found, "numpy") else found

    full = bx.open(path, image_size=(SIZE, SIZE), decode="exact")
    serial = functools.partial(systems.one_by_one, systems.Photos(path, SIZE), size)
    peers: dict[str, Make] = {**photo_peers(bench, size), SERIAL: serial}
    makes: dict[str, Make] = {"braidax": ours(full, size, threads=bench.threads), **peers}
    _train(bench, VISION, makes, Trainer(vision_model(SIZE), images), size, bench.scale.num_photos // size)
    bench.claim("train_prefetch_vision", VISION, "braidax", list(peers), at_least=1.15)


def _train(bench: Bench, case: str, makes: Mapping[str, Make], trainer: Trainer, size: int, epoch: int) -> None:
    running: dict[str, Callable[[], float]] = {
        name: Timed(make, size, epoch=epoch, seconds=3 * bench.scale.seconds, use=trainer.step, finish=trainer.finish)
        for name, make in makes.items()
    }
    bench.measure(case, running, rounds=min(bench.scale.rounds, 3))
