"""Ablations: the parts of the papers' methods, varied one at a time."""

from experiments.ablations.plots import figures as figures
from experiments.ablations.report import ablation_tables as ablation_tables
from experiments.ablations.report import records_in as records_in
