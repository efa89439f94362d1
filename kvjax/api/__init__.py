"""The functions that users call, their compiled programs, and caches on disk."""
