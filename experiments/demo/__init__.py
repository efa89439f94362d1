"""``kvjax demo``: find needles in prose under each method and budget, as a table, a figure and a record."""

from experiments.demo.report import figures as figures
