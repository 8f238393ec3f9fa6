"""Sequences in pieces: groups of one to four processes with gloo."""
