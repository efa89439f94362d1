"""The generated pages of the documentation: methods, records, tables and figures, from docstrings and records alone."""

from experiments.lab.site.pages import draw_figures as draw_figures
from experiments.lab.site.pages import write_pages as write_pages
from experiments.lab.site.pages import write_text as write_text
