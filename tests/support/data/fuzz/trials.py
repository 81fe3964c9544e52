"""The process in which damaged data sets are tried, and another one after each that it does not survive."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.data.fuzz.trial import FINE


class Trials:
    """Tries mutations in a process of its own. **Arguments:** `folder`: for its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Any = None  # a Popen
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)

    def failures(self, name: str, numbers: Sequence[int]) -> list[str]:
        """Returns which mutations of a case came to no good end, and how."""
        found: list[str] = []
        left = list(numbers)
        while left:
            process = self._running()
            process.stdin.write(json.dumps([name, left]) + "\n")
            process.stdin.flush()
            number, what = left[0], ""
            while left:
                line = process.stdout.readline()
                if not line:
                    found.append(f"{name} {number} ({what or 'as it was written'}): {self._end()}")
                    left = left[left.index(number) + 1 :] if what else []
                    break
                event, number, said = json.loads(line)
                if event == "begins":
                    what = said
                    continue
                left.remove(number)
                if said not in FINE:
                    found.append(f"{name} {number} ({what}): {said}")
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._end()
        self._errors.close()

    def _running(self) -> Any:
        if self._process is None:
            environment = {
                **os.environ,
                "BRAIDAX_CACHE": str(self._folder / "cache"),
                "JAX_PLATFORMS": "cpu",
                "MALLOC_ARENA_MAX": "2",  # an arena reserves 64 MiB of the addresses that are limited
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.data.fuzz.child", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        return self._process

    def _end(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        code = process.wait(60)
        process.stdin.close()
        process.stdout.close()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-500:]
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return f"the process ended ({'a hang' if name == 'SIGALRM' else name}): {said}"
