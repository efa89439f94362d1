"""Named models and repositories: where they come from, and what is kept on disk."""
