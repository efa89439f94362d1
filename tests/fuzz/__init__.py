"""Random configurations against the laws of methods, and bad inputs against the checks: `python -m tests.fuzz`."""
