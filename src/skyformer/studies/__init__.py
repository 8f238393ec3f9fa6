"""The paper's experiments and all benchmarks: each is a file that says what to measure and how to show it."""

from skyformer.studies.base import Study, option
from skyformer.studies.registry import list_studies, register_study, study_class
from skyformer.studies.run import run_study

__all__ = ["Study", "list_studies", "option", "register_study", "run_study", "study_class"]
