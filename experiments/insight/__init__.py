"""Where a method loses attention: mass and recall by layer, KV head and decode step."""

from experiments.insight.plots import figures as figures
from experiments.insight.recall import Recall as Recall
from experiments.insight.recall import Watched as Watched
from experiments.insight.recall import WatchedLayer as WatchedLayer
from experiments.insight.recall import coverage as coverage
from experiments.insight.recall import readings as readings
