"""The studies and the benchmarks by name: the modules of `studies/` and of `studies/benchmarks/`."""

from __future__ import annotations

from skyformer.registry import Registry
from skyformer.studies.base import StudyClass

# `demo`, `overview` and `tasks` register nothing and need the extra "train".
STUDIES: Registry[StudyClass] = Registry("study", "skyformer.studies", skip=("benchmarks", "demo", "overview", "tasks"))
BENCHMARKS: Registry[StudyClass] = Registry("benchmark", "skyformer.studies.benchmarks")

register_study = STUDIES.register
list_studies = STUDIES.names
study_class = STUDIES.get
register_benchmark = BENCHMARKS.register
