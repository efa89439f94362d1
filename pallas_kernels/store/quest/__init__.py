"""Operations of this room that only Quest uses."""
