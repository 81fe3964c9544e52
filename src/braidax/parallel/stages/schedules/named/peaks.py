"""How many activations each named schedule holds at most, by the formulas of its paper."""

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.operations import Schedule


def peak_formula(schedule: Schedule, device: int) -> int:
    """Returns the most activations, each of one microbatch and stage, that live on a device by the formula of the
    paper.

    GPipe: all. 1F1B, PipeDream, 2BW: as many as devices from this one on (Narayanan et al. 2019, 2021). Interleaved:
    the warm-up of Narayanan et al. 2021 (SC), and one. Eager1F1B: the warm-up of Zhuang et al. 2023, and one. ZB-H1:
    one a device everywhere (Qi et al. 2024a, section 2.1). ZB-V, V-Half, V-Min: 1, 1/2 and 1/3 of 1F1B's (Qi et al.
    2024b, section 3; (p + 2) // 2 and (p + 4) // 3 microbatches of two stages). DualPipeV: one more than stages
    (DeepSeek-AI 2024, table 2).

    **Raises:** `ArgumentError` for a schedule without a name of those.
    """
    devices, count = schedule.num_devices, schedule.num_microbatches
    chunks = schedule.num_stages // devices
    behind = devices - device
    formulas = {
        "GPipe": count,
        "1F1B": behind,
        "PipeDream": behind,
        "PipeDream, vertical sync": behind,
        "2BW": behind,
        "Interleaved1F1B": 2 * (behind - 1) + (chunks - 1) * devices + 1 if chunks > 1 else behind,
        "Eager1F1B": 2 * behind - 1,
        "ZB-H1": devices,
        "ZB-V": 2 * devices,
        "V-Half": 2 * ((devices + 2) // 2),
        "V-Min": 2 * ((devices + 4) // 3),
        "DualPipeV": 2 * devices + 1,
    }
    if schedule.name not in formulas:
        raise ArgumentError(f"schedule {schedule.name!r} has no formula; those of {', '.join(formulas)} are known")
    return min(formulas[schedule.name], count * chunks)
