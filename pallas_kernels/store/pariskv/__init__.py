"""Operations of this room that only ParisKV uses."""
