"""Exact decoding: how many drafted tokens Full keeps, the speed beside Full, and whether the tokens are Full's."""

from experiments.lab.exact.report import figures as figures
