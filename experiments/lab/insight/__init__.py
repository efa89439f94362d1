"""Where a method loses attention: mass and recall by layer, KV head and decode step."""

from experiments.lab.insight.plots import figures as figures
from experiments.lab.insight.recall import Recall as Recall
from experiments.lab.insight.recall import Watched as Watched
from experiments.lab.insight.recall import WatchedLayer as WatchedLayer
from experiments.lab.insight.recall import coverage as coverage
from experiments.lab.insight.recall import readings as readings
