"""A corpus of mistakes: command lines that end in one message and exit code 2."""
