"""The command ``moemesh``, also as ``python -m moemesh``."""

import os
import signal
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. An interrupted import can raise any error, so there the process ends at once."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the command of ``sys.argv``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, _interrupt)
    from moemesh.cli import main as command

    command()


if __name__ == "__main__":
    main()
