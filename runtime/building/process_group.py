"""A build process with all that it started: they stop, go on and end together."""

from __future__ import annotations

import os
import signal
import subprocess


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started, such as C++ compilers: they outlive a worker that was killed."""
    if os.name == "nt" and process.poll() is None:
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
    elif not signal_group(process.pid, "SIGKILL"):
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def signal_group(leader: int, name: str) -> bool:
    """Send a signal to the process group of a worker; False where the system has no such thing."""
    number = getattr(signal, name, None)
    if number is None or not hasattr(os, "killpg"):
        return False
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # macOS forbids what is dead
        return False
    return True
