"""JPEG files of 500 x 375 pixels, delivered as 224 x 224."""

import functools

import braidax as bx
from benchmarks.shuffle import inputs, systems
from benchmarks.shuffle.cases import MOSAIC, Bench, ours
from benchmarks.shuffle.timing import Make, Timed

SIZE = 224


def photos(bench: Bench) -> None:
    """All decode every pixel; ours at a reduced scale is a row of its own, and in no claim."""
    path, size = inputs.write_photos(bench.folder, bench.scale.num_photos), 64
    case = f"photos ({inputs.jpeg_bytes(path) >> 10} KiB)"
    full, scaled = (bx.open(path, image_size=(SIZE, SIZE), decode=decode) for decode in ("exact", "fast"))
    pictures = systems.Photos(path, SIZE)
    mine: dict[str, Make] = {
        "braidax": ours(full, size, threads=bench.threads),
        "braidax.torch, PIL": functools.partial(systems.ours_for_torch, pictures, size),
        "braidax.torch, image folder": functools.partial(systems.ours_for_torch, full, size),
    }
    less: dict[str, Make] = {"braidax, reduced scale": ours(scaled, size, threads=bench.threads)}
    peers = photo_peers(bench, size)
    running = {
        name: Timed(make, size, epoch=len(pictures) // size, seconds=2 * bench.scale.seconds)
        for name, make in (mine | less | peers).items()
    }
    bench.measure(case, {**running, **bench.mosaic(case, "photos", path, size)})
    bench.claim("photos_exact", case, "braidax", [*peers, *MOSAIC], at_least=1.6)
    in_torch = [name for name in peers if name.startswith("torch")]
    bench.claim("torch_photos", case, "braidax.torch, image folder", in_torch, at_least=1.3)
    bench.claim("torch_photos_as_they_are", case, "braidax.torch, PIL", in_torch, at_least=1)


def photo_peers(bench: Bench, batch_size: int) -> dict[str, Make]:
    """Returns the peers that decode and read ahead, with as many threads or processes as there are cores, or more."""
    path = inputs.write_photos(bench.folder, bench.scale.num_photos)
    pictures = systems.Photos(path, SIZE)
    peers: dict[str, Make] = {
        "tf.data": functools.partial(systems.tf_photos, path, batch_size, size=SIZE),
    }
    for workers in bench.scale.workers:
        peers[f"torch, PIL, {workers} workers"] = functools.partial(
            systems.torch_loader, pictures, batch_size, workers=workers
        )
    for threads in sorted({bench.threads, bench.scale.grain_threads[0]}):
        peers[f"Grain, PIL, {threads} threads"] = functools.partial(
            systems.grain_elements, pictures, batch_size, threads=threads
        )
    return peers
