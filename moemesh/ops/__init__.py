"""A slow truth and a fast path for each operation that costs time or memory."""
