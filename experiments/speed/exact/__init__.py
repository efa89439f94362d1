"""Exact decoding: how many drafted tokens Full keeps, the speed beside Full, and whether the tokens are Full's."""
