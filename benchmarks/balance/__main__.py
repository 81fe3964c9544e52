"""Balance: whether what is said of a step's time is so, and whether what is tuned by it is the best mix.

`attribution`: 20 ms are injected into each lane of a real run, and have to be found there and nowhere else. `adapt`: a
disk that slows down. `tuning_cost`: a run with a tuner and without. `plans`: how long ranking takes.
`searched`: what a search predicts, beside what is measured. `tuned`: a mix that a few trials find, beside others.
`interaction`: which overlaps are in each other's way, predicted, beside what is measured.
"""

import jax

from benchmarks.balance import adapting, injecting, interacting, predicting, searched, tuned
from benchmarks.harness import Report, arguments, run, say

CASES = {
    "attribution": injecting.measure,
    "adapt": adapting.measure_adapt,
    "tuning_cost": adapting.measure_cost,
    "plans": predicting.measure_plans,
    "searched": searched.measure_searched,
    "tuned": tuned.measure_tuned,
    "interaction": interacting.measure_interaction,
}


def main() -> int:
    parser = arguments("balance", __doc__ or "", tuple(CASES))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    report = Report(options)
    for name in options.only or CASES:
        say(f"{name} …")
        CASES[name](report, quick=options.quick)
    return report.finish()


if __name__ == "__main__":
    run(main)
