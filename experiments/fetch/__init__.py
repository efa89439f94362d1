"""``kvjax fetch``: download a model, and nothing else; ``kvjax ls models``: the models that have a name."""

from experiments.fetch.found import Found as Found
from experiments.fetch.found import find as find
