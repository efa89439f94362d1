"""Ablations: the parts of the papers' methods, varied one at a time."""

from experiments.lab.ablations.plots import figures as figures
from experiments.lab.ablations.report import ablation_tables as ablation_tables
from experiments.lab.ablations.report import records_in as records_in
