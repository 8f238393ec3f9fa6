"""Tests that other projects wrote, run on this package: `make test-outside`."""
