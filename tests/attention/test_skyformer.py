"""Softmax, Kernelized Attention and Skyformer, with every sampler, both solvers and other kernels."""

from typing import ClassVar

from skyformer.testing.suite import AttentionSuite, OptionSuite

SMALL = {"num_landmarks": 12, "gamma": 0.1}


class TestSoftmax(AttentionSuite):
    name = "softmax"


class TestKernelized(AttentionSuite):
    name = "kernelized"


class TestKernelizedMatern(OptionSuite):
    name = "kernelized"
    options: ClassVar = {"kernel": "matern"}


class TestSkyformer(AttentionSuite):
    name = "skyformer"
    options: ClassVar = SMALL


class TestSkyformerOfSoftmax(AttentionSuite):
    name = "skyformer"
    options: ClassVar = {**SMALL, "kernel": "softmax"}


class TestSkyformerUniform(OptionSuite):
    name = "skyformer"
    options: ClassVar = {**SMALL, "landmarks": "uniform"}


class TestSkyformerProbe(OptionSuite):
    name = "skyformer"
    options: ClassVar = {**SMALL, "landmarks": "probe"}


class TestSkyformerLeverage(OptionSuite):
    name = "skyformer"
    options: ClassVar = {**SMALL, "landmarks": "leverage"}


class TestSkyformerSegmentMeans(OptionSuite):
    name = "skyformer"
    options: ClassVar = {**SMALL, "landmarks": "segment_means"}


class TestSkyformerSchulz(OptionSuite):
    name = "skyformer"
    options: ClassVar = {**SMALL, "solver": "schulz"}
