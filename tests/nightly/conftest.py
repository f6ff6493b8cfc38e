"""Trainings and models that several files look at."""

from tests.research.test_study import place
from tests.workbench.conftest import copy, stopped, whole

__all__ = ["copy", "place", "stopped", "whole"]
