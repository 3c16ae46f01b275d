"""Expert parallelism: the ways of moving tokens to the ranks that hold their experts."""
