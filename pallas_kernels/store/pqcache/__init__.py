"""Operations of this room that only PQCache uses."""
