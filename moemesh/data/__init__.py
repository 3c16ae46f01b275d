"""Text into token ids, and ids into samples in an order that no layout changes."""
