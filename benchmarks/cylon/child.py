"""The process of one system: reads requests as lines of JSON, and answers each with one.

Only what the system itself needs is imported here: peers have an environment of their own.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cylon.systems.system import System, UnsupportedError, opened


def main() -> None:
    kind, options, num_cores = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cores])
        try:
            system = opened(kind, options, num_cores)
        except ImportError as error:
            _answer(answers, {"missing": str(error).partition(" (")[0]})  # without the place of a file
            return
        _answer(answers, {"ready": True})
        try:
            for line in sys.stdin:
                _answer(answers, _answered(system, json.loads(line)))
        finally:
            system.close()


def _answered(system: System, asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if asked["do"] == "load":
            system.load(asked["files"], memory=asked["memory"])
            return {}
        start = time.perf_counter()
        result = system.run(asked["task"], scale=asked["scale"], to_caller=asked["to_caller"])
        seconds = time.perf_counter() - start
        if asked["out"]:
            system.write(result, Path(asked["out"]))
        return {"seconds": seconds}
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    except Exception:  # noqa: BLE001  (it is told to the one who asked)
        return {"error": traceback.format_exc()}


def _answer(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
