"""Accounting: tokens attended, bytes read by a decode step, bytes that a cache needs, and the most that fits a device."""

from kvjax.accounting.fits import largest_budget, longest_prompt, most_rows

__all__ = ["largest_budget", "longest_prompt", "most_rows"]
