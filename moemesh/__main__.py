"""The command ``moemesh``, also as ``python -m moemesh``."""

import _signal as signal  # the module signal takes milliseconds before Ctrl-C is handled
import os
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of Ctrl-C: raises KeyboardInterrupt. An import that is interrupted can raise any
    other error instead, so during one the process exits at once."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the command of ``sys.argv``."""
    # A shell without job control starts a background command with SIGINT ignored: that stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:  # noqa: SIM105
            signal.signal(signal.SIGINT, _interrupt)
        except ValueError:  # in another thread than the main one
            pass
    try:
        from moemesh.cli import main as command

        try:
            command()
        finally:
            # While the interpreter shuts down, a KeyboardInterrupt would be printed as a
            # traceback; the default action of SIGINT ends the process.
            if signal.getsignal(signal.SIGINT) is _interrupt:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # a second Ctrl-C, while the command handled the first
        os._exit(130)


if __name__ == "__main__":
    main()
