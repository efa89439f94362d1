"""Whether a search by clusters finds the best keys after a long generation as it does at its beginning."""

from experiments.drift.report import figures as figures
from experiments.drift.run import run_drift as run_drift
from experiments.drift.settings import DriftSettings as DriftSettings
