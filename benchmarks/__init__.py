"""What measures the library's own claims, each against a bound or a peer in the same run.

``python -m benchmarks VERB`` in a checkout, or ``python -m benchmarks.VERB``; with --help, what
each verb measures.
"""
