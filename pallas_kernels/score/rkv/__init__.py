"""Operations of this room that only RKV uses."""
