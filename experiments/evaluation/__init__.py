"""Evaluation of methods: cells of suites, answers and scores in a result folder, paired comparison, sweeps, plots."""
