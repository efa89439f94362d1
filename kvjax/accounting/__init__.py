"""Accounting: tokens attended, bytes read by a decode step, bytes that a cache needs."""
