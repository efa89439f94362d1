"""Operations of this room that only SentenceKV uses."""
