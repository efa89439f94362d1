"""Operations of this room that only KeyDiff uses."""
