"""Skyformer keeps the promises, with every sampler, with both solvers and on the softmax kernel."""

from tests.attention.suite import AttentionSuite


class TestSkyformer(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "gamma": 0.1}


class TestSkyformerUniform(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "landmarks": "uniform", "gamma": 0.1}


class TestSkyformerProbe(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "landmarks": "probe", "gamma": 0.1}


class TestSkyformerLeverage(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "landmarks": "leverage", "gamma": 0.1}


class TestSkyformerSegmentMeans(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "landmarks": "segment_means", "gamma": 0.1}


class TestSkyformerSchulz(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "solver": "schulz", "gamma": 0.1}


class TestSkyformerOfSoftmax(AttentionSuite):
    name = "skyformer"
    options = {"num_landmarks": 12, "kernel": "softmax", "gamma": 0.1}
