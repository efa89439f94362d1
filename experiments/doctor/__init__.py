"""A test of this machine: `kvjax doctor` runs every operation once beside plain JAX on the CPU."""
