"""How far a method's next-token distributions are from Full's along the same text, in nats, through the decode path."""

from experiments.lab.fidelity.distance import Distance as Distance
from experiments.lab.fidelity.distance import distance as distance
from experiments.lab.fidelity.distance import follow_text as follow_text
from experiments.lab.fidelity.distance import lead as lead
from experiments.lab.fidelity.distance import share_rooms as share_rooms
from experiments.lab.fidelity.plots import figures as figures
from experiments.lab.fidelity.report import fidelity_tables as fidelity_tables
from experiments.lab.fidelity.settings import FidelitySettings as FidelitySettings
from experiments.lab.fidelity.summary import summary as summary
from experiments.lab.fidelity.texts import Texts as Texts
from experiments.lab.fidelity.texts import answers as answers
from experiments.lab.fidelity.texts import make_texts as make_texts
from experiments.lab.fidelity.texts import passages as passages
