"""How long it takes to sum small arrays over the devices of a mesh, in each of many ways."""

from experiments.collectives.plots import figures as figures
from experiments.collectives.report import sum_tables as sum_tables
