"""The speed of decoding and prefill: time, bytes, the floor that the bytes set, and the ratio of the time to the floor."""

from experiments.speed.device_time import Seconds as Seconds
from experiments.speed.device_time import loop_seconds as loop_seconds
from experiments.speed.kernels.report import kernel_table as kernel_table
from experiments.speed.plots import figures as figures
from experiments.speed.report import offload_tables as offload_tables
from experiments.speed.report import speed_tables as speed_tables
from experiments.speed.roofline import Bandwidth as Bandwidth
from experiments.speed.variants import uneven_scores as uneven_scores
