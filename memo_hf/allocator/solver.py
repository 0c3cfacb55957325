"""Places a recorded step in a process of its own, beside training.

Started by `planned`. The process gets a trace file and leaves a placement file; it loads no torch, and never the user's
script, which it would run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memo_hf.errors import PlanError
from memo_hf.planner.bilevel import plan_step
from memo_hf.planner.problem import Placement, read_placement, write_placement
from memo_hf.planner.trace import Trace, read_trace, write_trace
from memo_hf.planner.verify import verify

_GRACE_SECONDS = 60  # over the time limit, for start-up and greedy plans of very large steps


class Solver:
    """One solving process. `poll` until it gives a placement; `close` in any case.

    Args:
        trace: The step to place.
        time_limit_seconds: How long to search for better addresses.
    """

    def __init__(self, trace: Trace, time_limit_seconds: float):
        self.seconds = 0.0
        self._trace = trace
        self._folder = tempfile.TemporaryDirectory(prefix="memo_hf-")
        folder = Path(self._folder.name)
        self._answer, self._errors = folder / "placement.csv", folder / "errors.txt"
        write_trace(trace, folder / "trace.csv")
        # sys.path as it is here, since this package need not be installed.
        code = f"import sys; sys.path[:] = {sys.path!r}; from memo_hf.allocator.solver import main; main()"
        arguments = [str(folder / "trace.csv"), str(self._answer), str(time_limit_seconds)]
        self._began = time.monotonic()
        self._deadline = self._began + time_limit_seconds + _GRACE_SECONDS
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def poll(self) -> Placement | None:
        """The verified placement, or None while the process works.

        Raises:
            PlanError: it failed, or takes far longer than it may.
        """
        status = self._process.poll()
        if status is None:
            if time.monotonic() < self._deadline:
                return None
            raise PlanError(f"planning addresses took over {time.monotonic() - self._began:.0f} seconds and was ended")
        self.seconds = time.monotonic() - self._began
        if status != 0:
            last = self._errors.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise PlanError(f"planning addresses failed with status {status}: {last[0]}")
        found = read_placement(self._answer)
        return verify(Placement(self._trace.problem(), found.offsets, found.method, self.seconds))

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended, after waiting so long for it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends the process and removes its files."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def main() -> None:
    """The process: trace file, placement file and seconds are its arguments."""
    os.nice(10)  # training comes first
    trace, answer, seconds = sys.argv[1:]
    write_placement(plan_step(read_trace(trace), time_limit=float(seconds)), answer)
