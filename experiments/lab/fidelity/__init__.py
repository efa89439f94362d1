"""How far a method's next-token distributions are from Full's along the same text, in nats, through the decode path."""

from experiments.lab.fidelity.plots import figures as figures
from experiments.lab.fidelity.report import fidelity_tables as fidelity_tables
