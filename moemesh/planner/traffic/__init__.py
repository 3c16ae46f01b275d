"""Bytes that a layout moves: closed forms for any layout, exact ledgers for our own runs."""
