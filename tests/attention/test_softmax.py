"""Softmax attention keeps the promises."""

from tests.attention.suite import AttentionSuite


class TestSoftmax(AttentionSuite):
    name = "softmax"
