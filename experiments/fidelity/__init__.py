"""How far a method's next-token distributions are from Full's along the same text, in nats, through the decode path."""

from experiments.fidelity.distance import Distance as Distance
from experiments.fidelity.distance import distance as distance
from experiments.fidelity.distance import follow_text as follow_text
from experiments.fidelity.plots import figures as figures
from experiments.fidelity.programs import Programs as Programs
from experiments.fidelity.programs import shared_room as shared_room
from experiments.fidelity.report import fidelity_tables as fidelity_tables
from experiments.fidelity.settings import FidelitySettings as FidelitySettings
from experiments.fidelity.summary import summary as summary
from experiments.fidelity.texts import Texts as Texts
from experiments.fidelity.texts import answers as answers
from experiments.fidelity.texts import make_texts as make_texts
from experiments.fidelity.texts import passages as passages
from experiments.fidelity.texts import prose as prose
