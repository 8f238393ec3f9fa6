"""Kernelized Attention keeps the promises."""

from tests.attention.suite import AttentionSuite


class TestKernelized(AttentionSuite):
    name = "kernelized"


class TestKernelizedMatern(AttentionSuite):
    name = "kernelized"
    options = {"kernel": "matern"}
