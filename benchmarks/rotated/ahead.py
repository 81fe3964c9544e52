"""Steps compiled for H100s and TPUs that are not here: what is sent under no product, and memory."""

from dataclasses import replace

import jax
from jax.sharding import AxisType

from benchmarks.harness import Report, say, systems
from benchmarks.harness.compilers import why_absent
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import HELD, OURS
from benchmarks.rotated import ways
from benchmarks.rotated.ways import IN_PLACE, RTP
from braidax.program import exposed_part, find_target, total_sent

WAITED, PEAK = "sent while no matrices are multiplied", "memory of a device"


def many(report: Report, target: str, shape: Shape) -> None:
    """Ours rotated beside ours fully sharded, for more chips than the claims are about."""
    if why_absent(target):
        return
    found = find_target(target).devices
    case = f"GPT-2, {shape.layers} layers of width {shape.width}, {target}"
    along = jax.make_mesh((len(found),), ("data",), axis_types=(AxisType.Auto,), devices=found)
    for way in (RTP, OURS):
        step = ways.uncompiled(way, replace(shape, batch=shape.batch * len(found)), along)
        compiled = step.compile_for(target)
        sent_bytes = sum(total_sent(compiled.collectives).values())
        _add(report, case, way, sent_bytes, exposed_part(compiled.collectives), compiled.peak_bytes)
    jax.clear_caches()


def chips(report: Report, target: str, shape: Shape, most_waited: float) -> None:
    """Ours rotated beside ours fully sharded, and XLA's; on GPUs, where that compiles fast, in place too.

    **Arguments:** `most_waited`: of the bytes, as is claimed.
    """
    chip, _, _ = target.partition(":")
    if why := why_absent(target):
        report.not_measured(f"overlap_{chip}", f"<= {most_waited:g}", why)
        report.not_measured(f"peak_{chip}", "<= 0.85", why)
        return
    found = find_target(target).devices
    case = f"GPT-2, {shape.layers} layers of width {shape.width}, {target}"
    whole = replace(shape, batch=shape.batch * len(found))
    peaks: dict[str, float] = {}
    waited: dict[str, float] = {}
    for way in (RTP, OURS, IN_PLACE) if chip == "h100" else (RTP, OURS):
        compiled = ways.uncompiled(way, whole, ways.mesh((len(found),))).compile_for(target)
        peaks[way], waited[way] = compiled.peak_bytes, exposed_part(compiled.collectives)
        _add(report, case, way, sum(total_sent(compiled.collectives).values()), waited[way], peaks[way])
    along = jax.make_mesh((len(found),), ("data",), axis_types=(AxisType.Auto,), devices=found)
    like = ways.uncompiled(OURS, whole, along)
    peer = systems.held(whole, along, like)
    peaks[HELD] = peer.peak_bytes(like)
    sent = peer.collectives()
    _add(report, case, HELD, sum(total_sent(sent).values()), exposed_part(sent), peaks[HELD])
    report.at_most(f"overlap_{chip}", waited[RTP], most_waited)
    report.at_most(f"peak_{chip}", peaks[RTP] / min(peaks[OURS], peaks[HELD]), 0.85)
    jax.clear_caches()


def _add(report: Report, case: str, way: str, sent_bytes: float, waited: float, peak_bytes: float) -> None:
    report.add(case, way, "sent by a device, a step", "MB", [sent_bytes / 1e6])
    report.add(case, way, WAITED, "%", [100 * waited])
    report.add(case, way, PEAK, "MiB", [peak_bytes / 2**20])
    say(f"  {case}, {way}: {100 * waited:.2f} % of {sent_bytes / 1e6:.0f} MB, peak {peak_bytes / 2**20:.0f} MiB")
