"""Measuring attention: correctness first, then time (interleaved), memory (fresh processes) and error."""
