"""``python -m benchmarks VERB``: one benchmark."""

from benchmarks.application import main

if __name__ == "__main__":
    main()
