"""A process that disturbs: for each line that it reads it keeps a core busy (`burn SECONDS`) or writes (`write 0`)."""

import os
import signal
import sys
import tempfile
import time

_WRITTEN_BYTES = 16 * 2**20


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    content = bytes(_WRITTEN_BYTES)
    with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
        for line in sys.stdin:
            kind, seconds = line.split()
            end = time.perf_counter() + float(seconds)
            if kind == "write":
                file.seek(0)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            else:
                while time.perf_counter() < end:
                    pass


if __name__ == "__main__":
    main()
