"""``python -m moemesh`` is the command ``moemesh``."""

from moemesh.cli import main

if __name__ == "__main__":
    main()
