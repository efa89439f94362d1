"""Every implementation of every kernel: checked against a reference, and timed beside the floor that its bytes set."""

from experiments.kernels.report import kernel_table as kernel_table
