"""``python -m tests.drill ...`` is ``moemesh drill ...`` with processes that start preloaded.

A trial then leaves out the seconds in which Python and torch are loaded (:mod:`tests.commands`).
"""

from __future__ import annotations

import sys

from tests import commands

if __name__ == "__main__":
    from moemesh.cli import main

    sys.executable = commands.python()
    sys.argv = ["moemesh", "drill", *sys.argv[1:]]
    main()
