"""Tests of the Long Range Arena data."""
